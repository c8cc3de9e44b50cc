"""Reads a file of `sipp.save` with Python and NumPy alone: {name: array}. Copy this file; it needs no other.

    python read_small.py net.safetensors net.npz      # all tensors as NumPy arrays
    tensors = read("net.safetensors")                 # the same in a program

The layout, little-endian throughout:

    file       a safetensors file of two byte tensors, `index` and `data`; its metadata hold their SHA-256
    parts      where the index lists some, `data` is empty, and these files beside it hold it, one after the other
    index      JSON, compressed by zlib; `tensors` lists the tensors in the order of their bytes in `data`
    tensor     positions, then the planes of its values, then (int8) the planes of its scales, then a mask of its own
    positions  which numbers are stored: "all"; "bitmask", one bit each, lowest first; "kept gaps" or "zero gaps",
               the count of numbers before each kept (or each zero) one and before the end, 255 meaning 255 and more
               to come, Huffman-coded (raw deflate); all other numbers are zero
    planes     all highest bytes, then all second ones, and so on; a plane shorter than its numbers is Huffman-coded;
               floats are rotated left by one bit first, so that the sign is the lowest bit
    values     "exact", "fp16", "bf16", or "int8": a level from -127 to 127 times the float32 scale of its row

bfloat16, which NumPy does not have, is read as float32, exactly; float8 is read as its bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import zlib
from typing import Any

import numpy as np

WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes of the floats that are rotated


def read(path: str) -> dict[str, Any]:
    """The tensors of a file, by name; ValueError if it is damaged, or no file of `sipp.save`."""
    code, content, _ = _unpacked(path, "sipp-file/1", "sipp-file/2")
    index = json.loads(zlib.decompress(code))
    for part in index.get("parts", ()):
        _, data, digest = _unpacked(os.path.join(os.path.dirname(os.path.realpath(path)), part["name"]), "sipp-part/1")
        if digest != part["sha256"]:
            raise ValueError(f"{part['name']} is another part than the one that {path} was saved with")
        content += data
    tensors: dict[str, Any] = {}
    at = 0
    for entry in index["tensors"]:
        array, at = _tensor(entry, content, at)
        tensors.update(dict.fromkeys(entry["names"], array))
    return tensors


def _unpacked(path: str, *kinds: str) -> tuple[bytes, bytes, str]:
    """The index, the data and their SHA-256."""
    with open(path, "rb") as file:
        content = file.read()
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8:start])
        kind, digest = header["__metadata__"]["format"], header["__metadata__"]["sha256"]
        end = start + header["index"]["data_offsets"][1]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file from sipp.save") from error
    if kind not in kinds or hashlib.sha256(content[start:]).hexdigest() != digest:
        raise ValueError(f"{path} is damaged, or of a version that is not read here ({kind})")
    return content[start:end], content[end:], digest


def _tensor(entry: Any, content: bytes, at: int) -> tuple[Any, int]:
    """A tensor, and the offset after its bytes."""
    values, shape, kept = entry["values"], entry["shape"], entry["positions"]["kept"]
    n_rows, n_weights = shape[0] if shape else 1, math.prod(shape)
    is_stored, at = _positions(entry["positions"], content, at, n_weights)
    rounding = values["rounding"]
    stored_as = {"exact": entry["dtype"], "fp16": "float16", "bf16": "bfloat16"}.get(rounding, rounding)
    numbers, at = _numbers(values["planes"], content, at, kept, stored_as)
    if rounding == "int8":
        scales, at = _numbers(values["scale_planes"], content, at, n_rows, "float32")
        rows = np.flatnonzero(is_stored) // max(n_weights // max(n_rows, 1), 1)
        numbers = numbers.astype(np.float32) * scales[rows]
        numbers = _rounded_to_bfloat16(numbers) if entry["dtype"] == "bfloat16" else numbers
    if rounding != "exact":
        numbers = numbers.astype(np.float32 if entry["dtype"] == "bfloat16" else entry["dtype"])
    array = np.zeros(n_weights, dtype=numbers.dtype)
    array[is_stored] = numbers
    if isinstance(entry["mask"], dict):  # only where a pruned number is -0.0
        at += entry["mask"]["n_bytes"]
    return array.reshape(shape), at


def _positions(positions: Any, content: bytes, at: int, n_weights: int) -> tuple[Any, int]:
    """Which numbers are stored, and the offset after these bytes."""
    end = at + positions["n_bytes"]
    code = content[at:end]
    if positions["kind"] == "all":
        return np.ones(n_weights, dtype=bool), end
    if positions["kind"] == "bitmask":
        return np.unpackbits(np.frombuffer(code, np.uint8), bitorder="little")[:n_weights].astype(bool), end
    symbols = np.frombuffer(zlib.decompressobj(-15).decompress(code), np.uint8)
    is_last = symbols != 255
    places = np.cumsum(symbols.astype(np.int64) + is_last)[is_last] - 1
    is_rare = np.zeros(n_weights, dtype=bool)
    is_rare[places[:-1]] = True
    return (is_rare if positions["kind"] == "kept gaps" else ~is_rare), end


def _numbers(planes: list[int], content: bytes, at: int, n_numbers: int, dtype: str) -> tuple[Any, int]:
    """A flat array from its byte planes, and the offset after them."""
    rows = np.empty((n_numbers, len(planes)), dtype=np.uint8)
    for i, n_bytes in enumerate(planes):
        code, at = content[at : at + n_bytes], at + n_bytes
        plane = code if n_bytes == n_numbers else zlib.decompressobj(-15).decompress(code)
        rows[:, len(planes) - 1 - i] = np.frombuffer(plane, np.uint8)
    flat = rows.reshape(-1)
    if dtype in WIDTHS:
        bits = flat.view(f"<u{WIDTHS[dtype]}")
        one, others = bits.dtype.type(1), bits.dtype.type(8 * WIDTHS[dtype] - 1)
        bits = (bits >> one) | (bits << others)
        return (_from_bfloat16(bits) if dtype == "bfloat16" else bits.view(_little(dtype))), at
    return flat.view("uint8" if dtype.startswith("float8") else _little(dtype)), at


def _little(dtype: str) -> Any:
    return np.dtype(dtype).newbyteorder("<")


def _from_bfloat16(bits: Any) -> Any:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _rounded_to_bfloat16(numbers: Any) -> Any:
    """The nearest bfloat16, half-way to even, as float32."""
    bits = numbers.astype(np.float32).view(np.uint32)
    up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python read_small.py FILE.safetensors OUT.npz")
    tensors = read(sys.argv[1])
    np.savez(sys.argv[2], **tensors)
    for name, array in tensors.items():
        print(f"{name}: {array.dtype} {array.shape}, {np.count_nonzero(array):,} of {array.size:,} not zero")
