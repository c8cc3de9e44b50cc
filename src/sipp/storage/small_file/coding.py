"""Encodes values and positions without loss in few bytes, for the file of `sipp.save`.

Numbers are split into byte planes, each stored raw or Huffman-coded, whichever is shorter. Floats are first rotated by
one bit, so that the sign becomes the lowest bit and the exponent fills the first plane. That plane has few distinct
values in a network; the others are nearly random. Everything is little-endian.

A bitmask says which weights are stored, or the gaps between the rarer kind (kept or zero): the number of weights before
the next one, where 255 means "255 and more to come"; the last gap leads to the end. For weights kept independently with
probability p the gaps have exactly the entropy H(p) per weight. Their Huffman code comes within 5 % of n H(p), within
1 % for p below 0.3, and below n H of the whole network's keep if layers differ.

The Huffman code is that of zlib without string matching: it is available everywhere, its format is stable, and it
adapts every 32,000 symbols.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sipp.errors import DataError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # which may be sparse or rounded
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
PositionKind = Literal["all", "bitmask", "kept gaps", "zero gaps"]
Flags = NDArray[np.bool_]

LEVEL, WINDOW, MEMORY = 9, -15, 9  # of zlib: raw deflate, with the longest blocks between two tables
MOST_SYMBOLS_PER_BYTE = 8  # a Huffman code gives every symbol at least a bit
MOST_WEIGHTS_PER_BYTE = 256  # codes of gaps are padded to this: a small file never asks for unbounded memory
MORE = 255  # symbol: skip 255 weights, and the gap continues


def huffman(symbols: bytes) -> bytes:
    """The Huffman code of these bytes."""
    coder = zlib.compressobj(LEVEL, zlib.DEFLATED, WINDOW, MEMORY, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(symbols) + coder.flush()


def unhuffman(code: bytes | memoryview, most_symbols: int, what: str) -> bytes:
    """The inverse of `huffman`, for at most `most_symbols` bytes; zeros may follow the code."""
    coder = zlib.decompressobj(WINDOW)
    try:
        symbols = coder.decompress(code, most_symbols + 1)
    except zlib.error as error:
        raise DataError(f"{what}: its code cannot be read ({error}); save it again") from error
    if not coder.eof or len(symbols) > most_symbols or coder.unused_data.strip(b"\0"):
        raise DataError(f"{what}: its code gives more bytes than it may, or does not end; save it again")
    return symbols


def pieces_of(data: memoryview, lengths: Sequence[int]) -> Iterator[memoryview]:
    """Consecutive slices of the data with these lengths."""
    start = 0
    for length in lengths:
        yield data[start : start + length]
        start += length


# --- numbers --------------------------------------------------------------------------------------------------------


def raw_bits(tensor_K: Tensor) -> NDArray[np.unsignedinteger]:
    """The bits of a flat tensor as unsigned integers; shares its memory."""
    bits: NDArray[np.unsignedinteger] = tensor_K.view(torch.uint8).numpy().view(f"u{tensor_K.element_size()}")
    return bits


def from_bits(bits: NDArray[np.unsignedinteger], dtype: torch.dtype) -> Tensor:
    """The flat tensor with these bits; shares their memory."""
    return torch.from_numpy(bits.view(np.uint8)).view(dtype)


def encode_numbers(tensor_K: Tensor, *, coded: bool) -> list[bytes]:
    """The byte planes of a flat tensor, from the most significant byte to the least."""
    width = tensor_K.element_size()
    if tensor_K.dtype in FLOATS:
        bits = _rotated(raw_bits(tensor_K), 1).astype(f"<u{width}", copy=False).view(np.uint8)
    else:
        bits = tensor_K.view(torch.uint8).numpy()
    rows = bits.reshape(-1, width)
    planes = [np.ascontiguousarray(rows[:, i]).tobytes() for i in reversed(range(width))]
    # A code as long as its plane is the plane itself
    return [min(plane, huffman(plane), key=len) for plane in planes] if coded else planes


def decode_numbers(planes: Sequence[memoryview], n_numbers: int, dtype: torch.dtype, what: str) -> Tensor:
    """The inverse of `encode_numbers`."""
    width = len(planes)
    rows: NDArray[np.uint8] = np.empty((n_numbers, width), dtype=np.uint8)
    for i, plane in zip(reversed(range(width)), planes):
        symbols = plane if len(plane) == n_numbers else unhuffman(plane, n_numbers, what)
        if len(symbols) != n_numbers:
            raise DataError(f"{what}: {len(symbols):,} bytes of {n_numbers:,} numbers; save it again")
        rows[:, i] = np.frombuffer(symbols, dtype=np.uint8)
    flat = rows.reshape(-1)
    if dtype in FLOATS:
        bits = _rotated(flat.view(f"<u{width}"), 8 * width - 1)
        return from_bits(bits.astype(f"=u{width}", copy=False), dtype)
    if dtype == torch.bool and flat.size and int(flat.max()) > 1:
        raise DataError(f"{what}: holds bytes that are neither true nor false; save it again")
    return torch.from_numpy(flat).view(dtype)


def _rotated(bits: NDArray[np.unsignedinteger], n_left: int) -> NDArray[np.unsignedinteger]:
    """The bits of each number, rotated left by `n_left` places."""
    left, right = bits.dtype.type(n_left), bits.dtype.type(8 * bits.itemsize - n_left)
    return np.bitwise_or(bits << left, bits >> right)


# --- positions ------------------------------------------------------------------------------------------------------


def bitmask_bytes(n_weights: int) -> int:
    return -(-n_weights // 8)


def least_gap_bytes(n_weights: int) -> int:
    return -(-n_weights // MOST_WEIGHTS_PER_BYTE)


def encode_positions(is_stored: Flags) -> tuple[PositionKind, bytes]:
    """Encodes which weights are stored, in the shortest of three ways."""
    n_weights, n_stored = is_stored.size, int(np.count_nonzero(is_stored))
    if n_stored == n_weights:
        return "all", b""
    rarer: PositionKind = "kept gaps" if 2 * n_stored <= n_weights else "zero gaps"
    code = huffman(_gaps(is_stored if rarer == "kept gaps" else ~is_stored))
    code += bytes(max(0, least_gap_bytes(n_weights) - len(code)))
    if len(code) < bitmask_bytes(n_weights):
        return rarer, code
    return "bitmask", np.packbits(is_stored, bitorder="little").tobytes()


def decode_positions(kind: PositionKind, code: memoryview, n_weights: int, n_stored: int, what: str) -> Flags:
    """The inverse of `encode_positions`; DataError if the code does not give `n_stored` positions."""
    if kind == "all":
        return np.ones(n_weights, dtype=np.bool_)
    if kind == "bitmask":
        bits = np.unpackbits(np.frombuffer(code, dtype=np.uint8), bitorder="little")
        if bits[n_weights:].any():
            raise DataError(f"{what}: its bitmask goes on after its {n_weights:,} weights; save it again")
        is_stored = bits[:n_weights].view(np.bool_)
    else:
        n_rarer = n_stored if kind == "kept gaps" else n_weights - n_stored
        is_stored = np.zeros(n_weights, dtype=np.bool_)
        is_stored[_places(code, n_weights, n_rarer, what)] = True
        if kind == "zero gaps":
            np.logical_not(is_stored, out=is_stored)
    if np.count_nonzero(is_stored) != n_stored:
        raise DataError(f"{what}: its positions are not the {n_stored:,} it declares; save it again")
    return is_stored


def _gaps(is_rare: Flags) -> bytes:
    """The gaps before each rare weight and before the end, as bytes."""
    places = np.append(np.flatnonzero(is_rare), is_rare.size)
    gaps = np.diff(places, prepend=-1) - 1
    n_more = gaps // MORE
    symbols = np.full(int(n_more.sum()) + gaps.size, MORE, dtype=np.uint8)
    symbols[np.cumsum(n_more + 1) - 1] = gaps % MORE
    return symbols.tobytes()


def _places(code: memoryview, n_weights: int, n_rare: int, what: str) -> NDArray[np.int64]:
    """The positions of the rare weights, from the code of their gaps."""
    most_symbols = n_rare + 1 + n_weights // MORE
    symbols = np.frombuffer(unhuffman(code, most_symbols, what), dtype=np.uint8)
    is_end = symbols != MORE
    steps = symbols.astype(np.int64)
    steps += is_end
    places = np.cumsum(steps)[is_end] - 1
    if not (symbols.size and is_end[-1] and places.size == n_rare + 1 and places[-1] == n_weights):
        raise DataError(f"{what}: its gaps do not lead to the end of its {n_weights:,} weights; save it again")
    return places[:-1]
