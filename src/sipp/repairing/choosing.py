"""Chooses the error feedback and the budgets of layers: fits whole networks to a few points and compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from sipp.inputs.data import fresh, points_at
from sipp.inputs.outputs import output_error
from sipp.pruning.largest_scores import even_layers, largest, largest_above_floor
from sipp.repairing.data_split import DataSplit, merged_batches
from sipp.repairing.layer_fit import LayerTask
from sipp.repairing.repair_options import Candidates
from sipp.repairing.walk import Masks, NetworkTask, fit_network
from sipp.results.numerics import SCORE_DTYPE
from sipp.results.ranking import MOST_WEIGHTS_OF_SMALL, Weight, from_rows, to_rows
from sipp.results.repair import Budgets, Trial

TRIAL_SHARE, FEWEST_TRIED = 1 / 4, 256  # of the fit points, used in each trial; but at least this number of them
NOISE = 0.05  # relative: trials whose errors are closer than this count as equal, and the first is taken
SAME_BUDGET = 0.01  # relative: closer budgets count as the same, and are not tried twice
FIRST_LAYERS_SHARE = 1 / 8  # of the weights of a large network: trials fit the first layers that hold this share


@dataclass(frozen=True)
class Choice:
    """What was chosen, the first masks with these budgets, and the trials, if there was a choice."""

    error_feedback: float
    budgets: Budgets
    masks: dict[str, Tensor]
    trials: tuple[Trial, ...]


def choose(
    task: NetworkTask,
    layer_task: LayerTask,
    masks: Masks,
    split: DataSplit,
    candidates: Candidates,
    floor: float | None,
) -> Choice:
    """The candidates whose network is nearest to the dense one on the validation points.

    A large network is judged by its first layers, because whole fits would take too long.
    """
    by_budgets = masks_by_budgets(task, masks, candidates.budgets, floor)
    if len(by_budgets) == len(candidates.error_feedbacks) == 1:
        ((budgets, first_masks),) = by_budgets.items()
        return Choice(candidates.error_feedbacks[0], budgets, first_masks, ())
    tried_layers = _first_layers(task, masks)
    is_whole = len(tried_layers) == len(masks)
    tried_masks = by_budgets if is_whole else masks_by_budgets(task, tried_layers, candidates.budgets, floor)
    trials = _trials(task, layer_task, tried_masks, split, candidates.error_feedbacks)
    best = _best(trials)
    if not is_whole:
        by_budgets = masks_by_budgets(task, masks, (best.budgets,), floor)
    return Choice(best.error_feedback, best.budgets, by_budgets[best.budgets], tuple(trials))


def _trials(
    task: NetworkTask,
    layer_task: LayerTask,
    masks: dict[Budgets, dict[str, Tensor]],
    split: DataSplit,
    feedbacks: Sequence[float],
) -> list[Trial]:
    """Tries the feedbacks with the first budgets while the error falls; then the best one with the other budgets."""
    few, trials = _few_points(split), list[Trial]()

    def trial(feedback: float, budgets: Budgets) -> Trial:
        quick = replace(layer_task, error_feedback=feedback, validates=False)
        fit = fit_network(task, quick, masks[budgets], few.batches, few.n_fit_batches)
        error = output_error(task.dense, fit.model, split.validation)
        return Trial(feedback, budgets, len(masks[budgets]), math.inf if error is None else error)

    first, *others = sorted(masks, key=lambda budgets: budgets != "between")  # so it wins a tie
    for feedback in feedbacks:
        trials.append(trial(feedback, first))
        if len(trials) > 1 and trials[-1].error >= min(earlier.error for earlier in trials[:-1]):
            break
    best = _best(trials)
    return trials + [trial(best.error_feedback, budgets) for budgets in others]


def _best(trials: Sequence[Trial]) -> Trial:
    """The first whose error is within the noise of the least."""
    least = min(trial.error for trial in trials)
    return next(trial for trial in trials if trial.error <= (1 + NOISE) * least)


def _first_layers(task: NetworkTask, masks: Masks) -> dict[str, Tensor]:
    """The masks of the layers that trials fit: all of a small network, the first in execution of a large one."""
    n_weights = sum(mask.numel() for mask in masks.values())
    n_wanted = max(MOST_WEIGHTS_OF_SMALL, int(n_weights * FIRST_LAYERS_SHARE))
    if n_weights <= n_wanted:
        return dict(masks)
    first = dict[str, Tensor]()
    for group in task.map.same_input:
        first |= {name: masks[name] for name in group}
        if sum(mask.numel() for mask in first.values()) >= n_wanted:
            break
    return first


def _few_points(split: DataSplit) -> DataSplit:
    """Some of the fit points, at least a quarter of them, and no validation points, for several fits."""
    n_points = sum(batch.n_points for batch in split.fit)
    step = n_points // max(FEWEST_TRIED, int(n_points * TRIAL_SHARE))
    few = split.fit
    if step > 1:
        most = max(batch.n_points for batch in few)
        few = merged_batches([fresh(points_at(batch, slice(None, None, step))) for batch in few], most)
    return replace(split, batches=tuple(few), n_fit_batches=len(few))


def masks_by_budgets(
    task: NetworkTask, masks: Masks, wanted: Sequence[Budgets], floor: float | None
) -> dict[Budgets, dict[str, Tensor]]:
    """The masks to start from, by the rule that divides the weights among layers.

    All keep the same number of weights. Except for "given", the largest weights are kept. In a network that is sparse
    already, a layer's share refers to the weights it has left. A rule that gives nearly the same budgets as an earlier
    one is left out.
    """
    dense, in_order = task.dense, [weight for name, weight in task.weights.items() if name in masks]
    counts = [int(masks[weight.name].sum()) for weight in in_order]
    shapes = _shapes_left(in_order, dense, sum(counts))
    even = even_layers(shapes, sum(counts), least=0 if floor is None else 1)
    by_budgets: dict[Budgets, dict[str, Tensor]] = {}
    seen = list[list[int]]()
    for budgets in wanted:
        shares = _geometric_means(counts, even, shapes) if budgets == "between" else even
        if budgets in ("even", "between") and any(_is_nearly(shares, other) for other in seen):
            continue
        if budgets == "given":
            start = dict(masks)
        else:
            sizes = [to_rows(w, dense.get_parameter(w.name).detach()).cpu().abs().to(SCORE_DTYPE) for w in in_order]
            chosen = _largest_of(sizes, sum(counts) if budgets == "magnitude" else shares, floor)
            start = {
                w.name: from_rows(w, mask_FK, masks[w.name]).to(masks[w.name].device)
                for w, mask_FK in zip(in_order, chosen)
            }
        kept_each = [int(start[weight.name].sum()) for weight in in_order]
        if not any(_is_nearly(kept_each, other) for other in seen):
            seen.append(kept_each)
            by_budgets[budgets] = start
    return by_budgets


def _shapes_left(weights: Sequence[Weight], dense: nn.Module, budget: int) -> list[tuple[int, int]]:
    """Rows and columns of each weight; a weight with zeros counts as one row of the others, if they are enough."""
    left = [int(dense.get_parameter(weight.name).detach().count_nonzero()) for weight in weights]
    whole = [(weight.n_rows, weight.fan_in) for weight in weights]
    if sum(left) < budget:
        return whole
    return [shape if n == math.prod(shape) else (1, n) for shape, n in zip(whole, left)]


def _geometric_means(counts: Sequence[int], shares: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[int]:
    """The geometric means of both, scaled to the same total; no layer gets more than it has."""
    means = [math.sqrt(count * share) for count, share in zip(counts, shares)]
    sizes = [n_rows * n_columns for n_rows, n_columns in shapes]
    kept, left = [0] * len(means), sum(counts)
    rest = sum(means)
    for i in sorted(range(len(means)), key=lambda i: -means[i] / sizes[i]):
        kept[i] = min(sizes[i], round(left * means[i] / rest)) if rest > 0 else 0
        left, rest = left - kept[i], rest - means[i]
    return kept


def _is_nearly(counts: Sequence[int], others: Sequence[int]) -> bool:
    return all(abs(count - other) <= SAME_BUDGET * other for count, other in zip(counts, others))


def _largest_of(sizes: list[Tensor], budget: int | list[int], floor: float | None) -> list[Tensor]:
    """Masks of the largest weights, for one budget of all layers or one of each layer."""
    if isinstance(budget, int):
        return largest(sizes, budget) if floor is None else largest_above_floor(sizes, sizes, budget, share=floor)
    if floor is None:
        return [largest([size_FK], kept)[0] for size_FK, kept in zip(sizes, budget)]
    return [largest_above_floor([size_FK], [size_FK], kept, share=0.0)[0] for size_FK, kept in zip(sizes, budget)]
