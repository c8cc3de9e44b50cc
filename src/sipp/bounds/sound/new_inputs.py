"""Turns T13 into a statement about new inputs: the largest bound over points the pruning never saw (T18).

T13 holds for each point by itself, without assumptions: `sound_bound(dense, pruned, x)`. The bound depends on the
pruned weights, so points that chose these cannot represent other inputs; new points can.

T13 assumes exact arithmetic, but a network runs in float32 or less. The rounding error of both networks is measured
against float64 at each point and added, so that the statement is about the networks as they run.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from sipp.bounds.operations import device_in, in_precision, one_tensor
from sipp.bounds.sound.error_growth import nan_as_inf, norm_B
from sipp.bounds.sound.graph_bound import GraphBound, bound_of_batch
from sipp.bounds.sound.operator_norms import ROUND_UP
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import AnyData, data_of, tensors_of_inputs
from sipp.inputs.point_hashes import point_hashes
from sipp.results.batches import Batch
from sipp.results.network_hash import tensors_hash
from sipp.results.numerics import device_of
from sipp.results.pruned import MOST_SHARE, NetworkBound, coverage, no_bound
from sipp.results.ranking import Sensitivities

# Rounding depends on the order of sums, which differs between batches and machines: the measured error counts twice.
ROUNDING_FACTOR = 2.0


def sound_network_bound(
    dense: nn.Module, pruned: nn.Module, points: AnyData, scores: Sensitivities, *, confidence: float
) -> NetworkBound:
    """The network bound from operator norms on the model's graph, or the operation that has no bound.

    `points` should be new to the pruning; those that equal a scored point do not count.
    """
    if scores.batch_dependent:
        return no_bound("BatchNorm on batch statistics has no bound for a single input", None, mode="sound")
    if scores.dependence:
        return no_bound(scores.dependence, None, mode="sound")
    worst, keys, same = 0.0, set[str](), tensors_hash(dense) == tensors_hash(pruned)
    data = data_of(points, device=device_of(dense), role="holdout")
    if data.is_empty:
        return no_bound("too few inputs to hold one back: pass more, or a holdout", None, mode="sound")
    for batch in data.batches():
        bound = bound_of_batch(dense, pruned, batch)
        if bound.epsilon is None:
            return no_bound(bound.reason, None, mode="sound")
        epsilon = bound.epsilon if same else float(_as_run(dense, pruned, batch, bound).max())
        worst = max(worst, epsilon) if not math.isnan(epsilon) else math.inf
        keys |= set(point_hashes(batch))
    covered = coverage(len(keys - scores.all_seen_keys), 1, confidence)
    causes = [] if math.isfinite(worst) else ["the output is zero, or not finite, for one of the inputs"]
    if covered.share > MOST_SHARE:
        causes.append(
            f"{covered.n} inputs that are new to the pruning are too few: nothing follows for most new inputs"
        )
    return NetworkBound("sound", worst, None, None, "; ".join(causes), {}, covered)


def _as_run(dense: nn.Module, pruned: nn.Module, batch: Batch, exact: GraphBound) -> Tensor:
    """The bound on ||f^ - f|| / ||f|| for each point, f and f^ being what the networks give in their own precision.

    ||f^_run - f_run|| <= ||f^_run - f^|| + ||f^ - f|| + ||f - f_run||, the middle by T13, the others as measured.
    """
    assert exact.absolute_B is not None
    total_B = exact.absolute_B
    runs = [_rounding(model, batch) for model in (dense, pruned)]
    for rounding_B, _ in runs:
        total_B = total_B + ROUNDING_FACTOR * rounding_B.to(total_B)
    size_B = runs[0][1].to(total_B) / ROUND_UP**2  # norm_B rounds up; this rounds down
    epsilon_B = nan_as_inf(total_B / size_B)
    return torch.where(torch.isfinite(size_B), epsilon_B, torch.full_like(epsilon_B, math.inf))


def _rounding(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """How far a network's output lies from that of its float64 copy, and its norm, point by point.

    Of a network that runs in float64 a float32 copy is measured: rounding goes with the unit.
    """
    kinds = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    given = {value.dtype for value in tensors_of_inputs(batch).values() if value.is_floating_point()}
    run = _output(model, batch, kinds[0] if kinds and not given <= set(kinds) else None)
    low, share = run, 1.0
    if run.dtype == torch.float64:
        low = _output(copy.deepcopy(model).to(torch.float32), batch, torch.float32)
        share = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    exact = _output(copy.deepcopy(model).to(torch.float64), batch, torch.float64)
    norms_B = norm_B(run, batch.n_points)
    rounding_B = share * norm_B(low.to(torch.float64) - exact, batch.n_points)
    return torch.maximum(rounding_B, torch.finfo(run.dtype).eps * norms_B), norms_B


def _output(model: nn.Module, batch: Batch, dtype: torch.dtype | None) -> Tensor:
    """The one tensor that a network returns for a batch; inputs are cast to `dtype` (None: left as they are)."""
    with scoring_mode(model, "running"):
        return one_tensor(run_batch(model, in_precision(batch, device_in(model), dtype)))
