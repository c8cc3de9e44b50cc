"""What the rate of an event that a claim allows may come to in a simulation, with room for chance."""

import numpy as np
from scipy import stats


def at_most(probability: float, n: int) -> float:
    """Three standard errors above the probability: what n trials may show."""
    return probability + 3 * float(np.sqrt(probability * (1 - probability) / n))


def too_often(n_events: int, n_trials: int, probability: float) -> bool:
    """Whether so many events have a chance below 1e-4 if each has at most this probability."""
    return bool(stats.binom.sf(n_events - 1, n_trials, probability) < 1e-4)
