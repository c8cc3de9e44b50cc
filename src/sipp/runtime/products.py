"""Convolutions and linear layers as steps: a sparse product, or torch's dense one if that is faster.

A strip is the part of the output whose sums stay in registers; rounds divide the input channels of a strip, so that
what they read stays in the first-level cache (`strip_kernel.py`). A single token has a kernel of its own
(`vector_kernel.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.native import memory, processor, vector
from sipp.runtime import timing
from sipp.runtime.buffers import (
    Arena,
    Buffer,
    Fill,
    Flag,
    Operand,
    Pair,
    Work,
    filled_run,
    fills_of,
    image_addend,
    image_input,
    operand_of,
    token_addend,
    token_buffer,
    token_input,
)
from sipp.runtime.graph import CONV, LINEAR, Op
from sipp.runtime.kernel import SHARES_PER_THREAD, PreparedKernel
from sipp.runtime.steps import Step, Values, apply_epilogue, constant_weights, kept_share
from sipp.runtime.strip_kernel import Packed, Tiling, emit_strips, pack, tilings
from sipp.runtime.vector_kernel import MOST_COLUMNS, Windows, emit_vector, pack_windows

NEAREST_CACHE = 24_000  # bytes of x that fit into the first-level cache beside weights and sums
HOPELESS = 2.0  # a kernel this many times slower than dense is timed only once
FEWEST_A_ROUND = 4  # weights per row and round: with fewer, reading and writing partial sums costs more


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer with defaults filled in."""

    op: Op
    weight: Tensor  # R x C x KH x KW, a linear layer's R x C
    bias: Tensor | None
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @property
    def kernel(self) -> Pair:
        height, width = (*self.weight.shape, 1, 1)[2:4]
        return height, width

    def reads(self) -> tuple[int, ...]:
        """The values that it reads apart from its weights."""
        own = self.op.args[0].value
        return (own,) if self.op.addend is None else (own, self.op.addend)


def product_step(op: Op, work: Work) -> Step | None:
    """The fastest step of a float32 product with constant weights, by timing; None: torch runs it."""
    weights, x = constant_weights(op, work.constants), work.input(op)
    if weights is None or not x.numel() or x.ndim < 2 or (op.target is CONV and x.ndim != 4):
        return None
    if not all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (x, *weights)):
        return None
    weight = weights[0].contiguous()
    bias = weights[1].contiguous() if len(weights) > 1 else None
    layer = Layer(op, weight, bias)
    if op.target is CONV:
        defaults: list[Any] = [1, 0, 1, 1]
        stride, padding, dilation, groups = [*op.args[3:], *defaults[len(op.args[3:]) :]]
        layer = Layer(op, weight, bias, pair(stride), pair(padding), pair(dilation), groups)
    if op.addend is not None and work.values[op.addend].dtype != torch.float32:
        step = _dense_step(layer, work)
    elif op.target is LINEAR and x.numel() == weight.shape[1] <= MOST_COLUMNS:
        step = _vector_step(layer, work)
    else:
        step = _strip_step(layer, work)
    if bias is None:
        return step
    return replace(step, held=(*step.held, bias), n_dense_bytes=step.n_dense_bytes + bias.nbytes)


def pair(option: Any) -> Pair:
    """(rows, columns) from one number for both or a pair."""
    numbers = list(option) if isinstance(option, (list, tuple)) else [option]
    return (numbers * 2)[0], (numbers * 2)[1]


# --- torch's own ------------------------------------------------------------------------------------------------------


def _dense_step(layer: Layer, work: Work) -> Step:
    """The dense layer in the faster memory format, timed on inputs that already have this format.

    What overflows before a folded norm is noticed here, because an activation may hide it.
    """
    values, flag = work.values, work.arena.flag
    choices = [layer.weight]
    if len(layer.weight.shape) == 4 and layer.groups == 1:
        choices.append(layer.weight.contiguous(memory_format=torch.channels_last))
    times = [_time_dense(layer, choice, values, flag) for choice in choices]
    best = choices[times.index(min(times))]

    def run_step(current: Values) -> None:
        current[layer.op.out] = _run_dense(layer, best, current, flag)

    is_watched = layer.op.shrunk > 1 and layer.op.addend is None
    return Step(
        layer.op.name, "dense", run_step, layer.op.out, is_watched=is_watched, keep=kept_share(best),
        n_dense_bytes=best.nbytes, dense_seconds=min(times), held=(best,), reads=layer.reads(),
    )  # fmt: skip


def _run_dense(layer: Layer, weight: Tensor, values: Values, flag: Flag) -> Tensor:
    """Runs the layer and its epilogue (sum, activation) with torch."""
    x = values[layer.op.args[0].value].contiguous(memory_format=_format_of(weight))
    if weight.ndim == 4:
        result = F.conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    else:
        result = F.linear(x, weight, layer.bias)
    if layer.op.shrunk > 1:
        flag.check(result, layer.op.shrunk)
    return apply_epilogue(values, layer.op, result)


