"""The learning rate against the definition written out epoch by epoch."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sipp.errors import OptionError
from sipp.experiments.training.schedule import Schedule, rate


def slow_rate(peak: float, warmup: float, factor: float, decays: list[int], epoch: float) -> float:
    """The table's words: linear from 0 over the warm-up, times the factor once for every decay epoch reached."""
    value = peak
    if epoch < warmup:
        value = peak * epoch / warmup
    for decay in decays:
        if epoch >= decay:
            value *= factor
    return value


@given(
    st.floats(0.001, 1.0),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([0.1, 0.2, 0.5]),
    st.lists(st.integers(1, 60), unique=True, max_size=4),
    st.floats(0, 80),
)
def test_milestones(peak: float, warmup: float, factor: float, decays: list[int], epoch: float) -> None:
    schedule = Schedule(peak, warmup, factor, tuple(sorted(decays)))
    assert math.isclose(rate(schedule, epoch), slow_rate(peak, warmup, factor, decays, epoch), rel_tol=1e-12)


@given(st.integers(1, 40), st.floats(0, 200))
def test_every(every: int, epoch: float) -> None:
    decays = [every * k for k in range(1, 201)]
    expected = slow_rate(0.05, 5.0, 0.5, decays, epoch)
    assert math.isclose(rate(Schedule(0.05, 5.0, 0.5, every=every), epoch), expected, rel_tol=1e-9)


def test_starts_at_zero_and_decays_at_the_milestone_itself() -> None:
    schedule = Schedule(0.1, 5.0, 0.1, (91, 136))
    assert [rate(schedule, e) for e in (0.0, 2.5, 5.0, 90.999)] == [0.0, 0.05, 0.1, 0.1]
    assert rate(schedule, 91) == pytest.approx(0.01, rel=1e-12) and rate(schedule, 136) == pytest.approx(0.001)


@pytest.mark.parametrize(
    "options",
    [
        {"peak": 0.0},
        {"peak": math.nan},
        {"peak": 0.1, "factor": 1.5},
        {"peak": 0.1, "milestones": (3, 3)},
        {"peak": 0.1, "milestones": (3,), "every": 2},
        {"peak": 0.1, "every": 0},
        {"peak": 0.1, "warmup_epochs": -1.0},
    ],
)
def test_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Schedule(**options)
