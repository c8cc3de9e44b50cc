"""Ranks the weights of a network by a method, and cuts it to a budget (T5-T10).

data  ->  a Ranking: scores, sensitivities for what is stated later, what a blend is chosen from (T20)
      ->  masks: the largest scores within a budget, or the best of several blends (blending.py)
      ->  or rows that are sampled (T8, sampling.py)
      ->  rows, each with its bound (rows.py)  ->  a Cut: a copy of the network, and its masks by name

A ranking does not depend on the budget: one ranking can be cut to any number of weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from sipp import pruning
from sipp.errors import OptionError, warn_caller
from sipp.inputs import Batch, Weight, copy_of, outputs
from sipp.progress import Advance, progress_bar
from sipp.pruning.rows import (
    SparseRows,
    best_within,
    even_layers,
    even_rows,
    given_rows,
    largest_in_groups,
    largest_in_rows,
    masked_rows,
)
from sipp.results import (
    BlendChoice,
    OutputChange,
    Pattern,
    PruneOptions,
    Reduce,
    SeenInputs,
    check,
    hashing,
    numerics,
)
from sipp.scoring import (
    MethodInfo,
    ScoringTask,
    Sensitivities,
    checked_method,
    measure_sensitivities,
    method_of,
    scores_of,
)

N_SAMPLE = 32  # points on which the output of a cut is measured

# --- Ranking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """The scores of all prunable weights, and all else that a cut to any budget needs."""

    model: nn.Module  # the dense network, untouched
    weights: tuple[Weight, ...]
    scores: tuple[Tensor, ...]  # F x K on the CPU, one per weight: the largest are kept
    sensitivities: Sensitivities | None  # None if no sensitivities were computed: then nothing is guaranteed
    options: PruneOptions  # method "given": weights that the caller chose
    seen: SeenInputs  # the points that chose the weights; others only serve statements
    why_no_sensitivities: str = ""  # why there are no sensitivities; empty if there are
    sample: Batch | None = None  # a few points to run networks on; None without sensitivities
    alive: tuple[Tensor, ...] = ()  # bool F x K: what an earlier pruning left, and nothing else stays; (): all
    floor: float | None = None  # under rows and layers; None: they may lose all weights
    pattern: Pattern | None = None  # n of every m weights of a row, instead of a budget over all
    blend: pruning.BlendInputs | None = None  # what a blend is chosen from; None for other methods

    def without_scores(self) -> Ranking:
        """The ranking after its last cut, which can be repaired and stated, but not cut again.

        Its scores are twice as large as the network.
        """
        return replace(self, scores=(), blend=None)

    @property
    def method_name(self) -> str:
        method = self.options.method
        return method if isinstance(method, str) else method_of(method).name

    @property
    def n_weights(self) -> int:
        return sum(weight.n_weights for weight in self.weights)

    @cached_property
    def dense(self) -> list[Tensor]:
        """F x K per weight, on the CPU: the weights before pruning."""
        return [weight.rows(self.model.get_parameter(weight.name).detach()).cpu() for weight in self.weights]

    def sensitivity(self, i: int) -> Tensor | None:
        """F x K of weight i, on the CPU; None if there are none."""
        return None if self.sensitivities is None else self.sensitivities.layers[i].sensitivity_FK.cpu()

    @property
    def sampling_constant(self) -> float:
        """S~ of T6 for a sum of sensitivities of 1."""
        assert self.sensitivities is not None
        options, n_outputs = self.options, self.sensitivities.n_outputs
        return pruning.sampling_constant(n_outputs=n_outputs, delta=options.delta, c_constant=options.c_constant)

    @cached_property
    def problem(self) -> pruning.AllocationProblem:
        """OptAlloc for the rows of a method that samples, without its budget (T10)."""
        return pruning.allocation_problem(self.dense, self.scores, self.sampling_constant, self.options.allocation)


def rank(
    task: ScoringTask,
    options: PruneOptions,
    *,
    alive: Mapping[str, Tensor] | None = None,
    statements: bool = False,
    progress: bool = False,
    warns: bool = True,
) -> Ranking:
    """Scores every prunable weight by one method.

    `alive` are the masks of an earlier pruning: what they prune stays pruned. `statements` also computes what only
    statements need: sensitivities in addition to the scores of a baseline (T17). With `warns`, there is a warning if
    some of the weights are frozen.
    """
    check.flag("progress", progress)
    info, whole = checked_method(options), task
    is_first_mask, why_not = _plan(task, info, options, statements=statements)
    read = set[str]()  # hashes: of a loader that shuffles, a method may read others than are scored
    if warns:
        _warn_of_frozen(task.model, task.weights)
    found = held_back = sensitivities = sample = blend = None
    if info.is_blend:
        task, held_back = task.hold_back()
        read.update(hash_ for part in (task.points, held_back) if not part.is_empty for hash_ in part.hashes())
    if not info.uses_sensitivities:
        with progress_bar(f"scoring by {info.name}", None, shown=progress and info.needs_data):
            found = scores_of(replace(task, read=read), info)
    if not why_not:
        with_means = info.is_blend and not is_first_mask  # T20
        sensitivities, sample = _measure(task, options.reduce or info.reduce, with_means=with_means, shown=progress)
        repaired = whole.points.hashes() if options.repair or info.fitting else []
        chose = SeenInputs(frozenset(read).union(repaired), is_all=True)
        sensitivities = replace(sensitivities, seen=sensitivities.seen | chose)
    if info.is_blend:
        blend = pruning.blend_inputs(task, None if is_first_mask else sensitivities, held_back)
    scores = _scores(task, found, sensitivities, blend)
    kept = [weight.rows(alive[weight.name]).cpu() for weight in task.weights] if alive else []
    if kept:
        scores = [_alive_first(*layer, is_sampled=info.is_sampled) for layer in zip(scores, kept)]
    return Ranking(
        model=task.model,
        weights=task.weights,
        scores=tuple(scores),
        sensitivities=sensitivities,
        options=options,
        seen=_chosen_by(info, read, sensitivities, is_within=bool(kept)),
        why_no_sensitivities=why_not,
        sample=sample,
        alive=tuple(kept),
        floor=(info.floor if options.floor is None else float(options.floor)) or None,
        pattern=None if options.pattern is None else Pattern.of(options.pattern),
        blend=blend,
    )


def _plan(task: ScoringTask, info: MethodInfo, options: PruneOptions, *, statements: bool) -> tuple[bool, str]:
    """Whether Wanda's mask starts a search in a large network and no other is tried; why no sensitivities are scored.

    The reason is empty if they are. Raises if the method needs data and there is none.
    """
    data = task.data
    if data is None and info.needs_data and isinstance(options.method, str):  # a function raises its own error
        raise OptionError(
            f"method={info.name!r} needs data: an iterable of batches, a tensor of inputs or a Dataset", option="method"
        )
    is_search = info.is_blend and options.repair and task.norm_stats != "batch" and data is not None
    is_first_mask = is_search and is_large_linear_network(task.weights, task.parameters())
    why_not = ""
    if info.uses_sensitivities and not is_first_mask:
        pass
    elif data is None:
        why_not = f"{info.name} was given no data; with data there would be bounds"
    elif not (options.statements if is_first_mask else statements):
        why_not = f"{info.name} needs no sensitivities, and none were scored; sipp.assess gives bounds for its masks"
    elif info.needs_data and not data.can_be_read_again:
        why_not = f"{info.name} has used up the iterator; with a list, a loader or a tensor there would be bounds"
    return is_first_mask, why_not


def is_large_linear_network(weights: Sequence[Weight], parameters: Mapping[str, Tensor]) -> bool:
    """Whether a network is large and all its weights are matrices: trying whole networks is too expensive then."""
    is_large = sum(weight.n_weights for weight in weights) > numerics.MOST_WEIGHTS_OF_SMALL
    return is_large and all(parameters[weight.name].ndim == 2 for weight in weights)


def _scores(
    task: ScoringTask,
    found: Mapping[str, Tensor] | None,
    sensitivities: Sensitivities | None,
    blend: pruning.BlendInputs | None,
) -> Sequence[Tensor]:
    """The scores of every weight, F x K on the CPU; a blend is cut by others, and only needs some."""
    if found is not None:
        return [weight.rows(found[weight.name]).cpu() for weight in task.weights]
    if sensitivities is not None:
        return [layer.sensitivity_FK.cpu() for layer in sensitivities.layers]
    if blend is not None and blend.wanda_scores is not None:
        return blend.wanda_scores
    parameters = task.parameters()
    return [weight.rows(parameters[weight.name].detach()).abs().cpu() for weight in task.weights]


def _measure(task: ScoringTask, reduce: Reduce, *, with_means: bool, shown: bool) -> tuple[Sensitivities, Batch]:
    """The sensitivities of a model, and the first points that were scored."""
    sample = list[Batch]()
    with progress_bar("scoring", task.points.n_points_known, shown=shown) as advance:

        def on_batch(batch: Batch) -> None:
            advance(batch.n_points)
            if not sample:
                sample.append(batch.at(slice(N_SAMPLE)).copied())

        return measure_sensitivities(task, reduce=reduce, on_batch=on_batch, with_means=with_means), sample[0]


def _alive_first(scores_FK: Tensor, alive_FK: Tensor, *, is_sampled: bool) -> Tensor:
    """The scores with 0 for pruned weights and, unless the method samples, a positive score for all others.

    Otherwise a budget above the number of positive scores would take pruned weights back, and `random` would rank them
    like any other.
    """
    # The smallest normal number: it decides ties only, and can only add to a bound (T5), never lower it.
    least = 0.0 if is_sampled else torch.finfo(scores_FK.dtype).tiny
    return torch.where(alive_FK, scores_FK.clamp(min=least), 0.0)


def _chosen_by(info: MethodInfo, read: set[str], sensitivities: Sensitivities | None, *, is_within: bool) -> SeenInputs:
    """The points that chose the weights.

    Others may have: those that chose the masks to stay within, or those that a user's function knows by itself.
    """
    if not info.needs_data:  # its points serve statements only
        return SeenInputs(frozenset(read), is_all=not is_within)
    hashes = read.union(() if sensitivities is None else sensitivities.seen.hashes)
    return SeenInputs(frozenset(hashes), is_all=bool(hashes) and not is_within)


def _warn_of_frozen(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Warns of weights with requires_grad=False beside others that train: they would be pruned all the same."""
    frozen = [weight.name for weight in weights if not model.get_parameter(weight.name).requires_grad]
    if frozen and len(frozen) < len(weights):
        some = ", ".join(frozen[:8]) + (", ..." if len(frozen) > 8 else "")
        warn_caller(
            f"{len(frozen)} of {len(weights)} prunable weights are frozen (requires_grad=False) and are pruned like "
            f"the others: {some}; leave them as they are with exclude={frozen[0]!r}"
        )


