"""Buffers for activations, stored as channels x height x width x points, so points (or tokens) are adjacent.

A buffer belongs to a plan and is overwritten by every call. Each image has a border of zeros as wide as the padding of
the convolutions that read it, so no loop needs bounds checks. The number of points is rounded up to whole vectors. To
torch, a buffer is an ordinary tensor N x C x H x W (or tokens x features) with unusual strides. An operand is a buffer
as a product reads or writes it; what lies elsewhere is copied into one in each call (`fill`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from sipp.native import memory, processor
from sipp.runtime.graph import Op, Slot
from sipp.runtime.steps import Values

VECTOR = 8  # the number of points is rounded up to a multiple of this
FEWEST_POINTS = 6  # with fewer points, vectors run along rows of pixels instead

Fill = Callable[[Values], None]
Pair = tuple[int, int]  # rows, columns


@dataclass(frozen=True, eq=False)
class Buffer:
    """An activation tensor data_CHWN with a border of zeros; initially all zero."""

    data_CHWN: Tensor
    border: Pair
    n: int

    @property
    def inner(self) -> Tensor:
        """The values as N x C x H x W, without the border and the extra points."""
        rows, columns = self.border
        n_rows, n_columns = self.data_CHWN.shape[1:3]
        inside = self.data_CHWN[:, rows : n_rows - rows, columns : n_columns - columns, : self.n]
        return inside.permute(3, 0, 1, 2)

    def tokens(self, lead: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """The same memory as a tensor (*lead, features); `strides` are the strides of `lead`."""
        n_features, _, _, n = self.data_CHWN.shape
        return self.data_CHWN.as_strided((*lead, n_features), (*strides, n))


def rounded_up(n: int, fewest: int = FEWEST_POINTS) -> int:
    return n if n < fewest else -(-n // VECTOR) * VECTOR


def image_buffer(n: int, channels: int, height: int, width: int, border: Pair = (0, 0)) -> Buffer:
    return Buffer(_zeros(channels, height + 2 * border[0], width + 2 * border[1], rounded_up(n)), border, n)


def token_columns(n: int) -> int:
    """How many columns n tokens need: 1 for a single token, otherwise whole vectors."""
    return 1 if n == 1 else rounded_up(n, 2)


def token_buffer(n: int, features: int) -> Buffer:
    return Buffer(_zeros(features, 1, 1, token_columns(n)), (0, 0), n)


def _zeros(*shape: int) -> Tensor:
    """Zeros with slack at the end, because the last vector is written as a whole."""
    room = memory.zeros(prod(shape) + processor.WIDEST)
    return room[: prod(shape)].view(shape)


class Flag:
    """Set if some value was not finite; generated code sets it through its address."""

    def __init__(self) -> None:
        self.cell = np.zeros(1, np.float32)

    @property
    def is_raised(self) -> bool:
        return bool(self.cell[0])

    def clear(self) -> None:
        self.cell[0] = 0.0

    def check(self, value: object, limit: float = 1.0) -> None:
        """Sets the flag if the sum of a tensor's values, or `limit` times the largest, is not finite."""
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        total = float(value.sum(dtype=torch.float32))  # of float16, sums overflow beyond 65504
        if limit > 1 and value.numel():
            low, high = value.aminmax()
            total += float(torch.maximum(-low, high) * limit)
        if total - total != 0:
            self.cell[0] = 1.0


