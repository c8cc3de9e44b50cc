"""Formats numbers and names as plain text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

WIDTH = 118
CONFIDENCE_DIGITS = 4  # rounded down
SENTENCE_DIGITS = 3  # of measured numbers, rounded up, so that a sentence never claims more than the record
PLAIN_RANGE = (Decimal("1e-6"), Decimal("1e9"))  # printed without an exponent
N_LISTED = 5  # names in an error
LABEL = 17  # columns before the text of a statement
WHY_LARGER = "in a network this small, names and records take more room than zeros save"
LARGE_ERROR = 0.5  # of its norm: an output that moved further is warned about


def labelled_line(label: str, text: str) -> str:
    """One line that begins with a label (or with as many spaces), never wrapped: paths and numbers stay whole."""
    return f"{label + ': ' if label else '':<{LABEL}}{text}"


def labelled(label: str, text: str) -> str:
    """Text that begins with a label; long text is wrapped and indented."""
    return textwrap.fill(text, WIDTH, initial_indent=labelled_line(label, ""), subsequent_indent=" " * LABEL)


def listed(names: Sequence[str], separator: str = ", ", what: str = "more") -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - N_LISTED} {what}" if len(names) > N_LISTED else ""
    return separator.join(f"{name:.200}" for name in names[:N_LISTED]) + more


def number(value: float | None) -> str:
    """A number with few digits; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"


def number_up(value: float | None, digits: int = 3) -> str:
    """A proved limit with few digits, rounded up; empty for None."""
    if value is None or not math.isfinite(value):
        return number(value)
    if 1e3 <= abs(value) < 1e6:
        return f"{math.ceil(value):,}"
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))):.{digits}g}"


def exactly(value: float) -> str:
    """A number the caller chose, with all its digits."""
    return repr(float(value)).removesuffix(".0")


def percent(share: float) -> str:
    """A number the caller chose, as a percentage with all its digits: 0.05 -> '5 %'."""
    if not math.isfinite(share):
        return "unlimited"
    value = (Decimal(repr(float(share))) * 100).normalize()
    plain = value == 0 or PLAIN_RANGE[0] <= abs(value) < PLAIN_RANGE[1]
    return f"{value:{'f' if plain else 'e'}} %"


def percent_up(share: float) -> str:
    """A measured number as a percentage of few digits, rounded up: 0.12341 -> '12.4 %'."""
    if not math.isfinite(share):
        return "unlimited"
    return percent(float(Context(prec=SENTENCE_DIGITS, rounding=ROUND_CEILING).create_decimal(repr(float(share)))))


def points_up(drop: float) -> str:
    """A measured difference of shares, rounded up: 0.0123 -> '1.23 percentage points'."""
    return percent_up(drop).replace("%", "percentage points")


def change(drop: float, of: str) -> str:
    """A limit on a drop in words: 'lowers the accuracy by at most ..', or 'raises it by at least ..'."""
    if drop >= 0:
        return f"lowers {of} by at most {points_up(drop)}"
    return f"raises {of} by at least {points_up(drop).removeprefix('-')}"  # rounded up as a drop: down as a gain


def sentence(text: str) -> str:
    """The text as it begins a line."""
    return text[:1].upper() + text[1:]


def counted(n: int, what: str) -> str:
    """'1 row', '2 rows'."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def of_bytes(n_bytes: int) -> str:
    """A number of bytes with its unit."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {unit}"
    return f"{n_bytes} bytes"


def size_headline(n_bytes: int, dense_bytes: int) -> str:
    """How many times smaller a file is than the dense values, or how many times larger."""
    smaller = f"{dense_bytes / n_bytes:.2f}"
    if smaller == "1.00":
        return "the same size"
    return f"{smaller} x smaller" if dense_bytes > n_bytes else f"{n_bytes / max(dense_bytes, 1):.2f} x larger"


def size(n_bytes: int, dense_bytes: int) -> str:
    """The headline, with the reason if the file grew."""
    headline = size_headline(n_bytes, dense_bytes)
    return f"{headline}: {WHY_LARGER}" if headline.endswith("larger") else headline


def how_sure(confidence: float) -> str:
    """A confidence in words, rounded down, so that nothing reads as 100 % sure."""
    most = Decimal(repr(round(100 * confidence, 10)))  # without the rounding error of subtracted probabilities
    return f"{Context(prec=CONFIDENCE_DIGITS, rounding=ROUND_FLOOR).create_decimal(most).normalize():f} % sure"
