"""Convolutions and linear layers as steps: the sparse product, or torch's dense one where that is faster."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from sipp.runtime.buffers import Arena, Flag, token_buffer
from sipp.runtime.layers import Layer, dense_step, run_dense
from sipp.runtime.operands import (
    Operand,
    image_beside,
    image_input,
    image_output,
    token_beside,
    token_input,
    token_operand,
)
from sipp.runtime.packing import Packed, pack, unpack
from sipp.runtime.product import product
from sipp.runtime.steps import SHARES, Job, Step, Values, best_time
from sipp.runtime.tiles import Cut, cuts


def image_step(layer: Layer, weight: Tensor, values: Values, arena: Arena, border: tuple[int, int]) -> Step:
    """The step of a convolution, chosen by trial on these values, where its result is left."""
    op, x = layer.op, values[layer.op.args[0].value]
    n_high, n_wide = output_size(layer, x)
    out = arena.image(len(x), len(weight), n_high, n_wide, border)
    source = image_input(layer, x, arena)
    beside = None if op.beside is None else image_beside(op.beside, values[op.beside], out, arena)
    return _chosen(layer, weight, values, arena, source, image_output(out), beside, out.inner, (n_high, n_wide))


def token_step(layer: Layer, weight: Tensor, values: Values, arena: Arena) -> Step:
    """The step of a linear layer on several tokens."""
    op, x = layer.op, values[layer.op.args[0].value]
    lead = tuple(x.shape[:-1])
    source, strides = token_input(op.args[0].value, x, arena)
    out = arena.add(token_buffer(prod(lead), len(weight)))
    beside = None
    if op.beside is not None:
        beside = token_beside(op.beside, values[op.beside], strides, len(weight), arena)
    result = out.tokens(lead, strides)
    return _chosen(layer, weight, values, arena, source, token_operand(out, None), beside, result, (1, 1))


def output_size(layer: Layer, x: Tensor) -> tuple[int, int]:
    """Rows and columns of a convolution's output."""
    each = zip(x.shape[2:], layer.shape[2:], layer.stride, layer.padding, layer.dilation)
    high, wide = ((size + 2 * pad - reach * (k - 1) - 1) // step + 1 for size, k, step, pad, reach in each)
    return high, wide


def _chosen(
    layer: Layer, weight: Tensor, values: Values, arena: Arena, source: Operand, out: Operand, beside: Operand | None,
    result: Tensor, size: tuple[int, int],
) -> Step:  # fmt: skip
    """The fastest of the ways to cut the output and of torch's dense product."""
    op, places = layer.op, _places(layer, source)
    index = weight.flatten(1).numpy().nonzero()
    packed = pack(index[0], places[_group(layer, index[0]), index[1]], weight.flatten(1).numpy()[index], len(weight), source.n)
    bias = torch.zeros(len(weight), dtype=torch.float32, device="cpu") if layer.bias is None else layer.bias
    plane = None if beside is None else beside.plane
    ways = list(cuts(*size, source.n, source.n, source.plane, out.plane, plane, op.act))
    jobs = [_job(packed, bias, way, source, out, beside, arena.flag) for way in ways]
    fills = [operand.fill for operand in (source, beside) if operand is not None and operand.fill is not None]
    for fill in fills:
        fill(values)
    times = [best_time(job.alone) for job in jobs]
    best = times.index(min(times))
    job, tile = jobs[best], ways[best].tile

    def fast(current: Values) -> None:
        for fill in fills:
            fill(current)
        job()
        current[op.out] = result

    def plain(current: Values) -> None:
        current[op.out] = run_dense(layer, _unpacked(layer, packed, places), current)

    dense = dense_step(layer, weight, values)
    assert dense.dense_seconds is not None
    chosen = dense
    if times[best] <= dense.dense_seconds:
        chosen = Step(
            op.name, f"sparse {len(tile.in_x)} x {tile.lanes}", fast, plain, op.out, dense.keep, packed.n_bytes,
            weight.nbytes, times[best], dense.dense_seconds, "copies its input" if fills else "",
        )  # fmt: skip
    chosen.fast(values)
    return chosen


def _places(layer: Layer, source: Operand) -> np.ndarray:
    """Where column k of a row's weights looks in x, for each group: floats, G x K."""
    n_rows, channels, *kernel = (*layer.shape, 1, 1)[:4]
    first = np.arange(layer.groups, dtype=np.int64)[:, None, None, None] * channels
    channel = (first + np.arange(channels)[None, :, None, None]) * source.channel
    row = np.arange(kernel[0])[None, None, :, None] * layer.dilation[0] * source.row
    column = np.arange(kernel[1])[None, None, None, :] * layer.dilation[1]
    if source.phase:
        step = layer.stride[1]
        return (channel + row + column % step * source.phase + column // step * source.n).reshape(layer.groups, -1)
    return (channel + row + column * source.n).reshape(layer.groups, -1)


def _group(layer: Layer, rows: np.ndarray) -> np.ndarray:
    return rows // (layer.shape[0] // layer.groups)


def _unpacked(layer: Layer, packed: Packed, places: np.ndarray) -> Tensor:
    """The weight as it was before it was packed."""
    rows, at, kept = unpack(packed)
    rows, at, kept = (part[kept != 0] for part in (rows, at, kept))
    weight = np.zeros((layer.shape[0], places.shape[1]), np.float32)
    for group, of_group in enumerate(places):
        is_in = _group(layer, rows) == group
        order = np.argsort(of_group)
        weight[rows[is_in], order[np.searchsorted(of_group[order], at[is_in])]] = kept[is_in]
    return torch.from_numpy(weight).reshape(layer.shape)


def _job(
    packed: Packed, bias: Tensor, way: Cut, source: Operand, out: Operand, beside: Operand | None, flag: Flag
) -> Job:
    """The numbers of `product.py` for this layer."""
    n_strips = len(way.strips)
    n_threads = torch.get_num_threads()
    n_blocks = 1 if n_threads == 1 else max(1, min(packed.n_rows, -(-SHARES * n_threads // n_strips)))
    float_bytes = 4
    numbers = [
        source.data.data_ptr(), out.data.data_ptr(), 0 if beside is None else beside.data.data_ptr(), bias.data_ptr(),
        packed.rows.ctypes.data + packed.rows.itemsize, packed.values.ctypes.data, packed.steps.ctypes.data,
        way.strips.ctypes.data, n_strips, n_blocks, packed.n_rows, out.channel * float_bytes,
        0 if beside is None else beside.channel * float_bytes, flag.address,
    ]  # fmt: skip
    return Job(product(way.tile), numbers, n_strips * n_blocks, (packed, bias, way, source, out, beside, flag))
