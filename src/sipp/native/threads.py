"""Runs compiled code on torch's own OpenMP threads, or on plain threads, with the same results.

After a parallel operation, OpenMP threads spin for a while so that the next one starts quickly. A second thread pool
would compete with them for the cores just when a kernel follows a layer's forward pass, so we use the same threads
(benchmarks/LOG.md). GOMP_parallel is GNU's entry point; LLVM's and Intel's libraries have it too.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("sipp")

Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # a function of one address
SHARED_VALUES = 2**17  # with fewer values, one thread is done before a second has started
_OPENMP_FILES = ("libgomp*", "libomp*", "libiomp5*")


def threads_for(values: Tensor, n_reads: int = 1) -> int:
    """How many threads to use for these values, if processing one costs as much as reading it `n_reads` times."""
    return torch.get_num_threads() if n_reads * values.numel() >= SHARED_VALUES else 1


def cut_evenly(n: int, n_parts: int) -> list[tuple[int, int]]:
    """Splits 0..n into at most n_parts ranges of nearly equal length."""
    cuts = [n * i // n_parts for i in range(n_parts + 1)]
    return [(first, last) for first, last in pairwise(cuts) if last > first] or [(0, 0)]


def run_parallel(work: Callable[[int], None], n: int) -> None:
    """Calls work(0) .. work(n - 1), one plain thread each, and re-raises the first exception.

    The caller allocates what the threads write: memory allocated in a thread is slow to free.
    """
    if n == 1:
        work(0)
        return
    with ThreadPoolExecutor(n - 1) as pool:
        waiting = [pool.submit(work, i) for i in range(1, n)]
        work(0)  # this thread would only wait
        for future in waiting:
            future.result()


def run_on_threads(function: Any, numbers: Any, n: int) -> None:
    """Calls a compiled function (a `Body`) with the address of these numbers, on up to n threads.

    The function must take shares of the work itself until none are left: there may be fewer threads, and without
    torch's library only this one.
    """
    library = torch_openmp() if n > 1 else None
    if library is None:
        function(numbers)
    else:
        library.GOMP_parallel(function, numbers, n, 0)


@functools.cache
def torch_openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch uses; None (logged once) if none is found that has the function we need."""
    for path in _openmp_files(Path(torch.__file__).parent):
        library = _already_loaded(path)
        if library is not None and hasattr(library, "GOMP_parallel"):
            library.GOMP_parallel.argtypes = [Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
            return library
    _log.info("torch's OpenMP library was not found: the CPU kernels run on plain threads")
    return None


def _openmp_files(torch_folder: Path) -> Iterator[Path]:
    """Where torch's wheels keep their OpenMP library: Linux and macOS, x86 and ARM."""
    for folder in (torch_folder / "lib", torch_folder.parent / "torch.libs"):
        for pattern in _OPENMP_FILES:
            yield from sorted(folder.glob(pattern))


def _already_loaded(path: Path) -> ctypes.CDLL | None:
    """The library if this process has loaded it: loading another copy would start a second thread pool."""
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    except OSError:
        return None
