"""What this machine and these libraries give: the processor, Numba's compiler and its cache, torch's threads.

All that is private to Numba or differs between platforms is used in this file only, and each has a plain way where it
is missing:

    vector code for this processor    plain compiled loops (`plain_loops.py`; chosen in `kernels/__init__.py`)
    a folder for Numba's cache        compiled anew in each process
    a compiler (NUMBA_DISABLE_JIT)    the float64 definition; the loops of `allocation` as Python runs them
    torch's OpenMP library            plain threads, with the same results
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import logging
import os
import platform
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba.core import codegen, event

from sipp.scoring.kernels.cpu.writing import entry

_log = logging.getLogger("sipp")

# --- The processor ----------------------------------------------------------------------------------------------------

PROCESSOR = platform.machine()
_FEATURES = (
    codegen.get_host_cpu_features() if numba.config.CPU_FEATURES is None else numba.config.CPU_FEATURES  # type: ignore[attr-defined]
).split(",")
IS_COMPILED = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
# The vector code is portable LLVM, but its tiles are cut for these processors and it was run on no other.
HAS_VECTOR_CODE = IS_COMPILED and PROCESSOR.lower() in ("x86_64", "amd64")
HAS_AVX2 = "+avx2" in _FEATURES
WIDE = "+avx512f" in _FEATURES  # 32 registers of 16 floats; else 16 of 8
HAS_FUSED = "+fma" in _FEATURES or PROCESSOR in ("aarch64", "arm64")  # a product and a sum that are rounded once

# --- The compiler -----------------------------------------------------------------------------------------------------

# Numba sees changes of the file a function is in, but not of those it calls into: a stamp is part of every name.


def stamp_of(folder: Path, start: int = 0) -> int:
    """A number that changes with every Python file of a folder."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))), start)


_STAMP = stamp_of(Path(__file__).parent, int(HAS_VECTOR_CODE))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by Numba at its first call, cached on disk where a folder can be written.

    With no fast-math flag: a compiler that may reorder or join operations does so differently for a function that was
    inlined fresh and one that came out of the cache, and the same seed would not give the same bits. A sum that has to
    be fast is written with its own order of terms, a product and a sum rounded once by name (`llvm.py`).
    """
    if not IS_COMPILED:
        return _interpreted(function)
    function.__qualname__ += f"_{_STAMP:x}"  # names the cache
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        made = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache folder
        _not_kept("no folder can be written")
        return numba.njit(**options)(function)
    _survive_full_disk(made)
    return made


def _survive_full_disk(made: Any) -> None:
    """Lets a compiled function that cannot be saved be used all the same. Numba has no public way to say so."""
    cache: Any = getattr(made, "_cache", None)
    save = getattr(cache, "save_overload", None)
    if save is None:  # another version of Numba: its own behaviour
        return

    def save_if_possible(*overload: Any) -> None:
        try:
            save(*overload)
        except OSError as error:
            _not_kept(str(error))

    cache.save_overload = save_if_possible


def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Python runs it (NUMBA_DISABLE_JIT=1), with compiled code's silence about 1 / 0."""

    @functools.wraps(function)
    def run(*given: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*given)

    return run


class Native:
    """A function of whole numbers (sizes, addresses) that is compiled by itself when it is first called.

    Called from Python it runs without the Python lock. Compiled code calls it by its `address` (`llvm.calling`), so
    what lies behind that is not compiled again with its callers, and what a call does not need not at all. It is
    written in the Python of `writing.py`; a plain function that it calls becomes a part of it.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        function.__qualname__ += f"_{_STAMP:x}"  # names the cache
        self._function = function
        self._lock = threading.Lock()
        self._code: Any = None

    def _compiled(self) -> Any:
        with self._lock:
            if self._code is None:
                n_arguments = len(inspect.signature(self._function).parameters)
                self._code = _cached_cfunc(f"void({', '.join(['int64'] * n_arguments)})", entry(self._function))
            return self._code

    @property
    def address(self) -> int:
        return int(self._compiled().address)

    def __call__(self, *numbers: int) -> None:
        self._compiled().ctypes(*numbers)


def _cached_cfunc(signature: str, function: Callable[..., None]) -> Any:
    """The function compiled at once; from the cache, and into it, where a folder can be written."""
    _watch.on_start()
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError) as error:  # no folder for the cache, or a full disk
        _not_kept(str(error))
        return numba.cfunc(signature, error_model="numpy")(function)
    finally:
        _watch.on_end()


class _Watch(event.Listener):
    """Tells how long compiling takes; functions that another one calls are compiled within its time, and not added.

    Meanwhile Python's collector of cycles rests: the compiler makes many small objects and keeps them, and to look
    through them again and again, with all that torch has loaded, took up to a fifth of the time.
    """

    def __init__(self) -> None:
        self._begun: list[float] = []
        self._lock = threading.Lock()
        self._collects = True

    def on_start(self, event: event.Event | None = None) -> None:
        with self._lock:
            if not self._begun:
                self._collects = gc.isenabled()
                gc.disable()
            self._begun.append(time.perf_counter())

    def on_end(self, event: event.Event | None = None) -> None:
        with self._lock:
            begun = self._begun.pop()
            if not self._begun:
                if self._collects:
                    gc.enable()
                _tell(time.perf_counter() - begun)


_watch = _Watch()
event.register("numba:compile", _watch)
_TOLD_AFTER = 1.0  # seconds of compiling
_spent = 0.0
_is_kept = True  # what is compiled is there for the next process


def _not_kept(why: str) -> None:
    """Notes that compiled code could not be put into Numba's cache."""
    global _is_kept
    _is_kept = False
    _log.info("Numba's cache could not be written (%s): compiled anew in each process", why)


def compiling_seconds() -> float:
    """How long this process has compiled so far: work of the first use after an install, and of no other."""
    return _spent


def _tell(seconds: float) -> None:
    """Counts the seconds of compiling, and says once what takes so long."""
    global _spent
    before, _spent = _spent, _spent + seconds
    if before < _TOLD_AFTER <= _spent:
        often = "once after an install" if _is_kept else "in each process: set NUMBA_CACHE_DIR to a folder for it"
        _log.warning("compiling for this processor: a few seconds, %s", often)


# --- Threads ----------------------------------------------------------------------------------------------------------
# torch's threads (OpenMP) wait actively for a while after a parallel operation, to be quick at the next one. A second
# set of threads would share the cores with them just when a layer's kernel follows its forward pass; so the work goes
# to the same ones (docs/performance-log.md). GOMP_parallel is GNU's way in; LLVM's and Intel's libraries have it too.

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_OPENMP_FILES = ("libgomp*", "libomp*", "libiomp5*")
_OPENMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


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


def run_job(function: Native, job: list[int], n: int) -> None:
    """Calls a compiled function with the address of these numbers on n threads."""
    library, numbers = torch_openmp(), (ctypes.c_int64 * len(job))(*job)
    address, body = ctypes.addressof(numbers), function.address
    if library is None or n == 1:
        run_parallel(lambda _: function(address), n)
    else:
        library.GOMP_parallel(_Body(body), address, n, 0)


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


@functools.cache
def torch_openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch runs on; None, which is said once, where none is found that takes our work."""
    for path in _openmp_files(Path(torch.__file__).parent):
        library = _already_loaded(path)
        if library is not None and all(hasattr(library, name) for name in _OPENMP_FUNCTIONS):
            library.GOMP_parallel.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
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
