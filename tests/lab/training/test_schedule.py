"""The learning rate against the definition written out epoch by epoch."""

import math
import sys

from hypothesis import given, strategies as st
from lab.hyperparameters import hyperparameters

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
