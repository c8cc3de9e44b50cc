"""Files of `sipp.save` that were damaged, or made by someone who means harm."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sipp
from sipp.errors import DataError
from sipp.storage.small_file import file_format

NASTY: list[Any] = [
    -1, 0, 1, 7, 255, 256, 2**31, 2**47, 2**63, 2**64, 10**30, 1.5, -0.0, 1e308, None, True, False, "", "x",
    "\u001b[2J", "../../etc/passwd", "a" * 5000, "float64", "int64", "bool", "complex128", "float99", "all", "bitmask",
    "kept gaps", "zero gaps", "stored", "exact", "int8", "bf16", [], {}, [0], [2**40, 2**40], [10**12], [[]],
    {"kind": "all"},
]  # fmt: skip


def network() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A network with every kind of entry: sparse, dense, tied, integers, bools, scalars, empty, all encodings."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 40, bias=False), nn.Linear(60, 50))
    net.register_parameter("tied", net[2].weight)
    net.register_buffer("flags", torch.tensor([True, False, True]))
    net.register_buffer("none", torch.zeros(0, 3, dtype=torch.float32))
    masks = {}
    with torch.no_grad():
        for name, keep in (("0.weight", 0.1), ("2.weight", 0.9), ("3.weight", 0.5)):
            weight = net.get_parameter(name)
            weight.copy_(torch.randn(weight.shape, generator=generator))
            masks[name] = torch.rand(weight.shape, generator=generator) < keep
            weight.mul_(masks[name])  # leaves some -0.0 outside of the mask: the mask gets positions of its own
    return net, masks


def rewritten(content: bytes, change: Callable[[dict[str, Any]], object], data: bytes | None = None) -> bytes:
    """The file with a changed index (and data), and the SHA-256 that fits it: only a forger does that."""
    code, old = parts(content)
    index = json.loads(zlib.decompress(code))
    change(index)
    return file_format.pack(zlib.compress(json.dumps(index).encode()), old if data is None else data)[0]


def parts(content: bytes) -> tuple[bytes, bytes]:
    """The index as it stands in the file, and the data."""
    start = 8 + int.from_bytes(content[:8], "little")
    n_index = json.loads(content[8:start])["index"]["shape"][0]
    return content[start : start + n_index], content[start + n_index :]


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The file after an accident: bits flipped, cut, grown, a piece moved; never the same as before."""
    found = bytearray(content)
    kind = chance.randrange(5)
    if kind == 0:
        for _ in range(chance.randint(1, 4)):
            found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del found[chance.randrange(len(found)) :]
    elif kind == 2:
        found += chance.randbytes(chance.randint(1, 100))
    elif kind == 3:
        place = chance.randrange(400)  # the header and the index
        found[place : place + chance.randint(0, 8)] = chance.randbytes(chance.randint(1, 8))
    else:
        place, other = chance.randrange(len(found) - 60), chance.randrange(len(found) - 60)
        found[place : place + 60] = content[other : other + 60]
    return bytes(found)


def forged(content: bytes, chance: random.Random) -> bytes:
    """The file as a forger writes it, with a SHA-256 that fits."""
    kind = chance.randrange(6)
    code, data = parts(content)
    if kind == 0:  # bytes of the data
        found = bytearray(data)
        for _ in range(chance.randint(1, 6)):
            found[chance.randrange(len(found))] = chance.randrange(256)
        return file_format.pack(code, bytes(found))[0]
    if kind == 1:  # bytes of the compressed index
        found = bytearray(code)
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
        return file_format.pack(bytes(found), data)[0]
    if kind == 2:  # text that is no index
        text = chance.choice(
            [b"", b"[" * 100_000, b"{}", b"null", b'{"a":' * 50_000, bytes(5_000_000), b'{"a":1,"a":1}']
        )
        return file_format.pack(zlib.compress(text), data)[0]
    if kind == 3:  # other lengths of data
        return file_format.pack(code, data[: chance.randrange(len(data))] + bytes(chance.randrange(3)))[0]

    def change(index: dict[str, Any]) -> None:
        for _ in range(chance.randint(1, 3)):
            _disturb(index, chance)

    return rewritten(content, change)


def _disturb(index: dict[str, Any], chance: random.Random) -> None:
    """Changes one place somewhere in the index."""
    tensors = index.get("tensors")
    is_deep = isinstance(tensors, list) and tensors and isinstance(tensors[0], dict) and chance.random() < 0.8
    place: Any = chance.choice(tensors) if is_deep else index
    if not isinstance(place, (dict, list)):
        return
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = chance.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and chance.random() < 0.8:
            place = place[key]
            continue
        action = chance.randrange(4)
        if action == 0:
            del place[key]
        elif action == 1 and isinstance(place, list):
            place.append(copy.deepcopy(place[key]))
        elif action == 1:
            place["more"] = 1
        else:
            place[key] = copy.deepcopy(chance.choice(NASTY))
        return


def check(path: Path, content: bytes, *, is_forged: bool) -> bool:
    """Whether the file was refused with DataError; fails where a damaged one was not, or anything else was raised."""
    path.write_bytes(content)
    try:
        state = sipp.load(path)
    except DataError:
        return True
    assert is_forged, "a damaged file was loaded"
    shapes = {name: one.shape for one in sipp.inspect(path).tensors for name in one.names}
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes
    assert str(sipp.inspect(path))
    return False
