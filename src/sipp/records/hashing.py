"""SHA-256 of networks and of the points that chose them. Needs no torch.

A network is the entries of its state_dict. Buffers that a state_dict leaves out (persistent=False) are part of it, and
no file holds them. So they have a hash of their own, which files hold: with it the hash of the network follows from the
tensors of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

WRAPPERS = frozenset({"module", "_orig_mod"})  # what DDP and torch.compile add to names

Entry = tuple[str, list[Any], bytes | memoryview]  # name; element type and shape, or the value in words; bytes


def canonical(name: str) -> str:
    """The name of a parameter or buffer without what wrappers added to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def entries_hash(entries: Iterable[Entry]) -> str:
    """SHA-256 over all entries, sorted by their names without the parts that wrappers add."""
    digest = hashlib.sha256()
    named = [(canonical(name), kind, data) for name, kind, data in entries]
    for name, kind, data in sorted(named, key=lambda entry: entry[0]):
        digest.update(json.dumps([name, *kind]).encode())
        digest.update(data)
    return digest.hexdigest()


def with_buffers(state: str, buffers: str | None) -> str:
    """The hash of a network from that of its state_dict and that of its other buffers; the first where it has none."""
    return state if buffers is None else hashlib.sha256(f"{state} {buffers}".encode()).hexdigest()


# --- The points that chose a network ----------------------------------------------------------------------------------

# A record on the disk holds a short hash of each point's key. A key follows from the numbers of the point, and a short
# one could be solved for them; its SHA-256 cannot.

SHORT = 16  # hexadecimal digits: two of a million points share them with a probability of 3e-8


@dataclass(frozen=True)
class SeenPoints:
    """Points of an earlier pruning, of which only hashes are left."""

    hashes: frozenset[str]
    is_all: bool  # whether no others chose the network

    def __contains__(self, key: bytes) -> bool:
        return _short_hash(key) in self.hashes


def seen_text(keys: Iterable[bytes]) -> str:
    """What a record says of these points: their short hashes, one behind the other, in an order that tells nothing."""
    return "".join(sorted({_short_hash(key) for key in keys}))


def seen_points(words: str, *, is_all: bool) -> SeenPoints:
    """The points that a record speaks of."""
    return SeenPoints(frozenset(words[i : i + SHORT] for i in range(0, len(words), SHORT)), is_all)


def with_all_points(known: SeenPoints, keys: Iterable[bytes]) -> SeenPoints:
    """The points of a record, and others with which they are said to be all that chose the network."""
    return SeenPoints(known.hashes | {_short_hash(key) for key in keys}, is_all=True)


def _short_hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:SHORT]
