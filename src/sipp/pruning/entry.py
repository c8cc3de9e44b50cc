"""The whole way in one readable function: scores -> budget -> rows -> bounds -> a pruned copy of the model.

`rank` does everything that does not depend on the budget, `cut` the rest, so one ranking serves any number of budgets.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import nn

from sipp.allocation.patterns import pattern_of
from sipp.bounds.assumption import check_assumption_of
from sipp.bounds.chain import chain_obstacle
from sipp.bounds.given_weights import judge
from sipp.bounds.sound.new_inputs import sound_network_bound
from sipp.bounds.statements import holdout_norms, state
from sipp.checking import check_choice, check_flag, check_whole
from sipp.errors import DeadRowsWarning, OptionError
from sipp.inputs.batches import points_at
from sipp.inputs.data import AnyData, Data, data_of
from sipp.inputs.layers import Selector
from sipp.inputs.restore import copy_of
from sipp.inputs.scoring_task import ScoringTask, task_of
from sipp.numerics import budget_of, device_of
from sipp.options import CONFIDENCE, DELTA, Constants, Draws, Floor, Mode, Reduce, Scoring
from sipp.progress import progress_bar
from sipp.pruning.cutting import before_cut, masks_by_name, sparse_rows, write_rows
from sipp.pruning.ranking import N_SAMPLE, RankOptions, chosen_on, rank_task, set_points_aside
from sipp.pruning.result import Moved, Pruned, PrunedLayer, Ranking
from sipp.records import Weight
from sipp.repairing.entry import repair as repair_network
from sipp.repairing.polishing import output_error
from sipp.scoring.methods import DEFAULT, Method

N_NAMED = 5  # layers in a warning


@torch.inference_mode(False)
def prune(
    model: nn.Module,
    data: AnyData | None,
    *,
    keep: float | None = None,
    budget: int | None = None,
    pattern: str | None = None,
    method: Method = DEFAULT,
    delta: float = DELTA,
    confidence: float = CONFIDENCE,
    seed: int = 0,
    draws: Draws = "until",
    reduce: Reduce | None = None,
    floor: Floor = "method",
    include: Selector | None = None,
    exclude: Selector | None = None,
    bound: Mode = "paper",
    holdout: AnyData | None = None,
    looks_at_assumption: bool = False,
    statements: bool = True,
    repair: bool = False,
    scoring: Scoring = Scoring(),
    constants: Constants = Constants(),
    progress: bool = True,
) -> Pruned:
    """A pruned copy of `model` with `keep` of its prunable weights (or `budget` of them), and what that costs.

    `pattern="2:4"` (any n:m) keeps two of every four consecutive weights of a row instead. `bound` chooses how the
    network statement is computed: the paper's formula, or operator norms on the graph. What rests on a maximum over
    points holds for all but a share of inputs, at `confidence` (T18), smallest for the network with a `holdout` of
    points that serve nothing else. `bound="sound"` needs such: without, the last quarter of `data` is kept aside, not
    scored. `looks_at_assumption` adds what data and holdout say of T4; `statements=False` saves the sensitivities of
    baselines (T17). With a `floor` no row dies, and a layer keeps that share of an even cut. `repair` refits the rest.

    Example:
        >>> import sipp, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> sipp.prune(model, torch.rand(200, 8), keep=0.5).kept  # of 192
        96
    """
    options = RankOptions(method, delta, confidence, draws, reduce, floor, constants, pattern)
    task = task_of(model, data, include=include, exclude=exclude, scoring=scoring, seed=seed)
    held = _checked_holdout(task, holdout, bound, looks_at_assumption, statements, repair)
    n_kept, aside = _budget(keep, budget, pattern, task.weights), held
    if bound == "sound" and data is not None and held is None:
        task, aside = set_points_aside(task, options)
    ranking = rank(task, options, progress=progress, statements=statements or options.row.is_scored)
    if bound == "paper" and held is not None and ranking.scores is not None:
        ranking = replace(ranking, holdout=holdout_norms(task, held))
    ranking = _chosen_by_repair(ranking, task) if repair else ranking
    pruned = _cut_and_run(ranking, task, n_kept, seed, progress)
    if repair and task.data is not None:  # without the points aside: those that choose values cannot judge them
        pruned = repaired(ranking, pruned, task.data, seed=seed, progress=progress)
    if bound == "sound" and ranking.scores is not None and aside is not None:
        sound = sound_network_bound(ranking.model, pruned.model, aside, ranking.scores, confidence=confidence)
        pruned = replace(pruned, bound=sound)
    if looks_at_assumption and data is not None and ranking.scores is not None:
        seen = replace(task, scoring=replace(scoring, n_points=ranking.scores.n_points))
        pruned = replace(pruned, assumption=check_assumption_of(seen, held, constants, progress=progress))
    return pruned


def rank(task: ScoringTask, options: RankOptions, *, progress: bool = False, statements: bool = False) -> Ranking:
    """The scores of every prunable weight by one method: all of pruning that does not depend on the budget.

    `statements` asks for what only statements need: sensitivities beside the scores of a baseline (T17), the constant
    measured (T19), and the reason why T12 does not bind the model.
    """
    ranking = rank_task(task, options, progress=progress, statements=statements)
    if ranking.scores is None:
        return ranking
    names = {weight.name for weight in ranking.weights}
    return replace(ranking, obstacle=chain_obstacle(ranking.model, names, ranking.example))


def cut(ranking: Ranking, budget: int, *, seed: int = 0) -> Pruned:
    """The network pruned to `budget` weights. The same ranking, budget and seed give the same bits."""
    uncut = before_cut(ranking)
    rows, choice = sparse_rows(ranking, uncut, budget, seed=seed)
    model = copy_of(ranking.model)
    write_rows(model, ranking, rows)
    pruned = state(ranking, rows, uncut.dense, model, masks_by_name(model, ranking, rows), budget=budget, seed=seed)
    _warn_of_dead(pruned.layers)
    return replace(pruned, choice=choice, pattern=None if ranking.pattern is None else str(ranking.pattern))


def repaired(ranking: Ranking, pruned: Pruned, data: AnyData, *, seed: int = 0, progress: bool = False) -> Pruned:
    """The pruned network with its kept weights refitted, and what is promised about those (T17)."""
    fixed = repair_network(ranking.model, pruned, data, seed=seed, progress=progress)
    if ranking.scores is None:
        return fixed
    judged = judge(ranking, fixed.model, fixed.masks, seed)
    return replace(
        fixed, layers=judged.layers, guarantee=judged.guarantee, bound=judged.bound, measured=judged.measured
    )


def _chosen_by_repair(ranking: Ranking, task: ScoringTask) -> Ranking:
    """The ranking that knows the points of a repair: they choose values, and cannot judge them."""
    return ranking if ranking.scores is None else replace(ranking, scores=chosen_on(ranking.scores, task.data))


def _cut_and_run(ranking: Ranking, task: ScoringTask, n_kept: int, seed: int, progress: bool) -> Pruned:
    """The network of `cut`, run on a few points to see how far its output moved."""
    with progress_bar("cutting", None, shown=progress):  # a blend is chosen here, among several cuts
        return _with_moved(_with_sample(ranking, task), cut(ranking, n_kept, seed=seed))


def _with_sample(ranking: Ranking, task: ScoringTask) -> Ranking:
    """The ranking with a few points to run, where nothing was scored and the data can be read (again)."""
    if ranking.sample is not None or task.data is None or not task.data.can_be_read_again:
        return ranking
    few = replace(task, scoring=replace(task.scoring, n_points=None))
    return replace(ranking, sample=points_at(next(few.batches(N_SAMPLE)), slice(N_SAMPLE)))


def _with_moved(ranking: Ranking, pruned: Pruned) -> Pruned:
    """The record with what its weights do to the output on a few points: those of the blend's choice, or of the sample.

    One forward pass of each network on at most 32 points; a blend has measured it on the points kept aside.
    """
    if pruned.choice is not None:
        chosen = pruned.choice
        return replace(pruned, moved=Moved(chosen.taken.error, chosen.n_points, aside=chosen.is_aside))
    if ranking.sample is None:
        return pruned
    error = output_error(ranking.model, pruned.model, [ranking.sample])
    return pruned if error is None else replace(pruned, moved=Moved(error, ranking.sample.n_points, aside=False))


def _warn_of_dead(layers: tuple[PrunedLayer, ...]) -> None:
    """One warning for all rows that died, and one for all layers, however many there are."""
    gone = [layer.name for layer in layers if layer.kept == 0]
    rows = [
        f"{layer.name} ({len(layer.dead_rows)} of {layer.n_rows})" for layer in layers if layer.kept and layer.dead_rows
    ]
    if gone:
        what = "the whole layer died" if len(gone) == 1 else f"{len(gone)} whole layers died"
        text = f"{what}, no weight was kept: {_some(gone)}; floor=0.1 prevents it"
        warnings.warn(text, DeadRowsWarning, stacklevel=4)
    if rows:
        text = f"rows died, no weight of theirs was kept: {_some(rows)}; floor=0.0 keeps one"
        warnings.warn(text, DeadRowsWarning, stacklevel=4)


def _some(names: list[str]) -> str:
    return ", ".join(names[:N_NAMED]) + (f" and {len(names) - N_NAMED} more" if len(names) > N_NAMED else "")


def _budget(keep: float | None, budget: int | None, pattern: str | None, weights: Sequence[Weight]) -> int:
    """The number of weights to keep, known before the work: a wrong budget should not cost a pass over the data."""
    if sum(goal is not None for goal in (keep, budget, pattern)) != 1:
        raise OptionError(
            "give exactly one of keep (a share in (0, 1]), budget (a number of weights) and pattern (n:m)"
        )
    n_weights = sum(weight.n_weights for weight in weights)
    if pattern is not None:
        return sum(weight.n_rows * pattern_of(pattern).kept(weight.fan_in) for weight in weights)
    if keep is not None:
        return budget_of(keep, n_weights)
    return check_whole("budget", budget, least=1, most=n_weights)  # all prunable weights


def _checked_holdout(
    task: ScoringTask,
    holdout: AnyData | None,
    bound: str,
    looks_at_assumption: bool,
    statements: bool,
    repair: bool,
) -> Data | None:
    """The holdout; refuses what cannot be read as often as it must be, and what would serve nothing."""
    data, held = task.data, None
    check_choice("bound", bound, get_args(Mode))
    check_flag("looks_at_assumption", looks_at_assumption)
    check_flag("statements", statements)
    check_flag("repair", repair)
    if not statements and (holdout is not None or bound != "paper" or looks_at_assumption):
        raise OptionError(
            "holdout, bound='sound' and looks_at_assumption serve statements, and statements=False asks for none",
            fix="leave out one or the other",
        )
    if repair and (data is None or not data.can_be_read_again):
        raise OptionError(
            "repair=True refits on the data, after it was scored", fix="give a list, a loader or a tensor"
        )
    if (bound == "sound" or looks_at_assumption) and data is not None and not data.can_be_read_again:
        raise OptionError(
            "bound='sound' and looks_at_assumption read the data twice", fix="give a list, a loader or a tensor"
        )
    if holdout is not None and data is None:
        raise OptionError("holdout serves statements about points, and there is no data", fix="give both, or neither")
    if holdout is not None:
        held = data_of(holdout, role="holdout", device=device_of(task.model))
        if looks_at_assumption and not held.can_be_read_again:
            raise OptionError("looks_at_assumption reads the holdout again", fix="give a list, a loader or a tensor")
    return held
