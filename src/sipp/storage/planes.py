"""Numbers as planes of bytes, each as it is or Huffman-coded, whichever is shorter; and back, bit by bit.

Floats are turned by one bit first: the sign goes to the other end, and the exponent fills the first plane. That one
has few different values in a network; the others are nearly random and stay as they are. Little-endian everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sipp.errors import DataError
from sipp.storage import huffman

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
TURNED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}  # whose sign moves to the end; may be sparse

Bytes = NDArray[np.uint8]


def raw_bits(tensor_K: Tensor) -> NDArray[np.unsignedinteger]:
    """The bits of a flat float tensor as whole numbers; shares its memory."""
    found: NDArray[np.unsignedinteger] = tensor_K.view(torch.uint8).numpy().view(f"u{tensor_K.element_size()}")
    return found


def encode_planes(tensor_K: Tensor, *, coded: bool) -> list[bytes]:
    """The planes of a flat tensor, from the highest byte of its numbers to the lowest."""
    width = tensor_K.element_size()
    if tensor_K.dtype in TURNED:
        bits = raw_bits(tensor_K)
        one, rest = bits.dtype.type(1), bits.dtype.type(8 * width - 1)
        turned = np.bitwise_or(bits << one, bits >> rest)
        rows: Bytes = turned.astype(f"<u{width}", copy=False).view(np.uint8).reshape(-1, width)
    else:
        rows = tensor_K.view(torch.uint8).numpy().reshape(-1, width)
    planes = [np.ascontiguousarray(rows[:, i]).tobytes() for i in reversed(range(width))]
    return [_shorter(plane) if coded else plane for plane in planes]


def decode_planes(planes: Sequence[memoryview], n_numbers: int, dtype: torch.dtype, what: str) -> Tensor:
    """The flat tensor that `encode_planes` was given."""
    width = len(planes)
    rows: Bytes = np.empty((n_numbers, width), dtype=np.uint8)
    for i, plane in zip(reversed(range(width)), planes):
        symbols = plane if len(plane) == n_numbers else huffman.decode(plane, n_numbers, what)
        if len(symbols) != n_numbers:
            raise DataError(f"{what}: {len(symbols):,} bytes of {n_numbers:,} numbers; save it again")
        rows[:, i] = np.frombuffer(symbols, dtype=np.uint8)
    if dtype in TURNED:
        bits = rows.reshape(-1).view(f"<u{width}")
        one, rest = bits.dtype.type(1), bits.dtype.type(8 * width - 1)
        turned = np.bitwise_or(bits >> one, bits << rest)
        rows = turned.astype(f"=u{width}", copy=False).view(np.uint8)
    if dtype == torch.bool and rows.size and int(rows.max()) > 1:
        raise DataError(f"{what}: holds bytes that are neither true nor false; save it again")
    return torch.from_numpy(rows.reshape(-1)).view(dtype)


def cut(data: memoryview, lengths: Sequence[int]) -> Iterator[memoryview]:
    """The pieces of these lengths, one after the other."""
    start = 0
    for length in lengths:
        yield data[start : start + length]
        start += length


def _shorter(plane: bytes) -> bytes:
    """The plane or its code; as long as the plane itself means: not coded."""
    code = huffman.encode(plane)
    return code if len(code) < len(plane) else plane
