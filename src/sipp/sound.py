"""T13 as a statement about new inputs: its largest bound over points that did not choose the pruning (T18).

T13 holds for each point by itself, without assumption: `sound_bound(dense, pruned, x)`. As a function of the point it
depends on the pruned weights, so the points that chose these cannot speak for others; points that are new can.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from sipp.batches import Data, batches_of
from sipp.bounds import MOST_SHARE, NetworkBound, coverage, no_bound
from sipp.draws import n_new
from sipp.graphbound import sound_bound
from sipp.numerics import device_of
from sipp.pointkeys import draw_keys_of
from sipp.records import Scores


def sound_network_bound(
    dense: nn.Module, pruned: nn.Module, points: Data, scores: Scores, *, confidence: float
) -> NetworkBound:
    """The network statement from operator norms on the graph of the model, or the operation that has no bound.

    `points` are new to the pruning; those that were scored all the same (by their content) do not count.
    """
    if scores.batch_dependent:
        return no_bound("BatchNorm on batch statistics has no bound for one point", None, mode="sound")
    if scores.dependence:
        return no_bound(scores.dependence, None, mode="sound")
    worst, keys = 0.0, set[bytes]()
    if isinstance(points, list) and not points:
        return no_bound("too few points to keep one aside: give more, or a holdout", None, mode="sound")
    for batch in batches_of(points, device=device_of(dense), role="holdout"):
        inputs: Any = batch.kwargs or batch.args
        found = sound_bound(dense, pruned, inputs)
        if found.epsilon is None:
            return no_bound(found.reason, None, mode="sound")
        worst = max(worst, found.epsilon) if not math.isnan(found.epsilon) else math.inf
        keys |= set(draw_keys_of(batch))
    covered = coverage(n_new(keys, scores.keys), 1, confidence)
    causes = [] if math.isfinite(worst) else ["the output is zero, or not finite, at one of the points"]
    if covered.share > MOST_SHARE:
        causes.append(f"{covered.n} points that are new to the pruning say nothing of most inputs (T18)")
    return NetworkBound("sound", worst, None, None, "; ".join(causes), {}, covered)
