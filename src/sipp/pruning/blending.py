"""sipp-blend: tries several scores and takes the one that moves the output least (T20).

score_j = s_j^p |w_j|^(1-p) over the whole network, where s is the maximum or the mean over patches: p = 0 is magnitude,
p = 1 is sipp-det. One more candidate is |w_j| times the norm of its input, compared within rows (Wanda), which suits
language models. No score is best everywhere, so the network is cut by each candidate and measured on calibration points
held back from scoring. The choice does not use a certificate's holdout.

If every candidate destroys the output, the errors say nothing, and magnitude is taken. For a network that was never
trained (its norms use batch statistics), the output says nothing about what training will do; it only matters that
every layer passes a signal. Such a network is cut by LAMP's shares of one fixed blend. If a search for mask and weights
follows in a language model, it starts from Wanda's mask, and no other candidate is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sipp.inputs import Data, Weight, copy_of, dense_outputs, error_of, from_rows, split_long_batches, to_rows
from sipp.pruning.ranked import BlendInputs
from sipp.results import LOST, MAGNITUDE_NOISE, NOISE, BlendChoice, BlendTrial, Reduce, numerics
from sipp.scoring import ScoringTask, Sensitivities, method_of, score_of, shares_of

POWERS = (0.1, 0.25, 0.5, 0.75, 1.0)  # p, besides 0, where the reduction makes no difference
UNTRAINED = 0.25  # the power at initialisation (results/at-init-10-epochs, at-init-new-seeds)
REDUCTIONS: tuple[Reduce, ...] = ("max", "mean")

# scores of all layers to masks, for one budget: compared over the whole network, or within each row
CutFunction = Callable[[Sequence[Tensor], bool], list[Tensor]]


def blend_inputs(task: ScoringTask, sensitivities: Sensitivities | None, held_back: Data | None) -> BlendInputs:
    """What a blend is chosen from; without held-back points, it is chosen on the scored ones."""
    by_reduce: dict[Reduce, tuple[Tensor, ...]] = {}
    if sensitivities is not None:
        by_reduce["max"] = tuple(layer.sensitivity_FK.cpu() for layer in sensitivities.layers)
        means = [layer.mean_FK.cpu() for layer in sensitivities.layers if layer.mean_FK is not None]
        if len(means) == len(sensitivities.layers):
            by_reduce["mean"] = tuple(means)
    wanda_scores: tuple[Tensor, ...] | None = None
    if task.norm_stats != "batch":
        by_name = score_of(method_of("wanda"))(task)
        wanda_scores = tuple(to_rows(weight, by_name[weight.name]).cpu() for weight in task.weights)
        if sensitivities is None:  # the start of a search in a large network: half of the memory is enough
            wanda_scores = tuple(score_FK.to(numerics.SCORE_DTYPE) for score_FK in wanda_scores)
        if not all(bool(torch.isfinite(score_FK).all()) for score_FK in wanda_scores):
            wanda_scores = None
    has_held_back = held_back is not None and not held_back.is_empty
    chosen = held_back if has_held_back else task.data
    assert chosen is not None
    return BlendInputs(by_reduce, chosen, has_held_back, task.norm_stats, wanda_scores)


def choose_blend(
    model: nn.Module,
    weights: Sequence[Weight],
    dense: Sequence[Tensor],
    blend: BlendInputs,
    cut: CutFunction,
    advance: Callable[[int], None],
) -> tuple[list[Tensor], BlendChoice]:
    """The masks of the candidate that moves the output least on the held-back points, and the errors of all.

    `advance(1)` is called for each candidate.
    """
    output_error, n_points = _output_error_of_masks(model, weights, dense, blend)
    tried: list[BlendTrial] = []
    cuts: list[list[Tensor]] = []
    for one in _candidates(blend):
        masks = cut(_scores(blend, dense, one), one.by_rows)
        cuts.append(masks)
        error = output_error(masks)
        if error is None:
            n_points, error = 0, math.inf
        tried.append(BlendTrial(one.p, one.reduce, error, one.is_shared, one.by_rows))
        advance(1)
    taken = tried.index(best_of(tried))
    return cuts[taken], BlendChoice(tried[taken], tuple(tried), n_points, blend.is_held_back)


def _output_error_of_masks(
    model: nn.Module, weights: Sequence[Weight], dense: Sequence[Tensor], blend: BlendInputs
) -> tuple[Callable[[Sequence[Tensor]], float | None], int]:
    """A function that gives the output error of the network under some masks, and on how many points it is measured.

    It gives None if the output has no real numbers.
    """
    sparse = copy_of(model)
    batches = list(blend.points.batches())
    if blend.norm_stats != "batch":
        batches = split_long_batches(batches, numerics.device_of(model))
    if not blend.sensitivities:  # there is one candidate: a few points are enough to measure it
        batches = batches[:1]
    outputs = dense_outputs(model, batches, blend.norm_stats)

    def output_error(masks: Sequence[Tensor]) -> float | None:
        with torch.no_grad():
            for weight, dense_FK, mask_FK in zip(weights, dense, masks):
                parameter = sparse.get_parameter(weight.name)
                kept_FK = torch.where(mask_FK, dense_FK, 0.0)
                parameter.copy_(from_rows(weight, kept_FK.to(parameter.dtype), parameter))
        return error_of(sparse, batches, outputs, blend.norm_stats)

    return output_error, sum(batch.n_points for batch in batches)


def _scores(blend: BlendInputs, dense: Sequence[Tensor], candidate: _Candidate) -> Sequence[Tensor]:
    """The scores of a candidate, F x K per layer."""
    if candidate.by_rows and blend.wanda_scores is not None:
        return blend.wanda_scores
    scores = blended_scores(blend, dense, candidate.p, candidate.reduce)
    return [shares_of(score_FK) for score_FK in scores] if candidate.is_shared else scores


def blended_scores(blend: BlendInputs, dense: Sequence[Tensor], p: float, reduce: Reduce) -> list[Tensor]:
    """s^p |w|^(1-p) of every weight, F x K per layer; a weight of 0 has the score 0."""
    magnitudes = [weight_FK.to(numerics.SCORE_DTYPE).abs() for weight_FK in dense]
    if p == 0:
        return magnitudes
    pairs = zip(magnitudes, blend.sensitivities[reduce])
    return [
        sensitivity_FK.to(numerics.SCORE_DTYPE).pow(p) * magnitude_FK.pow(1 - p)
        for magnitude_FK, sensitivity_FK in pairs
    ]


def n_candidates(blend: BlendInputs) -> int:
    """The number of candidates that a cut tries."""
    return len(_candidates(blend))


def best_of(candidates: Sequence[BlendTrial]) -> BlendTrial:
    """The first candidate whose error is as good as the smallest; they are ordered by p, with Wanda's last.

    Differences below `NOISE` (`MAGNITUDE_NOISE` for p = 0), or among errors above `LOST`, count as none.
    """
    least = min(min(trial.error, LOST) for trial in candidates)

    def is_as_good(trial: BlendTrial) -> bool:
        noise = MAGNITUDE_NOISE if trial.p == 0 and not trial.by_rows else NOISE
        return min(trial.error, LOST) <= (1 + noise) * least

    return next(trial for trial in candidates if is_as_good(trial))


class _Candidate(NamedTuple):
    """One way to score all weights: s^p |w|^(1-p), or Wanda's score if weights are compared within rows."""

    p: float
    reduce: Reduce
    is_shared: bool = False  # ranked by LAMP's shares of the blend
    by_rows: bool = False


MAGNITUDE, WANDA = _Candidate(0.0, "max"), _Candidate(0.0, "mean", by_rows=True)


def _candidates(blend: BlendInputs) -> list[_Candidate]:
    """What is tried, magnitude first and Wanda's score last."""
    if blend.norm_stats == "batch":  # the network was never trained
        return [_Candidate(UNTRAINED, "max", is_shared=True)]
    if blend.taken is not None:
        return [_Candidate(blend.taken.p, blend.taken.reduce, by_rows=blend.taken.by_rows)]
    wanda_last = [] if blend.wanda_scores is None else [WANDA]
    if wanda_last and not blend.sensitivities:
        return wanda_last
    blends = [_Candidate(p, reduce) for p in POWERS for reduce in REDUCTIONS if reduce in blend.sensitivities]
    return [MAGNITUDE, *blends, *wanda_last]
