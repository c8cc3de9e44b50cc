"""The points that chose a network, in its record on the disk: a short hash of each key, and whether one is among them.

A key follows from the numbers of a point, and a short one could be solved for them; its SHA-256 cannot. Needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

SHORT = 16  # hexadecimal digits: two of a million points share them with a probability of 3e-8


@dataclass(frozen=True)
class SeenPoints:
    """Points of an earlier pruning, of which only hashes are left."""

    hashes: frozenset[str]
    is_all: bool  # whether no others chose the network

    def __contains__(self, key: bytes) -> bool:
        return _short_hash(key) in self.hashes


def seen_words(keys: Iterable[bytes]) -> str:
    """What a record says of these points: their short hashes, one behind the other, in an order that tells nothing."""
    return "".join(sorted({_short_hash(key) for key in keys}))


def seen_points(words: str, *, is_all: bool) -> SeenPoints:
    """The points that a record speaks of."""
    return SeenPoints(frozenset(words[i : i + SHORT] for i in range(0, len(words), SHORT)), is_all)


def told_of(known: SeenPoints, keys: Iterable[bytes]) -> SeenPoints:
    """The points of a record and others that someone says to be all that chose the network."""
    return SeenPoints(known.hashes | {_short_hash(key) for key in keys}, is_all=True)


def _short_hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:SHORT]
