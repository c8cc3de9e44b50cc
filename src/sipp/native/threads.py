"""Work on torch's own threads; on plain ones, with the same results, where its OpenMP library is not found.

torch's threads (OpenMP) wait actively for a while after a parallel operation, to be quick at the next one. A second
set of threads would share the cores with them just when a layer's kernel follows its forward pass; so the work goes
to the same ones (docs/performance-log.md). GOMP_parallel is GNU's way in; LLVM's and Intel's libraries have it too.
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
SHARED_VALUES = 2**17  # fewer than this many are read sooner than a second thread is there
_OPENMP_FILES = ("libgomp*", "libomp*", "libiomp5*")
_OPENMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def threads_for(values: Tensor, n_reads: int = 1) -> int:
    """How many threads go through these values, each of which takes as long as reading it so many times."""
    return torch.get_num_threads() if n_reads * values.numel() >= SHARED_VALUES else 1


def cut_evenly(n: int, n_parts: int) -> list[tuple[int, int]]:
    """0..n cut into at most n_parts stretches of nearly the same length."""
    cuts = [n * i // n_parts for i in range(n_parts + 1)]
    return [(first, last) for first, last in pairwise(cuts) if last > first] or [(0, 0)]


def run_parallel(work: Callable[[int], None], n: int) -> None:
    """Calls work(0) .. work(n - 1), a thread each, and raises what one of them raised.

    What the threads write is allocated before, by the caller: memory that a thread has had is slow to return.
    """
    library = torch_openmp()
    if n == 1:
        work(0)
    elif library is None:
        with ThreadPoolExecutor(n - 1) as pool:
            waiting = [pool.submit(work, i) for i in range(1, n)]
            work(0)  # the caller would only wait
            for future in waiting:
                future.result()
    else:
        _run_in(library, work, n)


def _run_in(library: ctypes.CDLL, work: Callable[[int], None], n: int) -> None:
    failures: list[BaseException] = []

    def body(_: int | None) -> None:
        try:  # an exception cannot leave a callback
            # fewer threads than asked for may come
            for i in range(library.omp_get_thread_num(), n, library.omp_get_num_threads()):
                work(i)
        except BaseException as failure:
            failures.append(failure)

    library.GOMP_parallel(Body(body), None, n, 0)  # the Python lock is free meanwhile; `body` takes it in each thread
    if failures:
        raise failures[0]


def run_on_threads(function: Any, numbers: Any, n: int) -> None:
    """Calls a compiled function of one address (a `Body`) with that of these numbers, on up to n threads.

    It has to draw its share of the work itself, until none is left: fewer threads may come, and without torch's
    library it is the caller's alone.
    """
    library = torch_openmp() if n > 1 else None
    if library is None:
        function(numbers)
    else:
        library.GOMP_parallel(function, numbers, n, 0)


@functools.cache
def torch_openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch runs on; None, which is said once, where none is found that takes our work."""
    for path in _openmp_files(Path(torch.__file__).parent):
        library = _already_loaded(path)
        if library is not None and all(hasattr(library, name) for name in _OPENMP_FUNCTIONS):
            library.GOMP_parallel.argtypes = [Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
            return library
    _log.info("torch's OpenMP library was not found: the CPU kernels run on plain threads")
    return None


def _openmp_files(torch_folder: Path) -> Iterator[Path]:
    """Where a wheel of torch has its OpenMP library: Linux and macOS, x86 and ARM."""
    for folder in (torch_folder / "lib", torch_folder.parent / "torch.libs"):
        for pattern in _OPENMP_FILES:
            yield from sorted(folder.glob(pattern))


def _already_loaded(path: Path) -> ctypes.CDLL | None:
    """The library if this process has it: to load another would be the second set of threads."""
    only_loaded = getattr(os, "RTLD_NOLOAD", None)  # not on Windows
    if only_loaded is None:
        return None
    try:
        return ctypes.CDLL(str(path), mode=only_loaded)
    except OSError:
        return None
