"""LLVM instructions -> machine code for this processor: the few pieces that all generated loops are written with.

A generated function takes one address, that of a job: 64-bit numbers, most of them addresses. Every thread calls it
with the same job and takes its own share of the tasks. There is no fast-math flag: only products and sums that are
named `fused` are rounded once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba.core import cgutils, codegen

from sipp.scoring.kernels.cpu.host import torch_openmp

F32, I1, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(n) for n in (1, 8, 16, 32, 64))
FLOAT = 4  # bytes
HEAD = 2  # numbers at the start of every job: a ticket that threads draw, their number
OPTIMIZE = 2  # LLVM's level


@dataclass(frozen=True)
class Code:
    """A compiled function of a job's address; `keep` holds what its machine code lives in."""

    function: Any
    keep: Any


class Loop:
    """What a generated function is written with: a builder `b`, the numbers of the job, which share is to be done."""

    def __init__(self, b: Any, job: Any, share: Any, n_shares: Any) -> None:
        self.b, self._job = b, job
        self._share, self._n_shares = share, n_shares

    def number(self, i: int) -> Any:
        """The i-th number of the job after its head."""
        return self.b.load(self.b.gep(self._job, [I64(HEAD + i)]), typ=I64)

    def real(self, i: int) -> Any:
        """The i-th number of the job as a float32, whose bits it holds."""
        return self.b.bitcast(self.b.trunc(self.number(i), I32), F32)

    @contextmanager
    def each(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """A loop over start, start + step .. stop: gives the index."""
        span = self.b.sub(stop, start)
        n = span if step == 1 else self.b.sdiv(self.b.add(span, I64(step - 1)), I64(step))
        with cgutils.for_range(self.b, n, intp=I64) as loop:
            index = loop.index if step == 1 else self.b.mul(loop.index, I64(step))
            yield self.b.add(start, index)

    def share(self, n: Any) -> tuple[Any, Any]:
        """The stretch of 0 .. n that belongs to this share."""
        first = self.b.sdiv(self.b.mul(n, self._share), self._n_shares)
        last = self.b.sdiv(self.b.mul(n, self.b.add(self._share, I64(1))), self._n_shares)
        return first, last

    def at(self, base: Any, index: Any, size: int = FLOAT) -> Any:
        """The address of element `index` of items of `size` bytes."""
        return self.b.add(base, self.b.mul(index, I64(size)))

    def load(self, address: Any, kind: Any = F32, offset: int = 0) -> Any:
        if offset:
            address = self.b.add(address, I64(offset))
        size = min(FLOAT, kind.width // 8) if isinstance(kind, ir.IntType) else FLOAT
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=size, typ=kind)

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        if offset:
            address = self.b.add(address, I64(offset))
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=FLOAT)

    def splat(self, scalar: Any, lanes: int) -> Any:
        if lanes == 1:
            return scalar
        one = self.b.insert_element(ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, I32(0))
        return self.b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))

    def cells(self, values: list[Any]) -> list[Any]:
        """Variables (LLVM turns them into registers) that start with these values."""
        made = [cgutils.alloca_once(self.b, value.type) for value in values]
        for cell, value in zip(made, values):
            self.b.store(value, cell)
        return made


def vector(lanes: int, kind: Any = F32) -> Any:
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def constant(value: float, lanes: int) -> Any:
    return ir.Constant(F32, value) if lanes == 1 else ir.Constant(vector(lanes), [value] * lanes)


_lock = threading.Lock()
_made: dict[Any, Code] = {}


def generate(key: tuple[Any, ...], emit: Callable[[Loop], None]) -> Code:
    """The function whose body `emit` writes; `key` names all that it is made from: the same key, the same function."""
    with _lock:
        if key not in _made:
            _made[key] = _compile(emit)
        return _made[key]


def _compile(emit: Callable[[Loop], None]) -> Code:
    llvm.initialize_native_target()  # numba does it as well, but need not have compiled anything yet
    llvm.initialize_native_asmprinter()
    module = ir.Module("sipp")
    module.triple = llvm.get_process_triple()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64.as_pointer()]), "run")
    builder = ir.IRBuilder(function.append_basic_block())
    _emit_shares(builder, function, emit)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=codegen.get_host_cpu_features(), opt=OPTIMIZE, jit=True
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=OPTIMIZE)
    options.loop_unrolling = False  # what is unrolled is written so
    options.slp_vectorization = options.loop_vectorization = False
    builder_of_passes = llvm.create_pass_builder(machine, options)
    builder_of_passes.getModulePassManager().run(parsed, builder_of_passes)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    made = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("run"))
    return Code(made, (engine, machine))


def _emit_shares(b: Any, function: Any, emit: Callable[[Loop], None]) -> None:
    """Threads draw shares until none is left: fewer threads than asked for may come, and one may be held up."""
    job = function.args[0]
    n_shares = b.load(b.gep(job, [I64(1)]), typ=I64)
    draw, work, end = (function.append_basic_block(name) for name in ("draw", "work", "end"))
    b.branch(draw)
    b.position_at_end(draw)
    share = b.atomic_rmw("add", job, I64(1), "seq_cst")
    b.cbranch(b.icmp_signed("<", share, n_shares), work, end)
    b.position_at_end(work)
    emit(Loop(b, job, share, n_shares))
    b.branch(draw)
    b.position_at_end(end)
    b.ret_void()


def run(code: Code, job: Any, n_shares: int, n_threads: int) -> None:
    """Runs a generated function on torch's threads; `job` is a ctypes array with a head of HEAD numbers."""
    library = torch_openmp()
    job[0], job[1] = 0, n_shares
    if library is None or n_threads == 1:
        code.function(job)
    else:
        library.GOMP_parallel(code.function, job, n_threads, 0)
