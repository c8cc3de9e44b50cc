"""How the loops of the CPU kernels are compiled: by Numba, once for a machine where its cache can be written."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

# Numba sees changes of the file a function is in, but not of those it calls into
_STAMP = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
_log = logging.getLogger("sipp")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by Numba at its first call, cached on disk where a folder can be written.

    With no fast-math flag: a compiler that may reorder or join operations does so differently for a function that was
    inlined fresh and one that came out of the cache, and the same seed would not give the same bits. A sum that has to
    be fast is written with its own order of terms, a product and a sum rounded once by name (`target.py`).
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return _interpreted(function)
    function.__qualname__ += f"_{_STAMP:x}"  # names the cache
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        made = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache folder
        _log.info("no writable folder for Numba's cache: %s is compiled anew in each process", function.__name__)
        return numba.njit(**options)(function)
    save = made._cache.save_overload

    def save_if_possible(*overload: Any) -> None:
        try:
            save(*overload)
        except OSError as error:  # a full disk: the compiled function is there all the same
            _log.info("Numba's cache could not be written (%s): compiled anew in each process", error)

    made._cache.save_overload = save_if_possible
    return made


def _interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as Python runs it (NUMBA_DISABLE_JIT=1), with compiled code's silence about 1 / 0."""

    @functools.wraps(function)
    def run(*given: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*given)

    return run


def entry(function: Callable[[Any], None]) -> Any:
    """The function of one address, compiled at once: a ctypes function, which threads call without Python."""
    function.__qualname__ += f"_{_STAMP:x}"
    try:
        made = numba.cfunc("void(voidptr)", cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError):
        made = numba.cfunc("void(voidptr)", error_model="numpy")(function)
    result: Any = made.ctypes
    result.code = made  # lives as long
    return result
