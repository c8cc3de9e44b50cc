"""sipp-blend: tries several scores and takes the one that changes the output least (T20).

score_j = s_j^p |w_j|^(1-p) over the whole network, where s is the maximum or the mean over patches: p = 0 is magnitude,
p = 1 is sipp-det. One more candidate is |w_j| times the norm of its input, compared within rows (Wanda), which suits
language models. No score is best everywhere, so the network is cut by each candidate and measured on calibration points
held back from scoring (a quarter, at random places). Of those within 5 % of the smallest error (10 % for p = 0, which
used no points), the smallest p wins, and Wanda's mask comes last; where all errors are 0.9 or more, magnitude is taken.
A network that was pruned before, step by step, is not offered Wanda's mask. The choice does not use a certificate's
holdout.

For a network that was never trained (its norms use batch statistics), the output says nothing about what training will
do; it only matters that every layer passes a signal. Such a network is cut by LAMP's shares of one fixed blend: x_j^2
over the sum of the x_k^2 of its layer that are not smaller, with x = s^.25 |w|^.75. If a search for mask and weights
follows in a language model, it starts from Wanda's mask, and no other candidate is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sipp.inputs import Data, Weight, copy_of, outputs
from sipp.pruning.ranking import BlendInputs
from sipp.results import BlendChoice, BlendTrial, Reduce, numerics
from sipp.scoring import ScoringTask, Sensitivities, method_of, scores_of, shares_of

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
        by_name = scores_of(task, method_of("wanda"))
        wanda_scores = tuple(weight.rows(by_name[weight.name]).cpu() for weight in task.weights)
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
    for one in blend.candidates():
        masks = cut(_scores(blend, dense, one), one.by_rows)
        cuts.append(masks)
        error = output_error(masks)
        if error is None:
            n_points, error = 0, math.inf
        tried.append(replace(one, error=error))
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
        batches = outputs.split_long_batches(batches, numerics.device_of(model))
    if not blend.sensitivities:  # there is one candidate: a few points are enough to measure it
        batches = batches[:1]
    wanted = outputs.dense_outputs(model, batches, blend.norm_stats)

    def output_error(masks: Sequence[Tensor]) -> float | None:
        with torch.no_grad():
            for weight, dense_FK, mask_FK in zip(weights, dense, masks):
                parameter = sparse.get_parameter(weight.name)
                kept_FK = torch.where(mask_FK, dense_FK, 0.0)
                parameter.copy_(weight.shaped(kept_FK.to(parameter.dtype), parameter))
        return outputs.error_of(sparse, batches, wanted, blend.norm_stats)

    return output_error, sum(batch.n_points for batch in batches)


def _scores(blend: BlendInputs, dense: Sequence[Tensor], one: BlendTrial) -> Sequence[Tensor]:
    """The scores of a candidate, F x K per layer: s^p |w|^(1-p), or Wanda's; a weight of 0 has the score 0."""
    if one.by_rows and blend.wanda_scores is not None:
        return blend.wanda_scores
    sizes = [weight_FK.to(numerics.SCORE_DTYPE).abs() for weight_FK in dense]
    if one.p == 0:
        return sizes
    pairs = zip(blend.sensitivities[one.reduce], sizes)
    scores = [s_FK.to(numerics.SCORE_DTYPE).pow(one.p) * size_FK.pow(1 - one.p) for s_FK, size_FK in pairs]
    return [shares_of(score_FK) for score_FK in scores] if one.is_shared else scores


def best_of(candidates: Sequence[BlendTrial]) -> BlendTrial:
    """The first candidate whose error is as good as the smallest; they are ordered by p, with Wanda's last.

    Differences below `NOISE` (`MAGNITUDE_NOISE` for p = 0), or among errors above `LOST`, count as none.
    """
    least = min(min(trial.error, BlendChoice.LOST) for trial in candidates)

    def is_as_good(trial: BlendTrial) -> bool:
        noise = BlendChoice.MAGNITUDE_NOISE if trial.p == 0 and not trial.by_rows else BlendChoice.NOISE
        return min(trial.error, BlendChoice.LOST) <= (1 + noise) * least

    return next(trial for trial in candidates if is_as_good(trial))
