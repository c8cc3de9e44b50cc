"""Inputs of a product: read directly from a buffer, or copied into one in each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from torch import Tensor

from sipp.native import memory
from sipp.runtime.buffers import (
    Arena,
    Buffer,
    image_buffer,
    plain_strides,
    rounded_up,
    token_buffer,
    token_columns,
    token_strides,
)
from sipp.runtime.layers import Layer
from sipp.runtime.steps import Values
from sipp.runtime.strip_kernel import Plane

Fill = Callable[[Values], None]


@dataclass(frozen=True)
class Operand:
    """Memory that a product reads or writes: its layout, and the function that fills it in each call, if any."""

    data: Tensor
    plane: Plane
    channel: int  # floats from one channel to the next
    row: int  # floats from one row of the kernel window to the next
    phase: int  # floats from one phase of a strided input to the next; 0 if columns are in order
    n: int  # adjacent points
    fill: Fill | None


def fills_of(*operands: Operand | None) -> list[Fill]:
    """The copies to make before a product can run."""
    return [operand.fill for operand in operands if operand is not None and operand.fill is not None]


def filled_run(fills: list[Fill], kernel: Callable[[], None], out: int, result: Tensor) -> Fill:
    """A step that fills its operands, runs the kernel, and stores the result as value `out`."""

    def run_step(current: Values) -> None:
        for fill in fills:
            fill(current)
        kernel()
        current[out] = result

    return run_step


def image_input(layer: Layer, x: Tensor, arena: Arena) -> Operand:
    """The input of a convolution, with a border at least as wide as its padding."""
    number, padding = layer.op.args[0].value, layer.padding
    buffer = arena.image_of(x)
    n, channels, height, width = x.shape
    is_ready = buffer is not None and all(have >= need for have, need in zip(buffer.border, padding))
    if rounded_up(n) % 8 and layer.stride[1] > 1:
        return _phases(number, x, layer)
    if buffer is None or not is_ready:
        buffer = image_buffer(n, channels, height, width, padding)
        return _image_operand(buffer, layer.stride, padding, _copy(number, buffer.inner))
    return _image_operand(buffer, layer.stride, padding, None)


def image_addend(number: int, x: Tensor, like: Buffer, arena: Arena) -> Operand:
    """A tensor that is added to images N x C x H x W."""
    buffer = arena.image_of(x)
    if buffer is not None and x.shape == like.inner.shape:
        return _image_operand(buffer, (1, 1), (0, 0), None)
    buffer = image_buffer(*like.inner.shape)
    return _image_operand(buffer, (1, 1), (0, 0), _copy(number, buffer.inner))


def image_output(buffer: Buffer) -> Operand:
    return _image_operand(buffer, (1, 1), (0, 0), None)


def token_input(number: int, x: Tensor, arena: Arena) -> tuple[Operand, tuple[int, ...]]:
    """The input of a linear layer, and the strides of its leading dimensions."""
    lead, n = tuple(x.shape[:-1]), prod(x.shape[:-1])
    strides, buffer = token_strides(x), arena.buffer_of(x)
    if strides is not None and buffer is not None and buffer.data_CHWN.data_ptr() == x.data_ptr():
        n_columns = buffer.data_CHWN.shape[3]  # for images this may not be a whole number of vectors
        has_all = buffer.data_CHWN.numel() == n_columns * x.shape[-1] and buffer.n == n
        if has_all and n_columns == token_columns(n) and (x.shape[-1] == 1 or x.stride(-1) == n_columns):
            return token_operand(buffer, None), strides
    strides = plain_strides(lead)
    buffer = token_buffer(n, x.shape[-1])
    return token_operand(buffer, _copy(number, buffer.tokens(lead, strides))), strides


def token_addend(number: int, x: Tensor, strides: tuple[int, ...], features: int, arena: Arena) -> Operand:
    """A tensor that is added to the output of a linear layer whose tokens have these strides."""
    operand, have = token_input(number, x, arena)
    if operand.fill is None and have == strides and x.shape[-1] == features:
        return operand
    buffer = token_buffer(prod(x.shape[:-1]), features)
    return token_operand(buffer, _copy(number, buffer.tokens(tuple(x.shape[:-1]), strides)))


def token_operand(buffer: Buffer, fill: Callable[[Values], None] | None) -> Operand:
    n = buffer.data_CHWN.shape[3]
    return Operand(buffer.data_CHWN, Plane(0, n, n), n, 0, 0, n, fill)


def _image_operand(
    buffer: Buffer, stride: tuple[int, int], padding: tuple[int, int], fill: Callable[[Values], None] | None
) -> Operand:
    _, height, width, n = buffer.data_CHWN.shape
    origin = ((buffer.border[0] - padding[0]) * width + buffer.border[1] - padding[1]) * n
    plane = Plane(origin, stride[0] * width * n, stride[1] * n)
    return Operand(buffer.data_CHWN, plane, height * width * n, width * n, 0, n, fill)


def _phases(number: int, x: Tensor, layer: Layer) -> Operand:
    """For few points and a stride s: stores columns 0, s, 2s .. first, then 1, s + 1 .., so pixels form vectors."""
    n, channels, height, width = x.shape
    (pad_rows, pad_columns), step = layer.padding, layer.stride[1]
    n_columns = -(-(width + 2 * pad_columns) // step)
    shape = (channels, height + 2 * pad_rows, step, n_columns, n)
    data = memory.zeros(*shape)

    def fill(values: Values) -> None:
        source_CHWN = values[number].permute(1, 2, 3, 0)
        for phase in range(step):
            first = (phase - pad_columns) % step
            if first < width:
                columns = source_CHWN[:, :, first::step]
                start = (first + pad_columns) // step
                data[:, pad_rows : pad_rows + height, phase, start : start + columns.shape[2]] = columns

    row = step * n_columns * n
    plane = Plane(0, layer.stride[0] * row, n)
    return Operand(data, plane, shape[1] * row, row, n_columns * n, n, fill)


def _copy(number: int, target: Tensor) -> Callable[[Values], None]:
    def fill(values: Values) -> None:
        target.copy_(values[number].expand(target.shape))

    return fill
