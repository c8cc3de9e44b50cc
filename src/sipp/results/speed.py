"""Compares the times of alternating calls: how many times faster one is, with its spread, in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TAIL = 0.1  # share of pairs left out on either side of the spread
LEAST_GAIN = 1.05  # a smaller speed-up counts as equal
TICK = 1e-9  # seconds: no call takes less
STEADY = 1.2  # a spread with a smaller ratio of its ends counts as one speed


@dataclass(frozen=True)
class Speed:
    """How many times faster: the median over pairs of calls, and the range of the middle 80 %."""

    ratio: float
    low: float
    high: float


def speed_of(sparse: Sequence[float], dense: Sequence[float]) -> Speed:
    """The speed-up over pairs of alternating calls, which ran under the same load."""
    ratios = sorted(dense_time / max(sparse_time, TICK) for dense_time, sparse_time in zip(dense, sparse, strict=True))
    left_out = int(TAIL * len(ratios))
    return Speed(statistics.median(ratios), ratios[left_out], ratios[-1 - left_out])


def speed_headline(speed: Speed, *, runs_dense: bool) -> str:
    """The speed in three words; without a number if the pairs of calls disagree on which is faster."""
    if runs_dense:
        return "run by torch"
    if speed.low > 1 and speed.ratio >= LEAST_GAIN:
        return f"{_two_digits(speed.ratio)} x faster"
    if speed.high < 1 and speed.ratio * LEAST_GAIN <= 1:
        return f"{_two_digits(1 / speed.ratio)} x slower"
    return "as fast as torch" if speed.high <= STEADY * speed.low else "not clear"


def speed_words(speed: Speed, *, runs_dense: bool) -> str:
    """The speed with its spread, or why none is given."""
    headline = speed_headline(speed, runs_dense=runs_dense)
    if runs_dense:
        return f"{headline}: nothing gained"
    if headline == "not clear":
        return "timings vary too much here to tell; is the machine busy?"
    ends = (speed.low, speed.high) if speed.ratio >= 1 else (1 / speed.high, 1 / speed.low)
    return f"{headline} ({_two_digits(ends[0])} to {_two_digits(ends[1])})"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{float(f'{value:.2g}'):,.0f}"
