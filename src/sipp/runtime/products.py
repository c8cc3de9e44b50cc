"""Convolutions and linear layers as steps: a sparse product, or torch's dense one if that is faster.

A strip is the part of the output whose sums stay in registers; rounds divide the input channels of a strip, so that
what they read stays in the first-level cache (`strip_kernel.py`).
"""

from __future__ import annotations

from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor

from sipp.native import memory, vector
from sipp.runtime.buffers import Arena, Flag, token_buffer
from sipp.runtime.graph import Op
from sipp.runtime.layers import Layer, dense_step, faster_step
from sipp.runtime.operands import (
    Operand,
    filled_run,
    fills_of,
    image_addend,
    image_input,
    image_output,
    token_addend,
    token_input,
    token_operand,
)
from sipp.runtime.steps import SHARES_PER_THREAD, PreparedKernel, Step, Values
from sipp.runtime.strip_kernel import Packed, Tiling, emit_strips, pack, tilings

NEAREST_CACHE = 24_000  # bytes of x that fit into the first-level cache beside weights and sums
HOPELESS = 2.0  # a kernel this many times slower than dense is timed only once
FEWEST_A_ROUND = 4  # weights per row and round: with fewer, reading and writing partial sums costs more


def image_step(layer: Layer, weight: Tensor, values: Values, arena: Arena, border: tuple[int, int]) -> Step:
    """The step of a convolution, chosen by timing on these values; its result is added to them."""
    op, x = layer.op, values[layer.op.args[0].value]
    n_high, n_wide = output_size(layer, x)
    out = arena.image(len(x), len(weight), n_high, n_wide, border)
    source = image_input(layer, x, arena)
    addend = None if op.addend is None else image_addend(op.addend, values[op.addend], out, arena)
    return _choose(layer, weight, values, arena, source, image_output(out), addend, out.inner, (n_high, n_wide))


def token_step(layer: Layer, weight: Tensor, values: Values, arena: Arena) -> Step:
    """The step of a linear layer on several tokens."""
    op, x = layer.op, values[layer.op.args[0].value]
    lead = tuple(x.shape[:-1])
    source, strides = token_input(op.args[0].value, x, arena)
    out = arena.add(token_buffer(prod(lead), len(weight)))
    addend = None
    if op.addend is not None:
        addend = token_addend(op.addend, values[op.addend], strides, len(weight), arena)
    result = out.tokens(lead, strides)
    return _choose(layer, weight, values, arena, source, token_operand(out, None), addend, result, (1, 1))