# --- Cutting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """A pruned copy of a network and its sparse rows, before any statement about them."""

    model: nn.Module
    masks: dict[str, Tensor]
    rows: tuple[SparseRows, ...]
    dense: tuple[Tensor, ...]  # F x K, the weights before pruning
    budget: int  # the number of weights asked for
    seed: int
    choice: BlendChoice | None = None  # of a blend
    others: tuple[str, ...] = ()  # other tensors that differ from the dense network, such as biases


def budget_for(options: PruneOptions, weights: Sequence[Weight]) -> int:
    """The number of weights to keep; called before scoring, so that a wrong budget costs no pass over the data."""
    if sum(goal is not None for goal in (options.keep, options.budget, options.pattern)) != 1:
        raise OptionError(
            "give exactly one of keep (a share in (0, 1]), budget (a number of weights) and pattern (n:m)"
        )
    n_weights = sum(weight.n_weights for weight in weights)
    if options.pattern is not None:
        return sum(weight.n_rows * Pattern.of(options.pattern).kept(weight.fan_in) for weight in weights)
    if options.keep is not None:
        return numerics.budget_of(options.keep, n_weights)
    return check.whole("budget", options.budget, least=1, most=n_weights)  # all prunable weights


def cut(ranking: Ranking, budget: int, *, seed: int = 0, into: nn.Module | None = None, progress: bool = False) -> Cut:
    """The network pruned to `budget` weights. The same ranking, budget and seed give the same bits.

    The weights are written into a copy of the ranked network, or into the network `into`.
    """
    info, dense, choice = method_of(ranking.options.method), ranking.dense, None
    n_cuts = None if ranking.blend is None else len(ranking.blend.candidates())  # a blend is chosen among several cuts
    with progress_bar("cutting", n_cuts, shown=progress) as advance:
        if info.is_sampled and budget < ranking.n_weights:
            rows = pruning.sampled_rows(ranking, budget, seed=seed)
        else:
            if ranking.blend is not None:
                masks, choice = _masks_of_blend(ranking, budget, advance)
            else:
                masks = _masks(ranking, info.rule, ranking.scores, budget)
            if ranking.alive:  # a row may have fewer weights left than its even share
                masks = [mask_FK & alive_FK for mask_FK, alive_FK in zip(masks, ranking.alive)]
            c_constant = ranking.options.c_constant
            rows = [
                masked_rows(dense_FK, mask_FK, ranking.sensitivity(i), c_constant=c_constant)
                for i, (dense_FK, mask_FK) in enumerate(zip(dense, masks))
            ]
    model, by_name = copy_of(ranking.model) if into is None else into, {}
    with torch.no_grad():
        for weight, row in zip(ranking.weights, rows):
            parameter = model.get_parameter(weight.name)
            parameter.copy_(weight.shaped(row.values_FK.to(parameter.dtype), parameter))
            by_name[weight.name] = weight.shaped(row.mask_FK, parameter).to(parameter.device)
    return Cut(model, by_name, tuple(rows), tuple(dense), budget, seed, choice)


