"""Functions compiled by Numba: Python loops, the vector code they call, and a cache on disk for both.

    @CompiledLoop                      a function of integers (sizes and addresses), compiled on its first call; Python
                                       calls it, alone or on threads (`call_each`)
    @inlined                           inlined into the functions that call it
    @primitive(VOID, INT, INT)         written in LLVM instructions (`vector.py`); both of the above can call it

No fast-math flag is ever set. With one, LLVM may drop NaN, reorder sums, or fuse a multiply and an add, and it decides
differently for a function inlined just now and one loaded from the cache: the same seed would not give the same bits.
Where a sum must be fast, the code fixes its order of terms itself and asks for a fused multiply-add by name (`fused`).
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from sipp.native.machine_code import Arguments, MachineCode, argument_list, generate, run
from sipp.native.processor import HAS_VECTOR_CODE
from sipp.native.threads import run_parallel, torch_openmp
from sipp.native.vector import F32, F64, I32, I64, LONG_BYTES, address_of, call_at, element, load

_log = logging.getLogger("sipp")

VOID, INT, REAL, DOUBLE = types.none, types.int64, types.float32, types.float64  # signatures of primitives

# --- Compiled functions -----------------------------------------------------------------------------------------------


def stamp_of(*folders: Path) -> int:
    """A checksum of all Python files in these folders and in this one.

    Numba's cache notices changes to the file that defines a function, but not to files it calls into or takes numbers
    from. So this checksum becomes part of each function's name.
    """
    files = [path for place in (Path(__file__).parent, *folders) for path in sorted(place.glob("*.py"))]
    return zlib.crc32(b"".join(path.read_bytes() for path in files), int(HAS_VECTOR_CODE))


_stamp_of = functools.cache(stamp_of)


def _stamped(function: Callable[..., Any]) -> Callable[..., Any]:
    own = Path(function.__code__.co_filename).parent
    function.__qualname__ += f"_{_stamp_of(own, own.parent):x}"  # names the cache
    return function


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Inlines the function into its callers; it is never compiled on its own."""
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)


class CompiledLoop:
    """A function of integers (sizes, addresses), compiled on its first call; it runs without the GIL."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = _stamped(function)
        self._lock = threading.Lock()
        self._code: Any = None
        self._call: Any = None
        self._address: int | None = None
        self.parameters = tuple(inspect.signature(function).parameters)

    def _compiled(self) -> Any:
        with self._lock:
            if self._code is None:
                self._code = _cached_cfunc(types.none(*[types.int64] * len(self.parameters)), self._function)
            return self._code

    @property
    def address(self) -> int:
        if self._address is None:
            self._address = int(self._compiled().address)
        return self._address

    def __call__(self, *numbers: int) -> None:
        if self._call is None:
            self._call = self._compiled().ctypes  # Numba creates a new wrapper on each access
        self._call(*numbers)


def _cached_cfunc(signature: Any, function: Callable[..., None]) -> Any:
    """Compiles the function now, or loads it from the cache if one is writable.

    Garbage collection rests meanwhile: the compiler creates many small objects and keeps them, and scanning them again
    and again, together with everything torch has loaded, took up to a fifth of the time.
    """
    start, is_kept, collects = time.perf_counter(), True, gc.isenabled()
    gc.disable()
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError) as error:  # no folder for the cache, or a full disk
        _log.info("Numba's cache could not be written (%s): each process compiles again", error)
        is_kept = False
        return numba.cfunc(signature, error_model="numpy")(function)
    finally:
        if collects:
            gc.enable()
        _add_seconds(time.perf_counter() - start, is_kept)


def call_each(function: CompiledLoop, rows: Sequence[tuple[int, ...]]) -> None:
    """Calls function(*row) for all rows, on several threads; plain ones if torch's OpenMP library is missing.

    The caller allocates what the threads write: memory allocated in a thread is slow to free. The threads take rows in
    compiled code: with a Python function per thread they would wait for the GIL, and handing that over takes longer
    than a small layer.
    """
    if len(rows) == 1:
        function(*rows[0])
    elif torch_openmp() is None:
        run_parallel(lambda i: function(*rows[i]), len(rows))
    else:
        numbers = np.array(rows, np.int64)
        code = _caller(len(function.parameters))
        addresses = {"function": function.address, "rows": numbers.ctypes.data}
        run(code, argument_list(code, addresses), len(rows), len(rows))


def _caller(n_numbers: int) -> MachineCode:
    """Code that takes rows of this many numbers and calls a function with each."""

    def emit(b: Any, arguments: Arguments) -> None:
        row = address_of(b, arguments.number("rows"), arguments.drawn, n_numbers * LONG_BYTES)
        call_at(b, arguments.number("function"), [load(b, row, I64, i * LONG_BYTES) for i in range(n_numbers)])

    return generate(("calls", n_numbers), ("function", "rows"), emit)


# --- Functions in LLVM instructions -----------------------------------------------------------------------------------


def primitive(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: makes `emit(b, *values)`, which emits LLVM instructions, callable from compiled code."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def typed(typingctx: Any, *argument_types: Any) -> Any:
            def codegen(context: Any, b: Any, signature: Any, values: Any) -> Any:
                value = emit(b, *values)
                return context.get_dummy_value() if result is VOID else value

            return result(*arguments), codegen

        # Numba inspects the signature and needs one name per argument
        names = ("typingctx", *(f"x{i}" for i in range(len(arguments))))
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return wrap


def reading(record: type) -> Any:
    """Returns a function for compiled code that reads a NamedTuple of integers from an address."""
    n = len(record._fields)  # type: ignore[attr-defined]

    @primitive(types.NamedUniTuple(INT, n, record), INT)
    def read(b: Any, address: Any) -> Any:
        packed = ir.Constant(ir.ArrayType(I64, n), ir.Undefined)
        for i in range(n):
            packed = b.insert_value(packed, load(b, address, I64, LONG_BYTES * i), i)
        return packed

    return read


def _array_of(number: Any, kind: Any) -> tuple[Any, Any]:
    """get(address, i) and put(address, i, value) for compiled code, for an array of this number type."""
    n_bytes = number.bitwidth // 8

    @primitive(number, INT, INT)
    def get(b: Any, address: Any, i: Any) -> Any:
        return b.load(element(b, address, i, kind), align=n_bytes, typ=kind)

    @primitive(VOID, INT, INT, number)
    def put(b: Any, address: Any, i: Any, value: Any) -> None:
        b.store(value, element(b, address, i, kind), align=n_bytes)

    return get, put


float_at, put_float = _array_of(REAL, F32)
double_at, put_double = _array_of(DOUBLE, F64)
int_at, put_int = _array_of(types.int32, I32)
long_at, put_long = _array_of(INT, I64)


# --- Compile time -----------------------------------------------------------------------------------------------------

_REPORTED_AFTER = 1.0  # seconds of compiling
_spent = 0.0


def _add_seconds(seconds: float, is_kept: bool) -> None:
    """Adds to the compile time, and logs once that compiling takes a while."""
    global _spent
    before, _spent = _spent, _spent + seconds
    if before < _REPORTED_AFTER <= _spent:
        often = "the first time this part is used"
        if not is_kept:
            often = "in each process: set NUMBA_CACHE_DIR to a folder for it"
        _log.warning("compiling for this processor: a few seconds, %s", often)
