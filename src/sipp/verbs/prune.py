"""`prune`: makes a pruned copy of a model, with bounds on its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sipp import repairing
from sipp.errors import OptionError
from sipp.inputs import AnyData, Data, data_of
from sipp.pruning import budget_for, cut, measured_change, rank
from sipp.results import (
    Allocation,
    Draws,
    Loss,
    Method,
    Mode,
    NormStats,
    Pruned,
    PruneOptions,
    Reduce,
    RepairMethod,
    Selector,
    numerics,
    other_names,
)
from sipp.scoring import ScoringTask, checked_method, task_of
from sipp.verbs.record import pruned_of, repaired_cut, warn_of_dead_rows


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
    ranking = rank(task, options, alive=alive, needs_bounds=options.statements, progress=progress)
    network_cut, repaired = cut(ranking, budget, seed=options.seed, progress=progress), None
    ranking = ranking.without_scores()
    if repairs:
        start = network_cut.model if info.is_sampled else None  # the weights of other methods are the dense ones
        masks, choice = network_cut.masks, network_cut.choice
        del network_cut  # a repair makes its own copies of the network
        network_cut, repaired = repaired_cut(
            ranking, masks, repairing.split_data(task.points), repairs,
            start=start, budget=budget, seed=options.seed, choice=choice, progress=progress,
        )  # fmt: skip
    moved = None if repairs else measured_change(ranking, network_cut, task)
    pruned = pruned_of(
        ranking, network_cut, task, mode=options.bound, new_points=new_points, moved=moved, repaired=repaired
    )
    warn_of_dead_rows(pruned)
    return pruned


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
