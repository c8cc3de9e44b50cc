"""Calibration points that are kept apart from others, so that they can judge what those have chosen (T18, T19).

T19: the last points of S are S2, the others S1; which points come last is known only at the end of the data, so a few
batches are held back. T18: where a bound must not have been chosen on its own points, some are taken out of S first.
Both take points as they come: the data should be in random order, as every statement assumes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from sipp.inputs.batches import fresh, points_at
from sipp.records.batches import Batch

MOST_APART = 64  # points in S2 of T19: 59 speak of all but 5 % of inputs at confidence 95 %
APART_OF = 4  # and at most one in so many of all
ASIDE_SHARE = 0.25  # of the calibration points, for a bound that needs points of its own and was given none (T18)


def hold_back(batches: Iterable[Batch]) -> Iterator[tuple[Batch, int]]:
    """The batches with the number of their points in S1: all of them, but for the last points of the data (T19)."""
    held: deque[Batch] = deque()
    n_held = n_seen = 0
    for batch in batches:
        held.append(fresh(batch))
        n_held, n_seen = n_held + batch.n_points, n_seen + batch.n_points
        while n_held - held[0].n_points >= MOST_APART:
            n_held -= held[0].n_points
            yield held[0], held.popleft().n_points
    n_first = n_held - min(MOST_APART, n_seen // APART_OF)
    for batch in held:
        yield batch, min(max(n_first, 0), batch.n_points)
        n_first -= batch.n_points


def keep_aside(batches: Iterable[Batch]) -> tuple[list[Any], list[Any]]:
    """The points as two lists of batches (inputs, labels): those to score, and the last `ASIDE_SHARE` of all."""
    read = [fresh(batch) for batch in batches]
    n_left = sum(batch.n_points for batch in read)
    n_left -= math.floor(ASIDE_SHARE * n_left)
    scored, aside = [], []
    for batch in read:
        inside = min(max(n_left, 0), batch.n_points)
        if 0 < inside < batch.n_points:
            scored.append(as_given(points_at(batch, slice(inside))))
            aside.append(as_given(points_at(batch, slice(inside, None))))
        else:
            (scored if inside else aside).append(as_given(batch))
        n_left -= batch.n_points
    return scored, aside


def as_given(batch: Batch) -> tuple[Any, Any]:
    """The batch as a caller would give it: (inputs, labels)."""
    return batch.kwargs or batch.args, batch.labels