class Arena:
    """The buffers of a plan: finds the buffer of a tensor, and reuses buffers that are no longer read."""

    def __init__(self) -> None:
        self.flag = Flag()
        self._by_address: dict[int, Buffer] = {}
        self._free: dict[tuple[object, ...], list[Buffer]] = {}
        self._shared: set[int] = set()  # addresses of buffers that may be reused

    def image(self, n: int, channels: int, height: int, width: int, border: Pair) -> Buffer:
        """A buffer that is no longer read, or a new one, for a step that may be tried with it; see `take`."""
        free = self._free.get((n, channels, height, width, border))
        return free[-1] if free else image_buffer(n, channels, height, width, border)

    def take(self, buffer: Buffer, *, is_shared: bool = False) -> Buffer:
        """Takes in a buffer that a step of the plan writes to; it is used again only if it may be shared."""
        address = buffer.data_CHWN.data_ptr()
        if address in self._by_address:
            self._free[_form(buffer)].remove(buffer)
        self._by_address[address] = buffer
        if is_shared:
            self._shared.add(address)
        return buffer

    def release(self, tensor: Tensor) -> None:
        """Allows a later result of the same shape to reuse this buffer (its border is still zero)."""
        buffer = self.buffer_of(tensor)
        if buffer is not None and buffer.data_CHWN.data_ptr() in self._shared:
            self._free.setdefault(_form(buffer), []).append(buffer)

    def pin(self, tensor: Tensor) -> None:
        """Excludes the buffer of this tensor from reuse: torch may hold views of it."""
        buffer = self.buffer_of(tensor)
        if buffer is not None:
            self._shared.discard(buffer.data_CHWN.data_ptr())

    def buffer_of(self, tensor: Tensor) -> Buffer | None:
        """The buffer that this tensor is a view of, or None."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def image_of(self, tensor: Tensor) -> Buffer | None:
        """The buffer whose complete images this tensor is a view of, or None."""
        buffer = self.buffer_of(tensor)
        if buffer is None or tensor.ndim != 4:
            return None
        inner = buffer.inner
        is_same = inner.shape == tensor.shape and inner.data_ptr() == tensor.data_ptr()
        strides = all(a == b for a, b, size in zip(inner.stride(), tensor.stride(), tensor.shape) if size > 1)
        return buffer if is_same and strides else None


def _form(buffer: Buffer) -> tuple[object, ...]:
    """The key by which buffers are grouped that can stand for one another."""
    return (*buffer.inner.shape, buffer.border)


@dataclass(frozen=True)
class Work:
    """What a step is made from: a graph's constants, the values so far, and the buffers of the plan."""

    constants: dict[int, Tensor]
    values: Values
    arena: Arena
    border: Pair = (0, 0)  # of the result, where that is an image

    def input(self, op: Op, place: int = 0) -> Tensor:
        """The value that is an argument of the operation."""
        return self.values[op.args[place].value]

    def are_constant(self, refs: list[Slot | None]) -> bool:
        """Whether arguments are constants of the network, or left out."""
        return all(ref is None or (isinstance(ref, Slot) and ref.value in self.constants) for ref in refs)


@dataclass(frozen=True)
class Operand:
    """Memory that a product reads or writes: its layout in floats, and the function that fills it, if any."""

    data: Tensor
    origin: int
    line: int  # from one output row to the next
    pixel: int  # from one output pixel to the next
    channel: int
    row: int = 0  # from one row of the kernel window to the next
    phase: int = 0  # from one phase of a strided input to the next; 0 if columns are in order
    n: int = 1  # adjacent points
    fill: Fill | None = None


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


def image_input(number: int, x: Tensor, stride: Pair, padding: Pair, arena: Arena) -> Operand:
    """The input of a convolution, with a border at least as wide as its padding."""
    if rounded_up(len(x)) % VECTOR and stride[1] > 1:
        return _phases(number, x, stride, padding)
    buffer = arena.image_of(x)
    if buffer is not None and all(have >= need for have, need in zip(buffer.border, padding)):
        return operand_of(buffer, stride, padding)
    n, channels, height, width = x.shape
    buffer = image_buffer(n, channels, height, width, padding)
    return operand_of(buffer, stride, padding, _copy(number, buffer.inner))


def image_addend(number: int, x: Tensor, like: Buffer, arena: Arena) -> Operand:
    """A tensor that is added to images N x C x H x W."""
    buffer = arena.image_of(x)
    if buffer is not None and x.shape == like.inner.shape:
        return operand_of(buffer)
    buffer = image_buffer(*like.inner.shape)
    return operand_of(buffer, fill=_copy(number, buffer.inner))


