"""Encodes values and positions without loss in few bytes, for the file of `sipp.save`.

Numbers are split into byte planes, each stored raw or Huffman-coded, whichever is shorter. Floats are first rotated by
one bit, so that the sign becomes the lowest bit and the exponent fills the first plane. That plane has few distinct
values in a network; the others are nearly random. Everything is little-endian.

A bitmask says which weights are stored, or the gaps between them: the number of weights before the next one that is
stored, where 255 means "255 and more to come"; the last gap leads to the end. For weights kept independently with
probability p the gaps have exactly the entropy H(p) per weight, and their Huffman code comes within 5 % of n H(p).

The Huffman code is that of zlib without string matching: available everywhere, in a stable format, adapted every 32,000
symbols.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # which may be sparse or rounded
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
Flags = NDArray[np.bool_]
Bits = NDArray[np.unsignedinteger]

LEVEL, WINDOW, MEMORY = 9, -15, 9  # of zlib: raw deflate, with the longest blocks between two tables
MORE = 255  # symbol: skip 255 weights, and the gap continues


def huffman(symbols: bytes) -> bytes:
    """The Huffman code of these bytes, which `zlib.decompress(code, WINDOW)` reads."""
    coder = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOW, MEMORY, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(symbols) + coder.flush()


# --- numbers --------------------------------------------------------------------------------------------------------


def raw_bits(tensor_K: Tensor) -> Bits:
    """The bits of a flat tensor as unsigned integers; shares its memory."""
    bits: Bits = tensor_K.view(torch.uint8).numpy().view(f"u{tensor_K.element_size()}")
    return bits


def from_bits(bits: Bits, dtype: torch.dtype) -> Tensor:
    """The flat tensor with these bits; shares their memory."""
    return torch.from_numpy(bits.view(np.uint8)).view(dtype)


def encode_numbers(tensor_K: Tensor, *, coded: bool) -> list[bytes]:
    """The byte planes of a flat tensor, from the most significant byte to the least."""
    width = tensor_K.element_size()
    flat = tensor_K.view(torch.uint8).numpy()
    if tensor_K.dtype in FLOATS:
        flat = _rotated(raw_bits(tensor_K), 1).astype(f"<u{width}", copy=False).view(np.uint8)
    rows = flat.reshape(-1, width)
    planes = [np.ascontiguousarray(rows[:, i]).tobytes() for i in reversed(range(width))]
    # A code as long as its plane is the plane itself
    return [min(plane, huffman(plane), key=len) for plane in planes] if coded else planes


def decode_numbers(planes: Sequence[memoryview], n_numbers: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode_numbers`."""
    width = len(planes)
    rows: NDArray[np.uint8] = np.empty((n_numbers, width), dtype=np.uint8)
    for i, plane in zip(reversed(range(width)), planes):
        symbols = plane if len(plane) == n_numbers else zlib.decompress(plane, WINDOW)
        rows[:, i] = np.frombuffer(symbols, dtype=np.uint8)
    if dtype not in FLOATS:
        return torch.from_numpy(rows.reshape(-1)).view(dtype)
    bits = _rotated(rows.reshape(-1).view(f"<u{width}"), 8 * width - 1)
    return from_bits(bits.astype(f"=u{width}", copy=False), dtype)


def _rotated(bits: Bits, n_left: int) -> Bits:
    """The bits of each number, rotated left by `n_left` places."""
    left, right = bits.dtype.type(n_left), bits.dtype.type(8 * bits.itemsize - n_left)
    return np.bitwise_or(bits << left, bits >> right)


# --- positions ------------------------------------------------------------------------------------------------------


def encode_positions(is_stored: Flags) -> tuple[str, bytes]:
    """Encodes which weights are stored, in the shortest of three ways."""
    if is_stored.all():
        return "all", b""
    code, bitmask = huffman(_gaps(is_stored)), np.packbits(is_stored, bitorder="little").tobytes()
    return ("gaps", code) if len(code) < len(bitmask) else ("bitmask", bitmask)


def decode_positions(kind: str, code: memoryview, n_weights: int) -> Flags:
    """The inverse of `encode_positions`."""
    if kind == "all":
        return np.ones(n_weights, dtype=np.bool_)
    if kind == "bitmask":
        bits = np.unpackbits(np.frombuffer(code, dtype=np.uint8), count=n_weights, bitorder="little")
        return bits.view(np.bool_)
    is_stored = np.zeros(n_weights, dtype=np.bool_)
    is_stored[_places(np.frombuffer(zlib.decompress(code, WINDOW), dtype=np.uint8))] = True
    return is_stored


def _gaps(is_stored: Flags) -> bytes:
    """The gaps before each stored weight and before the end, as bytes."""
    places = np.append(np.flatnonzero(is_stored), is_stored.size)
    gaps = np.diff(places, prepend=-1) - 1
    n_more = gaps // MORE
    symbols = np.full(int(n_more.sum()) + gaps.size, MORE, dtype=np.uint8)
    symbols[np.cumsum(n_more + 1) - 1] = gaps % MORE
    return symbols.tobytes()


def _places(symbols: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The positions of the stored weights, from their gaps."""
    is_end = symbols != MORE
    steps = symbols.astype(np.int64) + is_end
    return (np.cumsum(steps)[is_end] - 1)[:-1]
