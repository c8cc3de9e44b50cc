"""Formats numbers with units for people."""

from __future__ import annotations

import math
from typing import Literal

from sipp.results import words

Unit = Literal["share", "points", "seconds", "count", "number"]  # "points": percentage points, a difference of shares

TOLERANCE = 0.005  # loss of accuracy that counts as none
MINUTE, HOUR = 60.0, 3600.0
# Loss of accuracy against the dense network (as a share), up to which a cell has this CSS class: green, paler, orange
TONES = ((TOLERANCE, "t0"), (0.01, "t1"), (0.03, "t2"), (0.1, "t3"))
WORST = "t4"


def tone_of(change: float) -> str:
    """The CSS class for a change in accuracy."""
    return next((tone for limit, tone in TONES if change >= -limit), WORST)


def number(value: float | None, unit: Unit = "number") -> str:
    """The value with its unit, for people."""
    if value is None or not math.isfinite(value):
        return "none"
    if unit == "share":
        return f"{_percent(100 * value)} %"
    if unit == "points":
        return f"{100 * value:+.2f} points"
    if unit == "seconds":
        return seconds(value)
    if unit == "count":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    return words.number(value)


def seconds(value: float) -> str:
    """A time in a suitable unit."""
    if value < MINUTE:
        return f"{value:.3g} s"
    if value < HOUR:
        return f"{int(value // MINUTE)} min {int(value % MINUTE)} s"
    return f"{int(value // HOUR)} h {int(value % HOUR // MINUTE)} min"


def _percent(value: float) -> str:
    """191, 6.4, 0.25: no decimals from 100, else one, or two digits below one; as in the page's script."""
    if value == 0 or abs(value) >= 1:
        return f"{value:,.{0 if abs(value) >= 100 else 1}f}".removesuffix(".0")
    return f"{value:.2g}" if abs(value) >= 1e-3 else f"{value:.2e}"
