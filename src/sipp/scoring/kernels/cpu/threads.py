"""Work spread over the threads that torch already has.

torch's threads (OpenMP) wait actively for a while after a parallel operation, to be quick at the next one. A second
set of threads would share the cores with them just when a layer's kernel follows its forward pass; so the work goes to
the same ones (docs/performance-log.md). Where torch is built on another OpenMP than libgomp, plain threads do it, with the
same results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_parallel(work: Callable[[int], None], n: int) -> None:
    """Nothing; calls work(0) .. work(n - 1), a thread each, and raises what one of them raised.

    What the threads write is allocated before, by the caller: memory that a thread has had is slow to return.
    """
    library = _torch_openmp()
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


def run_job(function: Any, job: list[int], n: int) -> None:
    """Nothing; calls a compiled function (`compiling.entry`) with the address of these numbers on n threads."""
    library, numbers = _torch_openmp(), (ctypes.c_int64 * len(job))(*job)
    if library is None or n == 1:
        run_parallel(lambda _: function(numbers), n)
    else:
        library.GOMP_parallel(function, numbers, n, 0)


def _run_in(library: ctypes.CDLL, work: Callable[[int], None], n: int) -> None:
    failures: list[BaseException] = []

    def body(_: int | None) -> None:
        try:  # an exception cannot leave a callback
            # fewer threads than asked for may come
            for i in range(library.omp_get_thread_num(), n, library.omp_get_num_threads()):
                work(i)
        except BaseException as failure:
            failures.append(failure)

    library.GOMP_parallel(_Body(body), None, n, 0)  # the Python lock is free meanwhile; `body` takes it in each thread
    if failures:
        raise failures[0]


@cache
def _torch_openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch brought along and has loaded, if it is libgomp."""
    path = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    try:
        library = ctypes.CDLL(str(path)) if path.exists() else None
    except OSError:
        return None
    if library is None or not hasattr(library, "GOMP_parallel"):
        return None
    library.GOMP_parallel.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    library.GOMP_parallel.restype = None
    return library