def operand_of(buffer: Buffer, stride: Pair = (1, 1), padding: Pair = (0, 0), fill: Fill | None = None) -> Operand:
    _, height, width, n = buffer.data_CHWN.shape
    origin = ((buffer.border[0] - padding[0]) * width + buffer.border[1] - padding[1]) * n
    a_row = width * n
    return Operand(buffer.data_CHWN, origin, stride[0] * a_row, stride[1] * n, height * a_row, a_row, n=n, fill=fill)


def _phases(number: int, x: Tensor, stride: Pair, padding: Pair) -> Operand:
    """For few points and a stride s: stores columns 0, s, 2s .. first, then 1, s + 1 .., so pixels form vectors."""
    n, channels, height, width = x.shape
    (pad_rows, pad_columns), step = padding, stride[1]
    n_columns = -(-(width + 2 * pad_columns) // step)
    data = memory.zeros(channels, height + 2 * pad_rows, step, n_columns, n)

    def fill(values: Values) -> None:
        source_CHWN = values[number].permute(1, 2, 3, 0)
        for phase in range(step):
            first = (phase - pad_columns) % step
            if first < width:
                columns = source_CHWN[:, :, first::step]
                start = (first + pad_columns) // step
                data[:, pad_rows : pad_rows + height, phase, start : start + columns.shape[2]] = columns

    row = step * n_columns * n
    return Operand(data, 0, stride[0] * row, n, data.shape[1] * row, row, n_columns * n, n, fill)


def token_input(number: int, x: Tensor, arena: Arena) -> tuple[Operand, tuple[int, ...]]:
    """The input of a linear layer, and the strides of its leading dimensions."""
    lead, n = tuple(x.shape[:-1]), prod(x.shape[:-1])
    strides, buffer = _token_strides(x), arena.buffer_of(x)
    if strides is not None and buffer is not None and buffer.data_CHWN.data_ptr() == x.data_ptr():
        n_columns = buffer.data_CHWN.shape[3]  # for images this may not be a whole number of vectors
        has_all = buffer.data_CHWN.numel() == n_columns * x.shape[-1] and buffer.n == n
        if has_all and n_columns == token_columns(n) and (x.shape[-1] == 1 or x.stride(-1) == n_columns):
            # Images, too: the features of a token are then the channels and positions of an image.
            return Operand(buffer.data_CHWN, 0, n_columns, n_columns, n_columns, n=n_columns), strides
    strides = tuple(prod(lead[d + 1 :]) if lead[d] > 1 else 0 for d in range(len(lead)))  # row-major
    buffer = token_buffer(n, x.shape[-1])
    return operand_of(buffer, fill=_copy(number, buffer.tokens(lead, strides))), strides


def token_addend(number: int, x: Tensor, strides: tuple[int, ...], features: int, arena: Arena) -> Operand:
    """A tensor that is added to the output of a linear layer whose tokens have these strides."""
    operand, have = token_input(number, x, arena)
    if operand.fill is None and have == strides and x.shape[-1] == features:
        return operand
    buffer = token_buffer(prod(x.shape[:-1]), features)
    return operand_of(buffer, fill=_copy(number, buffer.tokens(tuple(x.shape[:-1]), strides)))


def _token_strides(x: Tensor) -> tuple[int, ...] | None:
    """The strides of the leading dimensions of x (*lead, features) if its tokens are contiguous, else None."""
    dims = sorted((d for d in range(x.ndim - 1) if x.shape[d] > 1), key=lambda d: x.stride(d))
    expected = 1
    for d in dims:
        if x.stride(d) != expected:
            return None
        expected *= x.shape[d]
    return tuple(x.stride(d) if x.shape[d] > 1 else 0 for d in range(x.ndim - 1))


def _copy(number: int, target: Tensor) -> Fill:
    def fill(values: Values) -> None:
        target.copy_(values[number].expand(target.shape))

    return fill
