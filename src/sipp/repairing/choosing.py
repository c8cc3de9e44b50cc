"""Chooses the error feedback and the budgets of layers: fits whole networks to a few points and compares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sipp.inputs.batches import fresh, points_at
from sipp.inputs.distance import output_error
from sipp.records.ranking import MOST_WEIGHTS_OF_SMALL
from sipp.records.repair import Budgets, Trial
from sipp.repairing.data_split import DataSplit, merged_batches
from sipp.repairing.layer_budgets import masks_by_budgets
from sipp.repairing.layer_usage import DenseOutputs, layer_usage
from sipp.repairing.network_fit import Masks, NetworkTask, fit_network
from sipp.repairing.repair_options import Candidates

TRIAL_SHARE, FEWEST_TRIED = 1 / 4, 256  # of the fit points, used in each trial; but at least this number of them
NOISE = 0.05  # relative: trials whose errors are closer than this count as equal, and the first is taken
FIRST_LAYERS_SHARE = 1 / 8  # of the weights of a large network: trials fit the first layers that hold this share


@dataclass(frozen=True)
class Choice:
    """What was chosen, the first masks with these budgets, and the trials, if there was a choice."""

    error_feedback: float
    budgets: Budgets
    masks: dict[str, Tensor]
    trials: tuple[Trial, ...]


def choose(task: NetworkTask, masks: Masks, split: DataSplit, candidates: Candidates, floor: float | None) -> Choice:
    """The candidates whose network is nearest to the dense one on the validation points."""

    def masks_of(some: Masks, budgets: Sequence[Budgets]) -> dict[Budgets, dict[str, Tensor]]:
        return masks_by_budgets(task.dense, task.weights, some, budgets, floor)

    starts = masks_of(masks, candidates.budgets)
    if len(starts) == len(candidates.error_feedbacks) == 1:
        ((budgets, start),) = starts.items()
        return Choice(candidates.error_feedbacks[0], budgets, start, ())
    first = _first_layers(task, masks, split)
    is_whole = len(first) == len(masks)
    if not is_whole:
        starts = masks_of(first, candidates.budgets)
    trials = _tried(task, starts, split, candidates.error_feedbacks)
    best = _best(trials)
    start = starts[best.budgets] if is_whole else masks_of(masks, (best.budgets,))[best.budgets]
    return Choice(best.error_feedback, best.budgets, start, tuple(trials))


def _tried(
    task: NetworkTask, starts: dict[Budgets, dict[str, Tensor]], split: DataSplit, feedbacks: Sequence[float]
) -> list[Trial]:
    """Tries the feedbacks with the first budgets while the error falls; then the best one with the other budgets."""
    few, trials = _few_points(split), list[Trial]()

    def tried(feedback: float, budgets: Budgets) -> Trial:
        layer = replace(task.layer, error_feedback=feedback, validates=False)
        residuals = None if task.residuals is None else [name for name in task.residuals if name in starts[budgets]]
        fit = fit_network(replace(task, layer=layer, residuals=residuals), starts[budgets], few)
        error = output_error(task.dense, fit.model, split.validation)
        return Trial(feedback, budgets, len(starts[budgets]), math.inf if error is None else error)

    first, *others = sorted(starts, key=lambda budgets: budgets != "between")  # so it wins a tie
    for feedback in feedbacks:
        trials.append(tried(feedback, first))
        if len(trials) > 1 and trials[-1].error >= min(trial.error for trial in trials[:-1]):
            break
    best = _best(trials)
    return trials + [tried(best.error_feedback, budgets) for budgets in others]


def _best(trials: Sequence[Trial]) -> Trial:
    """The first whose error is within the noise of the least."""
    least = min(trial.error for trial in trials)
    return next(trial for trial in trials if trial.error <= (1 + NOISE) * least)


def _first_layers(task: NetworkTask, masks: Masks, split: DataSplit) -> dict[str, Tensor]:
    """The masks of the layers that trials fit: all of a small network, the first in execution of a large one."""
    n_weights = sum(mask.numel() for mask in masks.values())
    n_wanted = max(MOST_WEIGHTS_OF_SMALL, int(n_weights * FIRST_LAYERS_SHARE))
    if n_weights <= n_wanted:
        return dict(masks)
    usage = layer_usage(task.dense, task.layers, split.batches[:1], task.forms)
    first = dict[str, Tensor]()
    for group in usage.order:
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
    return replace(split, batches=tuple(few), is_validation=(False,) * len(few), dense_outputs=DenseOutputs())
