"""Numbers in the words of a page."""

import pytest

from sipp.report import numbers


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.03125, "share", "3.1 %"),
        (0.064, "share", "6.4 %"),
        (0.0025123, "share", "0.25 %"),
        (0.2, "share", "20 %"),
        (1.9083, "share", "191 %"),
        (-0.0123, "points", "-1.23 points"),
        (0.5, "seconds", "0.5 s"),
        (75.0, "seconds", "1 min 15 s"),
        (7325.0, "seconds", "2 h 2 min"),
        (12345.0, "count", "12,345"),
        (0.0, "number", "0"),
        (1e-16, "number", "1e-16"),
        (float("inf"), "number", "none"),
        (None, "share", "none"),
    ],
)
def test_numbers_in_words(value: float | None, unit: numbers.Unit, text: str) -> None:
    assert numbers.number(value, unit) == text
