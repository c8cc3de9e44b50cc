"""How an output is cut into strips: the shapes of tile worth trying, and where each strip starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sipp.runtime.code import FLOAT
from sipp.runtime.product import Tile
from sipp.scoring.kernels.cpu.host import WIDE

MOST_LANES = 16 if WIDE else 8
TARGETS = (16, 8) if WIDE else (10, 5)  # vectors of a tile: sums that stay in registers


@dataclass(frozen=True)
class Plane:
    """Where the positions of one channel lie: floats from one output row, and one output pixel, to the next."""

    origin: int
    row: int
    pixel: int


@dataclass(frozen=True)
class Cut:
    """An output of `height` rows of `width` pixels of `n` points, cut into strips (bytes in x, out, beside)."""

    tile: Tile
    strips: np.ndarray
    n_rounds: int


def cuts(
    height: int, width: int, n: int, unit: int, x: Plane, out: Plane, beside: Plane | None, act: str,
    has_larger: bool, rounds: Callable[[int, int], list[int]],
) -> Iterator[Cut]:  # fmt: skip
    """The ways to cut that are worth a trial. The pixels of `out` and `beside` lie side by side, those of x may not.

    `rounds` gives the numbers of rounds worth trying for tiles of so many rows and of so many floats in each.
    """
    is_line = x.pixel == n
    lanes = _lanes(n, width * n if is_line else n)
    per_pixel = n // lanes if not is_line else 1
    n_vectors = width * n // lanes
    seen = set()
    for target in TARGETS:
        n_wide, n_high = _shape(n_vectors, height, target, per_pixel)
        if (n_high, n_wide) in seen:
            continue
        seen.add((n_high, n_wide))
        planes = (x, out, beside or out)
        inside = [_distances(plane, n_high, n_wide, lanes, n) for plane in planes]
        strips = [
            [FLOAT * (p.origin + row * p.row + _column(p, start, n)) for p in planes]
            for row in _starts(height, n_high)
            for start in _starts(width * n, n_wide * lanes)
        ]
        overlaps = height % n_high or (width * n) % (n_wide * lanes)
        for n_rounds in rounds(n_high, n_wide * lanes):
            if n_rounds > 1 and overlaps:  # two threads would add to one another's sums
                continue
            in_beside = None if beside is None else inside[2]
            tile = Tile(lanes, inside[0], inside[1], in_beside, unit * FLOAT, act, n_rounds > 1, has_larger)
            yield Cut(tile, np.array(strips, np.int64), n_rounds)


def _lanes(n: int, run: int) -> int:
    """The widest vector that fits: whole points where they are rounded up, else a part of a row of pixels."""
    lanes = MOST_LANES
    while lanes > run or (n % 8 == 0 and n % lanes):
        lanes //= 2
    return lanes


def _shape(n_vectors: int, height: int, target: int, per_pixel: int) -> tuple[int, int]:
    """(vectors of a row, rows) of a tile of about `target` vectors; strips as equal as they can be."""
    if n_vectors >= target:
        n_wide = -(-n_vectors // -(-n_vectors // target))
        if n_wide > per_pixel:
            return n_wide // per_pixel * per_pixel, 1
        while per_pixel % n_wide:
            n_wide -= 1
        return n_wide, 1
    n_high = max(1, min(height, target // n_vectors))
    return n_vectors, -(-height // -(-height // n_high))


def _distances(plane: Plane, n_high: int, n_wide: int, lanes: int, n: int) -> tuple[int, ...]:
    return tuple(FLOAT * (i * plane.row + _column(plane, j * lanes, n)) for i in range(n_high) for j in range(n_wide))


def _column(plane: Plane, position: int, n: int) -> int:
    """Where position (pixel x n + point) of a row lies."""
    return position if plane.pixel == n else position // n * plane.pixel + position % n


def _starts(length: int, size: int) -> list[int]:
    """Where stretches of `size` start that cover `length`: the last one ends with it and may overlap the one before."""
    return [min(start, length - size) for start in range(0, length, size)]
