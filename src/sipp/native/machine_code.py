"""Generates functions at run time, one per tile shape: LLVM instructions in, machine code out.

A function receives the address of its arguments, 64-bit integers (mostly addresses) that it reads by name. All threads
call it with the same arguments and take shares of the work from a common counter until none are left, so it does not
matter if fewer threads run than requested, or if one is delayed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir

from sipp.native.processor import FEATURES, NAME
from sipp.native.threads import Body, run_on_threads
from sipp.native.vector import F32, I32, I64

_HEAD = 2  # numbers in front of the arguments: the next share to take, and the number of shares
_LEVEL = 2  # LLVM optimisation level


@dataclass(frozen=True)
class MachineCode:
    """A compiled function, the names of its arguments, and the library that owns its machine code."""

    function: Any
    names: tuple[str, ...]
    library: Any


class Arguments:
    """What generated code can read: the function's arguments, and the share of the work taken now."""

    def __init__(self, b: Any, names: tuple[str, ...], head: Any, share: Any, n_shares: Any) -> None:
        self._b, self._head, self.drawn, self._n_shares = b, head, share, n_shares
        self._places = {name: i for i, name in enumerate(names)}

    def number(self, name: str) -> Any:
        """The argument of this name."""
        return self._b.load(self._b.gep(self._head, [I64(_HEAD + self._places[name])]), typ=I64)

    def real(self, name: str) -> Any:
        """The argument of this name as a float32, stored as its bits (`bits_of`)."""
        return self._b.bitcast(self._b.trunc(self.number(name), I32), F32)

    def share(self, n: Any) -> tuple[Any, Any]:
        """The range of tasks, out of 0 .. n, that belongs to the current share."""
        b = self._b
        first = b.sdiv(b.mul(n, self.drawn), self._n_shares)
        return first, b.sdiv(b.mul(n, b.add(self.drawn, I64(1))), self._n_shares)


_lock = threading.Lock()
_made: dict[Any, MachineCode] = {}
_linker: Any = None


def generate(key: tuple[Any, ...], names: Iterable[str], emit: Callable[[Any, Arguments], None]) -> MachineCode:
    """Compiles a function with these argument names, whose body `emit(b, args)` writes.

    Results are cached by `key`, which must contain everything that `emit` depends on.
    """
    with _lock:
        if key not in _made:
            _made[key] = _compile(tuple(names), emit)
        return _made[key]


def _compile(names: tuple[str, ...], emit: Callable[[Any, Arguments], None]) -> MachineCode:
    global _linker
    llvm.initialize_native_target()  # Numba does this too, but may not have compiled anything yet
    llvm.initialize_native_asmprinter()
    module = ir.Module("sipp")
    module.triple = llvm.get_process_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), "run")
    _write_shares(function, names, emit)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    machine = _machine()
    options = llvm.create_pipeline_tuning_options(speed_level=_LEVEL)
    options.loop_unrolling = False  # the generated code is already unrolled
    options.slp_vectorization = options.loop_vectorization = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    if _linker is None:
        _linker = llvm.create_lljit_compiler(_machine())  # it takes ownership of the machine
    library = llvm.JITLibraryBuilder().add_object_img(machine.emit_object(parsed)).add_current_process()
    linked = library.export_symbol("run").link(_linker, f"sipp {len(_made)}")
    return MachineCode(Body(linked["run"]), names, linked)


def _machine() -> Any:
    return llvm.Target.from_default_triple().create_target_machine(cpu=NAME, features=FEATURES, opt=_LEVEL, jit=True)


def _write_shares(function: Any, names: tuple[str, ...], emit: Callable[[Any, Arguments], None]) -> None:
    b, head = ir.IRBuilder(function.append_basic_block()), function.args[0]
    n_shares = b.load(b.gep(head, [I64(1)]), typ=I64)
    draw, work, end = (function.append_basic_block(name) for name in ("draw", "work", "end"))
    b.branch(draw)
    b.position_at_end(draw)
    share = b.atomic_rmw("add", head, I64(1), "seq_cst")
    b.cbranch(b.icmp_signed("<", share, n_shares), work, end)
    b.position_at_end(work)
    emit(b, Arguments(b, names, head, share, n_shares))
    b.branch(draw)
    b.position_at_end(end)
    b.ret_void()


def argument_list(code: MachineCode, numbers: Mapping[str, int]) -> Any:
    """Packs the arguments for `run`; TypeError if the names do not match."""
    if tuple(numbers) != code.names:
        raise TypeError(f"this code takes {code.names}, not {tuple(numbers)}")
    return _array_of(_HEAD + len(numbers))(0, 0, *numbers.values())


@lru_cache(maxsize=64)
def _array_of(n_numbers: int) -> Any:
    """The type of arrays of so many numbers. ctypes drops one that is not in use, and leaves cycles behind."""
    return ctypes.c_int64 * n_numbers


def bits_of(value: float) -> int:
    """The bits of a float32 as an integer argument."""
    return ctypes.c_int32.from_buffer(ctypes.c_float(value)).value


def run(code: MachineCode, arguments: Any, n_shares: int, n_threads: int) -> None:
    """Runs a function on torch's threads, its work divided into shares."""
    arguments[0], arguments[1] = 0, n_shares
    run_on_threads(code.function, arguments, n_threads)