def _time_dense(layer: Layer, weight: Tensor, values: Values, flag: Flag) -> float:
    form = _format_of(weight)
    ready = values | {n: values[n].contiguous(memory_format=form) for n in layer.reads()}
    return timing.dense_time(lambda: _run_dense(layer, weight, ready, flag))


def _format_of(weight: Tensor) -> Any:
    is_last = not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def _faster(sparse: Step, dense: Step, operands: Operands, arena: Arena) -> Step:
    """The sparse step if it is enough faster than the dense one; the plan then takes in what it writes to."""
    assert sparse.seconds is not None and dense.dense_seconds is not None
    if not timing.is_enough_faster(sparse.seconds, dense.dense_seconds):
        return dense
    arena.take(operands.buffer, is_shared=operands.is_image)
    return sparse


# --- what a sparse product reads and writes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Operands:
    """Where a sparse product finds its input and its addend, and where it writes to."""

    source: Operand
    addend: Operand | None
    buffer: Buffer  # of the result
    result: Tensor  # as torch sees it
    is_image: bool

    @property
    def out(self) -> Operand:
        return operand_of(self.buffer)

    @property
    def fills(self) -> list[Fill]:
        return fills_of(self.source, self.addend)


def _image_operands(layer: Layer, work: Work) -> Operands:
    """Those of a convolution."""
    op, x, arena = layer.op, work.input(layer.op), work.arena
    axes = zip(x.shape[2:], layer.kernel, layer.stride, layer.padding, layer.dilation)
    high, wide = ((size + 2 * pad - reach * (k - 1) - 1) // step + 1 for size, k, step, pad, reach in axes)
    out = arena.image(len(x), len(layer.weight), high, wide, work.border)
    source = image_input(op.args[0].value, x, layer.stride, layer.padding, arena)
    addend = None if op.addend is None else image_addend(op.addend, work.values[op.addend], out, arena)
    return Operands(source, addend, out, out.inner, is_image=True)


def _token_operands(layer: Layer, work: Work) -> Operands:
    """Those of a linear layer."""
    op, x = layer.op, work.input(layer.op)
    lead, n_rows = tuple(x.shape[:-1]), len(layer.weight)
    source, strides = token_input(op.args[0].value, x, work.arena)
    out, addend = token_buffer(prod(lead), n_rows), None
    if op.addend is not None:
        addend = token_addend(op.addend, work.values[op.addend], strides, n_rows, work.arena)
    return Operands(source, addend, out, out.tokens(lead, strides), is_image=False)


# --- one token --------------------------------------------------------------------------------------------------------


def _vector_step(layer: Layer, work: Work) -> Step:
    """The faster step of a linear layer on one token."""
    op, weight, operands = layer.op, layer.weight, _token_operands(layer, work)
    addend, packed = operands.addend, pack_windows(weight.numpy())
    arguments = {
        "x": operands.source.data,
        "out": operands.out.data,
        "addend": None if addend is None else addend.data,
        "bias": padded(layer.bias, len(weight)),
        **packed.arguments,
        "shrunk": op.shrunk,
        "flag": work.arena.flag.cell,
    }
    form = (op.act, addend is not None, op.shrunk > 1)
    kernel = PreparedKernel(
        ("vector", *form), arguments, len(packed.ends) - 1, lambda b, args: emit_vector(b, args, *form)
    )
    for fill in operands.fills:
        fill(work.values)
    seconds, dense = kernel.time_and_set_threads(), _dense_step(layer, work)
    name = f"sparse, one vector x {processor.LANES}"
    return _faster(_sparse_step(layer, operands, kernel, name, seconds, packed, dense), dense, operands, work.arena)


def _sparse_step(
    layer: Layer, operands: Operands, kernel: PreparedKernel, name: str, seconds: float, packed: Packed | Windows,
    dense: Step,
) -> Step:  # fmt: skip
    """The step of a kernel that was timed against the dense one."""
    op = layer.op
    return Step(
        op.name, "ours", filled_run(operands.fills, kernel, op.out, operands.result), op.out, name, is_watched=True,
        keep=dense.keep, n_dense_bytes=layer.weight.nbytes, seconds=seconds, dense_seconds=dense.dense_seconds,
        held=packed.tensors, reads=layer.reads(),
    )  # fmt: skip


def padded(bias: Tensor | None, n_rows: int) -> Tensor:
    """The bias (or zeros), padded to whole groups of rows."""
    padded = memory.zeros(-(-n_rows // processor.LANES) * processor.LANES)
    if bias is not None:
        padded[:n_rows] = bias
    return padded


# --- images, and several tokens ---------------------------------------------------------------------------------------


def _strip_step(layer: Layer, work: Work) -> Step:
    """The fastest of the sparse tilings and torch's dense product."""
    is_image = layer.op.target is CONV
    operands = _image_operands(layer, work) if is_image else _token_operands(layer, work)
    flat, places = layer.weight.flatten(1).numpy(), _offsets(layer, operands.source)
    ways = _tilings(layer, operands, flat)
    packs = [_pack(layer, flat, places, operands.source.n, way.n_rounds) for way in ways]
    kernels = [_kernel(*each, layer, operands, work.arena.flag) for each in zip(packs, ways)]
    for fill in operands.fills:
        fill(work.values)
    dense = _dense_step(layer, work)
    assert dense.dense_seconds is not None
    times = [kernel.time_and_set_threads(HOPELESS * dense.dense_seconds) for kernel in kernels]
    best = times.index(min(times))
    way = ways[best]
    name = f"sparse {len(way.tile.in_x)} x {way.tile.lanes}{f' in {way.n_rounds} rounds' if way.n_rounds > 1 else ''}"
    sparse = _sparse_step(layer, operands, kernels[best], name, times[best], packs[best], dense)
    return _faster(sparse, dense, operands, work.arena)


def _tilings(layer: Layer, operands: Operands, flat: np.ndarray) -> list[Tiling]:
    """The tilings worth timing: of the rows and columns of an image, or of all tokens as one line."""
    size = operands.buffer.inner.shape[2:]
    rounds = partial(_rounds, layer, operands.source, flat)
    source, out, addend = operands.source, operands.out, operands.addend
    return tilings(size[0], size[1], source, out, addend, layer.op.act, layer.op.shrunk > 1, rounds)


def _rounds(layer: Layer, source: Operand, flat: np.ndarray, n_rows: int, n_floats: int) -> list[int]:
    """Numbers of rounds to try: 1, and enough that the input of a strip fits the first-level cache, if worthwhile."""
    channels = layer.weight.shape[1]
    reach = [reach * (k - 1) for reach, k in zip(layer.dilation, layer.kernel)]
    lines = (n_rows - 1) * layer.stride[0] + 1 + reach[0]
    n_bytes = vector.FLOAT_BYTES * channels * lines * (n_floats * layer.stride[1] + reach[1] * source.n)
    most = int(np.count_nonzero(flat) / max(1, len(flat)) / FEWEST_A_ROUND)
    n_rounds = min(-(-n_bytes // NEAREST_CACHE), most, channels)
    return [1] if n_rounds < 2 else [1, n_rounds]


def _pack(layer: Layer, flat: np.ndarray, places: np.ndarray, unit: int, n_rounds: int) -> Packed:
    """The weight packed for this many rounds, each over a part of the input channels."""
    rows, columns = flat.nonzero()
    n_rows, n_channels = layer.weight.shape[:2]
    nth_round = columns // (flat.shape[1] // n_channels) * n_rounds // n_channels
    at = places[rows // (n_rows // layer.groups), columns]  # the row's group
    return pack(nth_round * n_rows + rows, at, flat[rows, columns], n_rounds * n_rows, unit)


def _offsets(layer: Layer, source: Operand) -> np.ndarray:
    """For each group, the offset in x (floats) that column k of the weight reads: G x K."""
    channels, (n_rows, n_columns) = layer.weight.shape[1], layer.kernel
    first = np.arange(layer.groups, dtype=np.int64)[:, None, None, None] * channels
    channel = (first + np.arange(channels)[None, :, None, None]) * source.channel
    row = np.arange(n_rows)[None, None, :, None] * layer.dilation[0] * source.row
    column = np.arange(n_columns)[None, None, None, :] * layer.dilation[1]
    if source.phase:
        step = layer.stride[1]
        return (channel + row + column % step * source.phase + column // step * source.n).reshape(layer.groups, -1)
    return (channel + row + column * source.n).reshape(layer.groups, -1)


def _kernel(packed: Packed, way: Tiling, layer: Layer, operands: Operands, flag: Flag) -> PreparedKernel:
    """The loop over strips with its arguments for this layer."""
    n_strips, n_threads, n_rows = len(way.strips), torch.get_num_threads(), len(layer.weight)
    n_blocks = 1 if n_threads == 1 else max(1, min(n_rows, -(-SHARES_PER_THREAD * n_threads // n_strips)))
    out, addend = operands.out, operands.addend
    arguments = {
        "x": operands.source.data,
        "out": out.data,
        "addend": None if addend is None else addend.data,
        "bias": memory.zeros(n_rows) if layer.bias is None else layer.bias,
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
        "shrunk": layer.op.shrunk,
        "flag": flag.cell,
    }
    tile = way.tile
    return PreparedKernel(("product", tile), arguments, n_strips * n_blocks, lambda b, args: emit_strips(b, args, tile))
