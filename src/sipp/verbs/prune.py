"""`prune`: makes a pruned copy of a model, with bounds on its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sipp import bounds, repairing
from sipp.errors import DeadRowsWarning, OptionError, warn_caller
from sipp.inputs import AnyData, Data, data_of
from sipp.native import memory
from sipp.pruning import (
    Cut,
    Ranking,
    budget_for,
    cut,
    cut_of,
    measured_change,
    rank,
)
from sipp.results import (
    Allocation,
    Draws,
    Loss,
    Method,
    Mode,
    NormStats,
    OutputChange,
    Pruned,
    PruneOptions,
    Reduce,
    RepairMethod,
    Selector,
    hashing,
    numerics,
    other_names,
    words,
)
from sipp.scoring import ScoringTask, checked_method, task_of

WAY_OUT = "keep more, or use the default method, which leaves weights in each (in Python also: floor=0.1)"


@other_names.explain_unknown_options
@torch.inference_mode(False)
def prune(
    model: nn.Module,
    data: AnyData | None,
    *,
    keep: float | None = None,
    budget: int | None = None,
    pattern: str | None = None,
    method: Method = PruneOptions.method,
    delta: float = PruneOptions.delta,
    confidence: float = PruneOptions.confidence,
    seed: int = PruneOptions.seed,
    draws: Draws = PruneOptions.draws,
    allocation: Allocation = PruneOptions.allocation,
    reduce: Reduce | None = None,
    floor: float | None = None,
    include: Selector | None = None,
    exclude: Selector | None = None,
    within: Mapping[str, Tensor] | None = None,
    bound: Mode = PruneOptions.bound,
    holdout: AnyData | None = None,
    statements: bool = PruneOptions.statements,
    repair: bool = PruneOptions.repair,
    norm_stats: NormStats = PruneOptions.norm_stats,
    loss: Loss | None = None,
    c_constant: float = PruneOptions.c_constant,
    k_constant: float = PruneOptions.k_constant,
    progress: bool = True,
) -> Pruned:
    """Returns a pruned copy of `model` with `keep` of its prunable weights (or `budget` of them), and its bounds.

    `norm_stats="batch"` runs BatchNorm with the statistics of each batch, and `loss` of (outputs, labels) replaces
    cross-entropy for methods that take gradients.

    `pattern="2:4"` (any n:m) keeps two of every four consecutive weights of a row instead. `repair=True` finds the mask
    and the weights together; the method then decides how many weights each layer keeps (`sipp.repair` keeps its mask).
    `allocation` and `draws` are for methods that sample. With a `floor` above 0, every neuron or filter keeps at least
    one weight, and every layer at least this fraction of an even share. `within` are the masks of an earlier pruning:
    what they prune stays pruned, also if the budget leaves room.

    `bound` chooses how to bound the whole network: by the paper's formula, or by operator norms on the graph. A bound
    measured on inputs holds for all but a share of new inputs, with the given `confidence`. With a `holdout` of new
    inputs that share is smaller, and the theory's constant is measured instead of assumed. `bound="sound"` needs one:
    without it, a quarter of `data` is held back and not scored. `statements=False` skips the sensitivities of methods
    that do not need them. `delta` is the probability that the theory's inequality fails (T4).

    All options: docs/api.md ("Shared options") and docs/api/prune.md.

    Example:
        >>> import sipp, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> sipp.prune(model, torch.rand(200, 8), keep=0.5).kept  # of 192
        96
    """
    options = PruneOptions(
        keep=keep, budget=budget, pattern=pattern, method=method, delta=delta, confidence=confidence, seed=seed,
        draws=draws, allocation=allocation, reduce=reduce, floor=floor, include=include, exclude=exclude, bound=bound,
        statements=statements, c_constant=c_constant, k_constant=k_constant, repair=repair,
        norm_stats=norm_stats, loss=loss,
    )  # fmt: skip
    info = checked_method(options)
    task = task_of(
        model,
        data,
        include=options.include,
        exclude=options.exclude,
        seed=options.seed,
        norm_stats=options.norm_stats,
        loss=options.loss,
    )
    repairs = info.repairs(options.repair)
    _refuse_contradictions(options, task.data, repairs, has_holdout=holdout is not None)
    budget = budget_for(options, task.weights)
    alive = _checked_within(within, task, budget, has_repair=bool(repairs))
    task, new_points = _with_new_points(task, options, holdout)
    states = options.statements or info.uses_sensitivities
    ranking = rank(task, options, alive=alive, statements=states, progress=progress)
    network_cut = cut(ranking, budget, seed=options.seed, progress=progress)
    ranking, repaired = ranking.without_scores(), None
    memory.give_back_freed()
    if repairs:
        start = network_cut.model if info.is_sampled else None  # the weights of other methods are the dense ones
        network_cut = replace(network_cut, model=ranking.model, rows=(), dense=())  # a repair makes its own copies
        split = repairing.split_data(task.points)  # without new points
        network_cut, repaired = repaired_cut(ranking, network_cut, split, repairs, start=start, progress=progress)
    moved = None if repairs else measured_change(ranking, network_cut, task)
    pruned = pruned_of(
        ranking, network_cut, task, mode=options.bound, new_points=new_points, moved=moved, repaired=repaired
    )
    warn_of_dead_rows(pruned)
    return pruned


def repaired_cut(
    ranking: Ranking,
    first: Cut,
    split: repairing.DataSplit,
    repairs: Sequence[RepairMethod],
    *,
    start: nn.Module | None,
    progress: bool = False,
) -> tuple[Cut, repairing.Repaired]:
    """The network after these repairs, one after another, from the values in `start` (None: the dense ones)."""
    masks, keeps_rows, scores = first.masks, ranking.floor is not None, ranking.sensitivities
    for method in repairs:
        repaired = repairing.repair_network(
            ranking.model,
            masks,
            split,
            method,
            pattern=ranking.pattern,
            keeps_rows=keeps_rows,
            start=start,
            known=scores.map if scores is not None and scores.norm_stats == "running" else None,
            progress=progress,
        )
        start, masks = repaired.model, repaired.masks
    found = cut_of(ranking, repaired.model, repaired.masks, seed=first.seed, budget=first.budget, choice=first.choice)
    return found, repaired


def _checked_within(
    within: Mapping[str, Tensor] | None, task: ScoringTask, budget: int, *, has_repair: bool
) -> Mapping[str, Tensor]:
    """The masks to stay within, empty if there are none; raises if they do not fit the weights or the budget."""
    if within is None:
        return {}
    parameters, alive = task.parameters(), dict[str, Tensor]()
    for weight in task.weights:
        mask = within.get(weight.name) if isinstance(within, Mapping) else None
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != parameters[weight.name].shape:
            raise OptionError(
                f"within= has no bool mask of the shape of {weight.name}", fix="give the masks of a pruned network"
            )
        alive[weight.name] = mask.to(parameters[weight.name].device)
        if has_repair and bool(parameters[weight.name][~alive[weight.name]].any()):
            raise OptionError(
                f"within= prunes weights of {weight.name} that are not 0 in the model, and a repair would use them",
                fix="give the pruned network as the model",
            )
    n_alive = sum(int(mask.sum()) for mask in alive.values())
    if budget > n_alive:
        raise OptionError(f"{budget:,} weights are asked for, but within= leaves {n_alive:,}", fix="keep fewer")
    return alive


def _refuse_contradictions(
    options: PruneOptions, data: Data | None, repairs: Sequence[RepairMethod], *, has_holdout: bool
) -> None:
    """Raises for options that contradict each other or the data; `PruneOptions` checks each alone."""
    if not options.statements and has_holdout:
        raise OptionError(
            "holdout= tightens bounds, but statements=False turns them off", fix="leave out one or the other"
        )
    if options.repair and data is None:
        raise OptionError("a repair needs data: inputs on which it compares both networks", option="repair")
    if has_holdout and data is None:
        raise OptionError("a holdout needs data, but there is none", fix="give both, or neither")
    reads_again = bool(repairs) or options.bound == "sound"
    if not reads_again or data is None or data.can_be_read_again:
        return
    if repairs:
        what = "repair" if options.repair else f"method={options.method!r}"
        raise OptionError(
            f"{what} reads the data twice, but it is an iterator", fix="give a list, a loader or a tensor"
        )
    raise OptionError(
        "bound='sound' reads the data twice, but it is an iterator", fix="give a list, a loader or a tensor"
    )


def _with_new_points(
    task: ScoringTask, options: PruneOptions, holdout: AnyData | None
) -> tuple[ScoringTask, Data | None]:
    """The task, and new inputs for a bound: the holdout, or inputs held back from the task if the bound needs some."""
    if holdout is not None:
        return task, data_of(holdout, role="holdout", device=numerics.device_of(task.model))
    if options.bound == "sound" and task.data is not None:
        return task.hold_back()
    return task, None


def pruned_of(
    ranking: Ranking,
    network_cut: Cut,
    task: ScoringTask | None = None,
    *,
    mode: Mode = "paper",
    new_points: AnyData | None = None,
    moved: OutputChange | None = None,
    repaired: repairing.Repaired | None = None,
) -> Pruned:
    """Builds the record of a pruned network: how it was made, the change of its output, and its guarantees.

    A repair has measured itself how far the output moved.
    """
    stated = bounds.statements_of(ranking, network_cut, task, new_points if mode == "paper" else None)
    bound, scores, confidence = stated.bound, ranking.sensitivities, ranking.options.confidence
    if mode == "sound" and new_points is not None and scores is not None:
        bound = bounds.sound_network_bound(ranking.model, network_cut.model, new_points, scores, confidence=confidence)
    return Pruned(
        model=network_cut.model,
        masks=network_cut.masks,
        layers=stated.layers,
        guarantee=stated.guarantee,
        bound=bound,
        method=ranking.method_name,
        budget=network_cut.budget,
        kept=sum(layer.kept for layer in stated.layers),
        seed=network_cut.seed,
        draws=ranking.options.draws,
        measured=stated.measured,
        choice=network_cut.choice,
        repair=None if repaired is None else repaired.record,
        described_hash=hashing.of_model(network_cut.model),
        pattern=None if ranking.pattern is None else str(ranking.pattern),
        moved=moved if repaired is None else repaired.moved,
        seen=ranking.seen if repaired is None else ranking.seen | repaired.seen,
    )


def warn_of_dead_rows(pruned: Pruned) -> None:
    """Warns once about all neurons and filters that lost every weight."""
    dead = [f"{layer.name} ({layer.dead_rows} of {layer.n_rows})" for layer in pruned.layers if layer.dead_rows]
    if not dead:
        return
    n_rows, way_out = sum(layer.n_rows for layer in pruned.layers), WAY_OUT
    if pruned.kept < n_rows:
        way_out = f"{pruned.kept:,} weights are fewer than the {n_rows:,} neurons or filters: keep more"
    listed = words.listed(dead)
    warn_caller(f"these neurons or filters lost all their weights: {listed}; {way_out}", DeadRowsWarning)
