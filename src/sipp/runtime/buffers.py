"""Buffers for activations, stored as channels x height x width x points, so points (or tokens) are adjacent.

A buffer belongs to a plan and is overwritten by every call. Each image has a border of zeros as wide as the padding of
the convolutions that read it, so no loop needs bounds checks. The number of points is rounded up to whole vectors. To
torch, a buffer is an ordinary tensor N x C x H x W (or tokens x features) with unusual strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from sipp.native import memory

VECTOR = 8  # the number of points is rounded up to a multiple of this
SLACK = 16  # floats in the widest vector
FEWEST_POINTS = 6  # with fewer points, vectors run along rows of pixels instead


@dataclass(frozen=True)
class Buffer:
    """An activation tensor data_CHWN with a border of zeros; initially all zero."""

    data_CHWN: Tensor
    border: tuple[int, int]
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


def image_buffer(n: int, channels: int, height: int, width: int, border: tuple[int, int] = (0, 0)) -> Buffer:
    return Buffer(_zeros(channels, height + 2 * border[0], width + 2 * border[1], rounded_up(n)), border, n)


def token_columns(n: int) -> int:
    """How many columns n tokens need: 1 for a single token, otherwise whole vectors."""
    return 1 if n == 1 else rounded_up(n, 2)


def token_buffer(n: int, features: int) -> Buffer:
    return Buffer(_zeros(features, 1, 1, token_columns(n)), (0, 0), n)


def _zeros(*shape: int) -> Tensor:
    """Zeros with slack at the end, because the last vector is written as a whole."""
    room = memory.zeros(prod(shape) + SLACK)
    return room[: prod(shape)].view(shape)


def token_strides(x: Tensor) -> tuple[int, ...] | None:
    """The strides of the leading dimensions of x (*lead, features) if its tokens are contiguous, else None."""
    dims = sorted((d for d in range(x.ndim - 1) if x.shape[d] > 1), key=lambda d: x.stride(d))
    expected = 1
    for d in dims:
        if x.stride(d) != expected:
            return None
        expected *= x.shape[d]
    return tuple(x.stride(d) if x.shape[d] > 1 else 0 for d in range(x.ndim - 1))


def plain_strides(lead: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of tokens in row-major order."""
    return tuple(prod(lead[d + 1 :]) if lead[d] > 1 else 0 for d in range(len(lead)))


class Flag:
    """Set if some value was not finite; generated code sets it through its address."""

    def __init__(self) -> None:
        self.cell = np.zeros(1, np.float32)

    @property
    def is_raised(self) -> bool:
        return bool(self.cell[0])

    def clear(self) -> None:
        self.cell[0] = 0.0

    def check(self, value: Tensor, limit: float = 1.0) -> None:
        """Sets the flag if the sum of the values, or `limit` times the largest, is not finite."""
        is_half = value.dtype is torch.float16  # sums overflow beyond 65504
        total = float(value.sum(dtype=torch.float32) if is_half else value.sum())
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

    def image(self, n: int, channels: int, height: int, width: int, border: tuple[int, int]) -> Buffer:
        key = (n, channels, height, width, border)
        free = self._free.get(key, [])
        if free:
            return free.pop()
        buffer = self.add_image(n, channels, height, width, border)
        self._shared.add(buffer.data_CHWN.data_ptr())
        return buffer

    def add_image(self, n: int, channels: int, height: int, width: int, border: tuple[int, int]) -> Buffer:
        return self.add(image_buffer(n, channels, height, width, border))

    def add(self, buffer: Buffer) -> Buffer:
        self._by_address[buffer.data_CHWN.data_ptr()] = buffer
        return buffer

    def release(self, tensor: Tensor) -> None:
        """Allows a later result of the same shape to reuse this buffer (its border is still zero)."""
        buffer = self.buffer_of(tensor)
        if buffer is not None and buffer.data_CHWN.data_ptr() in self._shared:
            n, *shape = buffer.inner.shape
            self._free.setdefault((n, *shape, buffer.border), []).append(buffer)

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

    @property
    def n_bytes(self) -> int:
        return sum(buffer.data_CHWN.nbytes for buffer in self._by_address.values())
