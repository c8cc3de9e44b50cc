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

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sipp.inputs.data import Data
from sipp.inputs.outputs import error_of, in_small_parts, outputs_of
from sipp.inputs.restore import copy_of
from sipp.records.numerics import SCORE_DTYPE, device_of
from sipp.records.options import Reduce
from sipp.records.ranking import BlendChoice, BlendInputs, BlendTrial, Sensitivities, Weight, from_rows, to_rows
from sipp.scoring.lamp import shares_of
from sipp.scoring.task import ScoringTask
from sipp.scoring.wanda import wanda

POWERS = (0.1, 0.25, 0.5, 0.75, 1.0)  # p, besides 0, where the reduction makes no difference
NOISE = 0.05  # errors within this relative difference count as equal
MAGNITUDE_NOISE = 0.1  # the same for magnitude, which uses no data: a few points must not outvote it
LOST = 0.9  # above this relative error next to nothing of the output is left: all such errors are equal
UNTRAINED = 0.25  # the power at initialisation (results/at-init-10-epochs, at-init-new-seeds)
REDUCTIONS: tuple[Reduce, ...] = ("max", "mean")

# scores of all layers to masks, for one budget: compared over the whole network, or within each row
CutFunction = Callable[[Sequence[Tensor], bool], list[Tensor]]


def blend_inputs(task: ScoringTask, sensitivities: Sensitivities | None, aside: Data | None) -> BlendInputs:
    """What a blend is chosen from; without held-back points, it is chosen on the scored ones."""
    by_reduce: dict[Reduce, tuple[Tensor, ...]] = {}
    if sensitivities is not None:
        by_reduce["max"] = tuple(layer.sensitivity_FK.cpu() for layer in sensitivities.layers)
        means = [layer.mean_FK.cpu() for layer in sensitivities.layers if layer.mean_FK is not None]
        if len(means) == len(sensitivities.layers):
            by_reduce["mean"] = tuple(means)
    wanda_scores: tuple[Tensor, ...] | None = None
    if task.scoring.norm_stats != "batch":
        by_name = wanda(task)
        wanda_scores = tuple(to_rows(weight, by_name[weight.name]).cpu() for weight in task.weights)
        if sensitivities is None:  # the start of a search in a large network: half of the memory is enough
            wanda_scores = tuple(score_FK.to(SCORE_DTYPE) for score_FK in wanda_scores)
        if not all(bool(torch.isfinite(score_FK).all()) for score_FK in wanda_scores):
            wanda_scores = None
    has_aside = aside is not None and not aside.is_empty
    chosen = aside if has_aside else task.data
    assert chosen is not None
    return BlendInputs(by_reduce, chosen, has_aside, task.scoring.norm_stats, wanda_scores)


def blended(blend: BlendInputs, dense: Sequence[Tensor], p: float, reduce: Reduce) -> list[Tensor]:
    """s^p |w|^(1-p) of every weight, F x K per layer; a weight of 0 has the score 0."""
    magnitudes = [weight_FK.to(SCORE_DTYPE).abs() for weight_FK in dense]
    if p == 0:
        return magnitudes
    pairs = zip(magnitudes, blend.sensitivities[reduce])
    return [sensitivity_FK.to(SCORE_DTYPE).pow(p) * magnitude_FK.pow(1 - p) for magnitude_FK, sensitivity_FK in pairs]


def choose(
    model: nn.Module,
    weights: Sequence[Weight],
    dense: Sequence[Tensor],
    blend: BlendInputs,
    cut: CutFunction,
    advance: Callable[[int], None],
) -> tuple[list[Tensor], BlendChoice]:
    """The masks of the candidate that moves the output least on the held-back points, and the errors of all.

    For a network that was never trained, the masks of one fixed blend. `advance(1)` is called for each candidate.
    """
    sparse = copy_of(model)
    batches = list(blend.points.batches())
    if blend.norm_stats != "batch":
        batches = in_small_parts(batches, device_of(model))
    if not blend.sensitivities:  # there is one candidate: a few points are enough to measure it
        batches = batches[:1]
    outputs, n_points = outputs_of(model, batches, blend.norm_stats), sum(batch.n_points for batch in batches)

    def moved_by(masks: Sequence[Tensor]) -> float:
        with torch.no_grad():
            for weight, dense_FK, mask_FK in zip(weights, dense, masks):
                parameter = sparse.get_parameter(weight.name)
                kept_FK = torch.where(mask_FK, dense_FK, 0.0)
                parameter.copy_(from_rows(weight, kept_FK.to(parameter.dtype), parameter))
        advance(1)
        return error_of(sparse, batches, outputs, blend.norm_stats) or 0.0  # None: no real numbers in the output

    if blend.norm_stats == "batch":
        masks = cut([shares_of(score_FK) for score_FK in blended(blend, dense, UNTRAINED, "max")], False)
        only = BlendTrial(UNTRAINED, "max", moved_by(masks), is_shared=True)
        return masks, BlendChoice(only, (only,), n_points, blend.is_aside)
    tried: list[BlendTrial] = []
    cuts: list[list[Tensor]] = []
    for p, reduce, by_rows in _candidates(blend):
        scores = blend.wanda_scores if by_rows and blend.wanda_scores is not None else blended(blend, dense, p, reduce)
        cuts.append(cut(scores, by_rows))
        tried.append(BlendTrial(p, reduce, moved_by(cuts[-1]), by_rows=by_rows))
    taken = tried.index(best_of(tried))
    return cuts[taken], BlendChoice(tried[taken], tuple(tried), n_points, blend.is_aside)


def n_candidates(blend: BlendInputs) -> int:
    """The number of candidates that a cut tries."""
    return 1 if blend.norm_stats == "batch" else len(_candidates(blend))


def best_of(candidates: Sequence[BlendTrial]) -> BlendTrial:
    """The first candidate whose error is as good as the smallest; they are ordered by p, with Wanda's last.

    Differences below `NOISE` (`MAGNITUDE_NOISE` for p = 0), or among errors above `LOST`, count as none.
    """
    least = min(min(trial.error, LOST) for trial in candidates)

    def is_as_good(trial: BlendTrial) -> bool:
        noise = MAGNITUDE_NOISE if trial.p == 0 and not trial.by_rows else NOISE
        return min(trial.error, LOST) <= (1 + noise) * least

    return next(trial for trial in candidates if is_as_good(trial))


def _candidates(blend: BlendInputs) -> list[tuple[float, Reduce, bool]]:
    """The candidates: power p, reduction, and whether weights are compared within rows."""
    if blend.taken is not None:
        return [(blend.taken.p, blend.taken.reduce, blend.taken.by_rows)]
    if not blend.sensitivities and blend.wanda_scores is not None:
        return [(0.0, "mean", True)]
    candidates: list[tuple[float, Reduce, bool]] = [(0.0, "max", False)]
    candidates += [(p, reduce, False) for p in POWERS for reduce in REDUCTIONS if reduce in blend.sensitivities]
    return candidates if blend.wanda_scores is None else [*candidates, (0.0, "mean", True)]
