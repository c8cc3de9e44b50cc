"""A sparse matrix times one vector: LANES rows side by side, each looking at its own place in a window of the vector.

out[row] = act(bias[row] + sum over kept weights:  value * x[column]  + beside[row])
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from torch import Tensor

from sipp.runtime.buffers import Arena, token_buffer
from sipp.runtime.code import FLOAT, I8, I16, I32, I64, Loop, constant, generate, vector
from sipp.runtime.layers import Layer, dense_step
from sipp.runtime.operands import filled_run, fills_of, token_beside, token_input
from sipp.runtime.packing import LANES, Windows, pack_windows
from sipp.runtime.product import raise_flag
from sipp.runtime.steps import LEAST_GAIN, Job, Step, Values
from sipp.runtime.tails import emit_tail
from sipp.scoring.kernels.cpu.host import HAS_AVX2, WIDE
from sipp.scoring.kernels.cpu.llvm import fused

MOST_COLUMNS = LANES * 2**16
LOOKUP = "llvm.x86.avx512.permvar.sf.512" if WIDE else "llvm.x86.avx2.permps" if HAS_AVX2 else None

# Numbers of the job, after its head
X, OUT, BESIDE, BIAS, ENDS, VALUES, PLACES, WINDOWS, N_GROUPS, FLAG, LARGER = range(11)


def single_step(layer: Layer, weight: Tensor, values: Values, arena: Arena) -> Step:
    """The step of a linear layer on one token."""
    op, x = layer.op, values[layer.op.args[0].value]
    source, strides = token_input(op.args[0].value, x, arena)
    out = arena.add(token_buffer(1, len(weight)))
    beside = None
    if op.beside is not None:
        beside = token_beside(op.beside, values[op.beside], strides, len(weight), arena)
    packed = pack_windows(weight.numpy())
    bias, larger = (padded_bias(part, len(weight)) for part in (layer.bias, layer.larger))
    numbers = [
        source.data.data_ptr(), out.data_CHWN.data_ptr(), 0 if beside is None else beside.data.data_ptr(),
        bias.data_ptr(), *addresses(packed), len(packed.ends) - 1, arena.flag.address, larger.data_ptr(),
    ]  # fmt: skip
    form = (op.act, beside is not None, layer.larger is not None)
    code = generate(("single", *form), lambda loop: _emit(loop, *form))
    job = Job(code, numbers, len(packed.ends) - 1, (packed, bias, larger, source, out, beside, arena.flag))
    fills = fills_of(source, beside)
    fast = filled_run(fills, job, op.out, out.tokens(tuple(x.shape[:-1]), strides))
    for fill in fills:
        fill(values)
    seconds = job.time()
    dense = dense_step(layer, weight, values)
    assert dense.dense_seconds is not None
    chosen = dense
    if seconds <= LEAST_GAIN * dense.dense_seconds:
        chosen = Step(
            op.name, f"sparse, one vector x {LANES}", fast, op.out, dense.keep, packed.n_bytes, weight.nbytes,
            seconds, dense.dense_seconds,
        )  # fmt: skip
    chosen.fast(values)
    return chosen


def addresses(packed: Windows) -> list[int]:
    return [part.ctypes.data for part in (packed.ends, packed.values, packed.places, packed.windows)]


def padded_bias(bias: Tensor | None, n_rows: int) -> Tensor:
    """The bias, or zeros, in whole groups of rows."""
    padded = torch.zeros(-(-n_rows // LANES) * LANES, dtype=torch.float32, device="cpu")
    if bias is not None:
        padded[:n_rows] = bias
    return padded


def _emit(loop: Loop, act: str, has_beside: bool, has_larger: bool) -> None:
    b, zero = loop.b, constant(0.0, LANES)
    bad = loop.cells([zero])[0]
    with loop.each(*loop.share(loop.number(N_GROUPS))) as group:
        value = group_sums(loop, group, [loop.number(n) for n in (X, BIAS, ENDS, VALUES, PLACES, WINDOWS)])
        row = b.mul(group, I64(LANES))
        if has_larger:
            larger = loop.load(loop.at(loop.number(LARGER), row), vector(LANES))
            b.store(fused(b, b.fmul(value, larger), zero, b.load(bad)), bad)
        if has_beside:
            value = b.fadd(value, loop.load(loop.at(loop.number(BESIDE), row), vector(LANES)))
        b.store(fused(b, value, zero, b.load(bad)), bad)
        loop.store(emit_tail(loop, act, value, LANES), loop.at(loop.number(OUT), row))
    raise_flag(loop, b.load(bad), LANES, loop.number(FLAG))


def group_sums(loop: Loop, group: Any, addresses: list[Any]) -> Any:
    """bias + W x for the rows of one group, two sums each that take turns."""
    b = loop.b
    x, bias, ends, values, places, windows = addresses
    end_at = loop.at(ends, group, 8)
    sums = loop.cells([loop.load(loop.at(bias, b.mul(group, I64(LANES))), vector(LANES)), constant(0.0, LANES)])
    with loop.each(loop.load(end_at, I64), loop.load(end_at, I64, 8), len(sums)) as start:
        for i, cell in enumerate(sums):
            step = b.add(start, I64(i))
            window = b.zext(loop.load(loop.at(windows, step, 2), I16), I64)
            place = b.zext(loop.load(loop.at(places, step, LANES), vector(LANES, I8)), vector(LANES, I32))
            term = _look_up(loop, loop.at(x, window, LANES * FLOAT), place)
            value = loop.load(loop.at(values, step, LANES * FLOAT), vector(LANES))
            b.store(fused(b, value, term, b.load(cell)), cell)
    return b.fadd(*(b.load(cell) for cell in sums))


def _look_up(loop: Loop, window: Any, place: Any) -> Any:
    """The elements of a window at these places: one instruction where the processor has it."""
    b = loop.b
    if LOOKUP is None:
        found = constant(0.0, LANES)
        for lane in range(LANES):
            at = b.zext(b.extract_element(place, I32(lane)), I64)
            found = b.insert_element(found, loop.load(loop.at(window, at)), I32(lane))
        return found
    kinds = [vector(LANES), vector(LANES, I32)]
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kinds[0], kinds), LOOKUP)
    return b.call(function, [loop.load(window, vector(LANES)), place])
