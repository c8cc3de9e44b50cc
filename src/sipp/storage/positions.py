"""Which of a tensor's weights are stored, as bytes and back: all, a bitmask, or the gaps between the rarer kind.

A gap is the number of weights before the next one of that kind, 255 standing for "255 more"; the last gap leads to the
end. For weights kept independently with probability p these gaps have exactly the entropy H(p) a weight, so that a
Huffman code of them (`huffman.py`) comes within 5 % of n H(p), within 1 % for p below 0.3, and below n H of the whole
network's keep where layers differ.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sipp.errors import DataError
from sipp.storage import huffman

PositionKind = Literal["all", "bitmask", "kept gaps", "zero gaps"]
Flags = NDArray[np.bool_]

MORE = 255  # this many weights are skipped, and the gap goes on
MOST_WEIGHTS_PER_BYTE = 256  # codes are padded to this, so that a small file never asks for unbounded memory


def bitmask_bytes(n_weights: int) -> int:
    return -(-n_weights // 8)


def least_gap_bytes(n_weights: int) -> int:
    return -(-n_weights // MOST_WEIGHTS_PER_BYTE)


def encode_positions(is_stored: Flags) -> tuple[PositionKind, bytes]:
    """The cheapest of the three ways to say which weights are stored."""
    n_weights, n_stored = is_stored.size, int(np.count_nonzero(is_stored))
    if n_stored == n_weights:
        return "all", b""
    rarer: PositionKind = "kept gaps" if 2 * n_stored <= n_weights else "zero gaps"
    code = huffman.encode(_gaps(is_stored if rarer == "kept gaps" else ~is_stored))
    code += bytes(max(0, least_gap_bytes(n_weights) - len(code)))
    if len(code) < bitmask_bytes(n_weights):
        return rarer, code
    return "bitmask", np.packbits(is_stored, bitorder="little").tobytes()


def decode_positions(kind: PositionKind, code: memoryview, n_weights: int, n_stored: int, what: str) -> Flags:
    """The flags that `encode_positions` was given; DataError where the code does not say n_stored of them."""
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
    """The gaps in front of each rare weight and in front of the end, as bytes."""
    places = np.append(np.flatnonzero(is_rare), is_rare.size)
    gaps = np.diff(places, prepend=-1) - 1
    n_more = gaps // MORE
    symbols = np.full(int(n_more.sum()) + gaps.size, MORE, dtype=np.uint8)
    symbols[np.cumsum(n_more + 1) - 1] = gaps % MORE
    return symbols.tobytes()


def _places(code: memoryview, n_weights: int, n_rare: int, what: str) -> NDArray[np.int64]:
    """Where the rare weights are, from the code of their gaps."""
    most_symbols = n_rare + 1 + n_weights // MORE
    symbols = np.frombuffer(huffman.decode(code, most_symbols, what), dtype=np.uint8)
    is_end = symbols != MORE
    steps = symbols.astype(np.int64)
    steps += is_end
    places = np.cumsum(steps)[is_end] - 1
    if not (symbols.size and is_end[-1] and places.size == n_rare + 1 and places[-1] == n_weights):
        raise DataError(f"{what}: its gaps do not lead to the end of its {n_weights:,} weights; save it again")
    return places[:-1]
