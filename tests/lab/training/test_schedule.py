"""The learning rate against the definition written out epoch by epoch."""

import math
import sys
from typing import Any

import pytest
from hypothesis import given, strategies as st
from lab.hyperparameters import hyperparameters
from pydantic import ValidationError

from sipp_lab.training.step import learning_rate


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
    hyper = hyperparameters(90, 1, peak, warmup_epochs=warmup, factor=factor, milestones=tuple(sorted(decays)))
    expected = slow_rate(peak, warmup, factor, decays, epoch)
    assert math.isclose(learning_rate(hyper, epoch), expected, rel_tol=1e-12, abs_tol=sys.float_info.min)


@given(st.integers(1, 40), st.floats(0, 200))
def test_rates_that_decay_every_few_epochs(every: int, epoch: float) -> None:
    decays = [every * k for k in range(1, 201)]
    expected = slow_rate(0.05, 5.0, 0.5, decays, epoch)
    hyper = hyperparameters(200, 1, 0.05, warmup_epochs=5.0, factor=0.5, every=every)
    assert math.isclose(learning_rate(hyper, epoch), expected, rel_tol=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"rate": 0.0},
        {"rate": math.nan},
        {"rate": 0.1, "factor": 1.5},
        {"rate": 0.1, "milestones": (3, 3)},
        {"rate": 0.1, "every": 0},
        {"rate": 0.1, "warmup_epochs": -1.0},
    ],
)
def test_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        hyperparameters(9, 1, **options)
