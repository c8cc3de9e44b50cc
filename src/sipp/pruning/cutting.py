"""Cuts a ranked network to a budget (T5-T10).

a Ranking  ->  masks: the largest scores within a budget, or the best of several blends (blending.py)
           ->  or rows that are sampled (T8, sampling.py)
           ->  rows, each with its bound (rows.py)  ->  a Cut: a copy of the network, and its masks by name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sipp.errors import OptionError
from sipp.inputs import Weight, copy_of, outputs
from sipp.progress import Advance, progress_bar
from sipp.pruning.ranking import N_SAMPLE, Ranking
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
    check,
    hashing,
    numerics,
)
from sipp.scoring import ScoringTask, method_of


@dataclass(frozen=True)
class Cut:
    """A pruned copy of a network and its sparse rows, before any statement about them."""

    model: nn.Module
    masks: dict[str, Tensor]
    rows: tuple[SparseRows, ...]
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
    info, choice = method_of(ranking.options.method), None
    n_cuts = None if ranking.blend is None else len(ranking.blend.candidates())  # a blend is chosen among several cuts
    with progress_bar("cutting", n_cuts, shown=progress) as advance:
        if info.is_sampled and budget < ranking.n_weights:
            from sipp.pruning.sampling import sampled_rows  # loaded by methods that draw only

            rows = sampled_rows(ranking, budget, seed=seed)
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
                for i, (dense_FK, mask_FK) in enumerate(zip(ranking.dense, masks))
            ]
    model = copy_of(ranking.model) if into is None else into
    by_name = {}
    with torch.no_grad():
        for weight, row in zip(ranking.weights, rows):
            parameter = model.get_parameter(weight.name)
            parameter.copy_(weight.shaped(row.values_FK.to(parameter.dtype), parameter))
            by_name[weight.name] = weight.shaped(row.mask_FK, parameter).to(parameter.device)
    return Cut(model, by_name, tuple(rows), budget, seed, choice)


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
    return Cut(given, all_masks, tuple(rows), budget, seed, choice, others)


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
    shapes = [rank_FK.shape for rank_FK in scores]
    least = 0 if ranking.floor is None else 1
    if among == "row":
        return [largest_in_rows(*layer) for layer in zip(scores, even_rows(shapes, budget, least=least))]
    if among == "layer":
        floor = None if ranking.floor is None else 0.0
        layers = zip(scores, ranking.dense, even_layers(shapes, budget, least=least))
        return [best_within([s_FK], [w_FK], kept, floor=floor)[0] for s_FK, w_FK, kept in layers]
    return best_within(scores, ranking.dense, budget, floor=ranking.floor, alive=ranking.alive)


def _masks_of_blend(ranking: Ranking, budget: int, advance: Advance) -> tuple[list[Tensor], BlendChoice]:
    """The masks of the best blend; weights that an earlier cut pruned rank last in every candidate."""
    from sipp.pruning.blending import choose_blend

    tiny, blend = torch.finfo(numerics.SCORE_DTYPE).tiny, ranking.blend
    assert blend is not None
    if ranking.alive:  # a row with fewer weights left than an even share would get pruned ones back
        blend = replace(blend, wanda_scores=None)

    def masks_for(scores: Sequence[Tensor], by_rows: bool) -> list[Tensor]:
        if ranking.alive:
            pairs = zip(ranking.scores, scores)
            scores = [torch.where(rank_FK > 0, score_FK.clamp(min=tiny), 0.0) for rank_FK, score_FK in pairs]
        return _masks(ranking, "row" if by_rows else "global", scores, budget)

    return choose_blend(ranking.model, ranking.weights, ranking.dense, blend, masks_for, advance)


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
