"""A sparse matrix times one vector: LANES rows side by side, each with a sum of its own, so none waits for another.

    out[row] = act(bias[row] + sum over kept weights:  value * x[column]  + beside[row])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sipp.runtime.buffers import Arena, token_buffer
from sipp.runtime.code import F32, I16, I32, I64, Code, Loop, constant, fused, generate
from sipp.runtime.layers import Layer, dense_step, run_dense
from sipp.runtime.operands import token_beside, token_input
from sipp.runtime.packing import LANES, Interleaved, interleave, separate
from sipp.runtime.product import raise_flag
from sipp.runtime.steps import Job, Step, Values, best_time

MOST_COLUMNS = 2**16
SHARED_STEPS = 2**10  # fewer than this many are done sooner than a second thread is there

# Numbers of the job, after its head
X, OUT, BESIDE, BIAS, GROUPS, ROWS, VALUES, COLUMNS, N_GROUPS, FLAG = range(10)


def single_step(layer: Layer, weight: Tensor, values: Values, arena: Arena) -> Step:
    """The step of a linear layer on one token."""
    op, x = layer.op, values[layer.op.args[0].value]
    source, strides = token_input(op.args[0].value, x, arena)
    out = arena.add(token_buffer(1, len(weight)))
    beside = None
    if op.beside is not None:
        beside = token_beside(op.beside, values[op.beside], strides, len(weight), arena)
    packed = interleave(weight.numpy())
    bias = torch.zeros(len(weight), dtype=torch.float32, device="cpu") if layer.bias is None else layer.bias
    numbers = [
        source.data.data_ptr(), out.data_CHWN.data_ptr(), 0 if beside is None else beside.data.data_ptr(),
        bias.data_ptr(), *addresses(packed), len(packed.rows), arena.flag.data_ptr(),
    ]  # fmt: skip
    n_tasks = 1 if len(packed.values) < SHARED_STEPS else len(packed.rows)
    job = Job(single(op.act, beside is not None), numbers, n_tasks, (packed, bias, source, out, beside, arena.flag))
    fills = [operand.fill for operand in (source, beside) if operand is not None and operand.fill is not None]
    result = out.tokens(tuple(x.shape[:-1]), strides)
    shape = (layer.shape[0], layer.shape[1])

    def fast(current: Values) -> None:
        for fill in fills:
            fill(current)
        job()
        current[op.out] = result

    def plain(current: Values) -> None:
        current[op.out] = run_dense(layer, torch.from_numpy(separate(packed, shape)), current)

    for fill in fills:
        fill(values)
    seconds = best_time(job.alone)
    dense = dense_step(layer, weight, values)
    assert dense.dense_seconds is not None
    chosen = dense
    if seconds <= dense.dense_seconds:
        chosen = Step(
            op.name, f"sparse rows x {LANES}", fast, plain, op.out, dense.keep, packed.n_bytes, weight.nbytes, seconds,
            dense.dense_seconds,
        )  # fmt: skip
    chosen.fast(values)
    return chosen


def addresses(packed: Interleaved) -> list[int]:
    return [part.ctypes.data for part in (packed.groups, packed.rows, packed.values, packed.columns)]


def single(act: str, has_beside: bool) -> Code:
    """The compiled loop over groups of rows."""
    return generate(("single", act, has_beside), lambda loop: _emit(loop, act, has_beside))


def _emit(loop: Loop, act: str, has_beside: bool) -> None:
    b = loop.b
    bad = loop.cells([constant(0.0, 1)])[0]
    groups, rows = loop.number(GROUPS), loop.number(ROWS)
    zero = F32(0.0)
    with loop.each(*loop.share(loop.number(N_GROUPS))) as group:
        sums = group_sums(loop, group, groups, loop.number(VALUES), loop.number(COLUMNS), loop.number(X))
        for lane, value in enumerate(sums):
            row = b.sext(loop.load(loop.at(rows, b.add(b.mul(group, I64(LANES)), I64(lane)), 4), I32), I64)
            with b.if_then(b.icmp_signed(">=", row, I64(0))):
                value = b.fadd(value, loop.load(loop.at(loop.number(BIAS), row)))
                if has_beside:
                    value = b.fadd(value, loop.load(loop.at(loop.number(BESIDE), row)))
                if act == "relu":
                    value = b.select(b.fcmp_ordered("<", value, zero), zero, value)  # NaN stays
                loop.store(value, loop.at(loop.number(OUT), row))
                b.store(fused(b, value, zero, b.load(bad)), bad)
    raise_flag(loop, b.load(bad), 1, loop.number(FLAG))


def group_sums(loop: Loop, group: Any, groups: Any, values: Any, columns: Any, x: Any) -> list[Any]:
    """The sums of the rows of one group."""
    b = loop.b
    start, stop = loop.load(loop.at(groups, group, 8), I64), loop.load(loop.at(groups, group, 8), I64, 8)
    cells = loop.cells([F32(0.0)] * LANES)
    with loop.each(start, stop) as step:
        first = b.mul(step, I64(LANES))
        value_at, column_at = loop.at(values, first), loop.at(columns, first, 2)
        for lane, cell in enumerate(cells):
            column = b.zext(loop.load(column_at, I16, 2 * lane), I64)
            term = loop.load(loop.at(x, column))
            b.store(fused(b, loop.load(value_at, F32, 4 * lane), term, b.load(cell)), cell)
    return [b.load(cell) for cell in cells]