def cut_of(
    ranking: Ranking,
    given: nn.Module,
    masks: Mapping[str, Tensor],
    *,
    seed: int = 0,
    budget: int | None = None,
    choice: BlendChoice | None = None,
) -> Cut:
    """The cut that a network is already, however it was pruned, repaired or trained, with the bound of T17.

    A weight without a mask is kept where it is not 0. Without a `budget`, what is kept counts as asked for.
    """
    rows, all_masks, c_constant = list[SparseRows](), dict[str, Tensor](), ranking.options.c_constant
    for i, (weight, dense_FK) in enumerate(zip(ranking.weights, ranking.dense)):
        parameter = given.get_parameter(weight.name).detach()
        mask = masks[weight.name].bool() if weight.name in masks else parameter != 0
        if ranking.alive:
            mask = mask & weight.shaped(ranking.alive[i], mask).to(mask.device)
        all_masks[weight.name] = mask
        values_FK, mask_FK = (weight.rows(tensor).cpu() for tensor in (parameter, mask))
        rows.append(given_rows(dense_FK, values_FK, mask_FK, ranking.sensitivity(i), c_constant=c_constant))
    if budget is None:
        budget = sum(int(row.mask_FK.sum()) for row in rows)
    others = _other_differences(ranking, given)
    return Cut(given, all_masks, tuple(rows), tuple(ranking.dense), budget, seed, choice, others)


