"""SHA-256 of networks and of the points that chose them. Needs no torch.

The hash of a network covers its state_dict and its non-persistent buffers. Files do not store these buffers, only their
hash: with it and the tensors of a file, the hash of the network can be computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

WRAPPERS = frozenset({"module", "_orig_mod"})  # what DDP and torch.compile add to names

Entry = tuple[list[Any], bytes | memoryview]  # dtype and shape, or repr of the value; bytes
Value = TypeVar("Value")


def canonical(name: str) -> str:
    """The name of a parameter or buffer without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def entries_hash(values: Mapping[str, Value], read: Callable[[str, Value], Entry]) -> str:
    """SHA-256 over all values, sorted by canonical name; each is read when its turn comes."""
    digest = hashlib.sha256()
    for name in sorted(values, key=canonical):
        kind, data = read(name, values[name])
        digest.update(json.dumps([canonical(name), *kind]).encode())
        digest.update(data)
    return digest.hexdigest()


def with_buffers(state: str, buffers: str | None) -> str:
    """Combines the hash of a state_dict with that of the non-persistent buffers, if there are any."""
    return state if buffers is None else hashlib.sha256(f"{state} {buffers}".encode()).hexdigest()


# --- The points that chose a network ----------------------------------------------------------------------------------

# A record on disk holds a short hash of each point's key. Keys are simple functions of the point's values and could be
# inverted; their SHA-256 cannot.

SHORT = 16  # hexadecimal digits: two of a million points share them with a probability of 3e-8


@dataclass(frozen=True)
class SeenPoints:
    """The points of an earlier pruning, known only by their hashes."""

    hashes: frozenset[str]
    is_all: bool  # whether no others chose the network

    def __contains__(self, key: bytes) -> bool:
        return _short_hash(key) in self.hashes


def seen_text(keys: Iterable[bytes]) -> str:
    """The short hashes of these points as one string, sorted, for a record."""
    return "".join(sorted({_short_hash(key) for key in keys}))


def seen_points(words: str, *, is_all: bool) -> SeenPoints:
    """The inverse of `seen_text`."""
    return SeenPoints(frozenset(words[i : i + SHORT] for i in range(0, len(words), SHORT)), is_all)


def with_all_points(known: SeenPoints, keys: Iterable[bytes]) -> SeenPoints:
    """Adds points to those of a record, and declares the result complete."""
    return SeenPoints(known.hashes | {_short_hash(key) for key in keys}, is_all=True)


def _short_hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:SHORT]