def output_size(layer: Layer, x: Tensor) -> tuple[int, int]:
    """Rows and columns of a convolution's output."""
    each = zip(x.shape[2:], layer.shape[2:], layer.stride, layer.padding, layer.dilation)
    high, wide = ((size + 2 * pad - reach * (k - 1) - 1) // step + 1 for size, k, step, pad, reach in each)
    return high, wide


def _choose(
    layer: Layer, weight: Tensor, values: Values, arena: Arena, source: Operand, out: Operand, addend: Operand | None,
    result: Tensor, size: tuple[int, int],
) -> Step:  # fmt: skip
    """The fastest of the sparse tilings and torch's dense product."""
    op, places = layer.op, _offsets(layer, source)
    flat = weight.flatten(1).numpy()
    bias = memory.zeros(len(weight)) if layer.bias is None else layer.bias
    plane, rounds = None if addend is None else addend.plane, partial(_rounds, layer, source, flat)
    ways = tilings(*size, source.n, source.plane, out.plane, plane, op.act, op.shrunk > 1, rounds)
    packs = [_pack(layer, flat, places, source.n, way.n_rounds) for way in ways]
    kernels = [_kernel(*each, op, bias, source, out, addend, arena.flag) for each in zip(packs, ways)]
    fills = fills_of(source, addend)
    for fill in fills:
        fill(values)
    dense = dense_step(layer, weight, values)
    assert dense.dense_seconds is not None
    times = [kernel.time(HOPELESS * dense.dense_seconds) for kernel in kernels]
    best = times.index(min(times))
    kernel, way, packed = kernels[best], ways[best], packs[best]
    sparse = Step(
        op.name, _kernel_name(way), filled_run(fills, kernel, op.out, result), op.out, dense.keep, packed.n_bytes,
        weight.nbytes, times[best], dense.dense_seconds, "copies its input" if fills else "",
    )  # fmt: skip
    return faster_step(sparse, dense, values)


def _kernel_name(way: Tiling) -> str:
    rounds = f" in {way.n_rounds} rounds" if way.n_rounds > 1 else ""
    return f"sparse {len(way.tile.in_x)} x {way.tile.lanes}{rounds}"


def _rounds(layer: Layer, source: Operand, flat: np.ndarray, n_rows: int, n_floats: int) -> list[int]:
    """Numbers of rounds to try: 1, and enough that the input of a strip fits the first-level cache, if worthwhile."""
    kernel = (*layer.shape, 1, 1)[2:4]
    reach = [reach * (k - 1) for reach, k in zip(layer.dilation, kernel)]
    lines = (n_rows - 1) * layer.stride[0] + 1 + reach[0]
    n_bytes = vector.FLOAT_BYTES * layer.shape[1] * lines * (n_floats * layer.stride[1] + reach[1] * source.n)
    most = int(np.count_nonzero(flat) / max(1, len(flat)) / FEWEST_A_ROUND)
    n_rounds = min(-(-n_bytes // NEAREST_CACHE), most, layer.shape[1])
    return [1] if n_rounds < 2 else [1, n_rounds]


def _pack(layer: Layer, flat: np.ndarray, places: np.ndarray, unit: int, n_rounds: int) -> Packed:
    """The weight packed for this many rounds, each over a part of the input channels."""
    rows, columns = flat.nonzero()
    channels = columns // (flat.shape[1] // layer.shape[1])
    nth_round = channels * n_rounds // layer.shape[1]
    at = places[rows // (layer.shape[0] // layer.groups), columns]  # the row's group
    return pack(nth_round * len(flat) + rows, at, flat[rows, columns], n_rounds * len(flat), unit)


def _offsets(layer: Layer, source: Operand) -> np.ndarray:
    """For each group, the offset in x (floats) that column k of the weight reads: G x K."""
    channels, *kernel = (*layer.shape, 1, 1)[1:4]
    first = np.arange(layer.groups, dtype=np.int64)[:, None, None, None] * channels
    channel = (first + np.arange(channels)[None, :, None, None]) * source.channel
    row = np.arange(kernel[0])[None, None, :, None] * layer.dilation[0] * source.row
    column = np.arange(kernel[1])[None, None, None, :] * layer.dilation[1]
    if source.phase:
        step = layer.stride[1]
        return (channel + row + column % step * source.phase + column // step * source.n).reshape(layer.groups, -1)
    return (channel + row + column * source.n).reshape(layer.groups, -1)


def _kernel(
    packed: Packed, way: Tiling, op: Op, bias: Tensor, source: Operand, out: Operand, addend: Operand | None,
    flag: Flag,
) -> PreparedKernel:  # fmt: skip
    """The loop over strips with its arguments for this layer."""
    n_strips, n_threads, n_rows = len(way.strips), torch.get_num_threads(), len(bias)
    n_blocks = 1 if n_threads == 1 else max(1, min(n_rows, -(-SHARES_PER_THREAD * n_threads // n_strips)))
    arguments = {
        "x": source.data,
        "out": out.data,
        "addend": None if addend is None else addend.data,
        "bias": bias,
        "rows": packed.rows[1:],
        "values": packed.values,
        "steps": packed.steps,
        "strips": way.strips,
        "n_strips": n_strips,
        "n_blocks": n_blocks,  # of rows, shared among threads
        "n_rows": n_rows,
        "n_rounds": way.n_rounds,
        "out_pitch": out.channel * vector.FLOAT_BYTES,
        "addend_pitch": 0 if addend is None else addend.channel * vector.FLOAT_BYTES,
        "shrunk": op.shrunk,
        "flag": flag.cell,
    }
    tile = way.tile
    return PreparedKernel(("product", tile), arguments, n_strips * n_blocks, lambda b, args: emit_strips(b, args, tile))