def _other_differences(ranking: Ranking, given: nn.Module) -> tuple[str, ...]:
    """Names of tensors that differ but are no prunable weight: bounds do not cover them."""
    chosen = {name for weight in ranking.weights for name in (weight.name, *weight.aliases)}
    ours, theirs = hashing.tensors(ranking.model), hashing.tensors(given)
    return tuple(
        name for name, value in ours.items() if name not in chosen and not torch.equal(value, theirs[name].to(value))
    )


def _masks(ranking: Ranking, among: str, scores: Sequence[Tensor], budget: int) -> list[Tensor]:
    """The weights to keep: the largest scores of the network, of each layer or of each row, above the floor.

    With an n:m pattern, the largest of each group.
    """
    if ranking.pattern is not None:
        return [largest_in_groups(score_FK, ranking.pattern) for score_FK in scores]
    shapes, least = [rank_FK.shape for rank_FK in scores], 0 if ranking.floor is None else 1
    if among == "row":
        return [largest_in_rows(*layer) for layer in zip(scores, even_rows(shapes, budget, least=least))]
    if among == "layer":
        floor = None if ranking.floor is None else 0.0
        layers = zip(scores, ranking.dense, even_layers(shapes, budget, least=least))
        return [best_within([s_FK], [w_FK], kept, floor=floor)[0] for s_FK, w_FK, kept in layers]
    return best_within(scores, ranking.dense, budget, floor=ranking.floor)


def _masks_of_blend(ranking: Ranking, budget: int, advance: Advance) -> tuple[list[Tensor], BlendChoice]:
    """The masks of the best blend; weights that an earlier cut pruned rank last in every candidate."""
    tiny, blend = torch.finfo(numerics.SCORE_DTYPE).tiny, ranking.blend
    assert blend is not None
    if ranking.alive:  # a row with fewer weights left than an even share would get pruned ones back
        blend = replace(blend, wanda_scores=None)

    def masks_for(scores: Sequence[Tensor], by_rows: bool) -> list[Tensor]:
        if ranking.alive:
            pairs = zip(ranking.scores, scores)
            scores = [torch.where(rank_FK > 0, score_FK.clamp(min=tiny), 0.0) for rank_FK, score_FK in pairs]
        return _masks(ranking, "row" if by_rows else "global", scores, budget)

    return pruning.choose_blend(ranking.model, ranking.weights, ranking.dense, blend, masks_for, advance)


def measured_change(ranking: Ranking, network_cut: Cut, task: ScoringTask) -> OutputChange | None:
    """How far the cut moves the output on a few calibration points; None without data or real numbers in the output.

    A blend has measured this on the held-back points; otherwise both networks run once on at most 32 points.
    """
    choice = network_cut.choice
    if choice is not None:
        moved = OutputChange(choice.taken.error, choice.n_inputs, is_held_back=choice.is_held_back)
        return moved if choice.n_inputs else None
    sample = ranking.sample
    if sample is None and task.data is not None and task.data.can_be_read_again:
        sample = next(task.data.batches(N_SAMPLE)).at(slice(N_SAMPLE))
    if sample is None:
        return None
    error = outputs.output_error(ranking.model, network_cut.model, [sample])
    return None if error is None else OutputChange(error, sample.n_points, is_held_back=False)
