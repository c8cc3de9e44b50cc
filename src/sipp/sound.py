"""T12 in mode "sound": the largest bound of T13 over the calibration points, as a network statement.

T13 holds for each point by itself, without assumption: `sound_bound(dense, pruned, x)`. The statement for new points
takes the maximum over S, as the paper does for kappa and Delta, and so rests on enough points (T4) like those.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from sipp.batches import Data, batches_of
from sipp.bounds import NetworkBound, no_bound, row_guarantee
from sipp.graphbound import sound_bound
from sipp.numerics import device_of
from sipp.records import Scores
from sipp.sample_size import NETWORK_FACTOR


def sound_network_bound(
    dense: nn.Module,
    pruned: nn.Module,
    data: Data,
    scores: Scores,
    *,
    delta: float,
    c_constant: float,
    k_constant: float,
    seed: int,
) -> NetworkBound:
    """The network statement from operator norms on the graph of the model, or the operation that has no bound."""
    if scores.batch_dependent:
        return no_bound("BatchNorm on batch statistics has no bound for one point", delta, mode="sound")
    worst = 0.0
    for batch in batches_of(data, device=device_of(dense), n_points=scores.n_points, seed=seed):
        inputs: Any = batch.kwargs or batch.args
        found = sound_bound(dense, pruned, inputs)
        if found.epsilon is None:
            return no_bound(found.reason, delta, mode="sound")
        worst = max(worst, found.epsilon)
    reasons = [] if math.isfinite(worst) else ["the output is zero, or not finite, at a calibration point"]
    conditions = row_guarantee(
        scores, delta=delta, factor=NETWORK_FACTOR, c_constant=c_constant, k_constant=k_constant, reasons=reasons
    )
    return NetworkBound("sound", worst, delta, conditions, conditions.reason, {})
