"""Cuts a ranked network to a budget (T5-T10), and measures how far its output moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import OptionError
from sipp.inputs import Weight, copy_of, from_rows, output_error, points_at, to_rows
from sipp.progress import Advance, nothing
from sipp.pruning.blending import choose_blend
from sipp.pruning.budgets import AllocationProblem
from sipp.pruning.largest_scores import (
    even_layers,
    even_rows,
    largest,
    largest_above_floor,
    largest_in_groups,
    largest_in_rows,
    sorted_scores,
)
from sipp.pruning.ranked import BlendInputs, Ranking
from sipp.pruning.ranking import N_SAMPLE
from sipp.pruning.sampling import problem_of, sampled_rows
from sipp.pruning.sparse_rows import SparseRows, given_rows, masked_rows
from sipp.results import BlendChoice, OutputChange, PruneOptions, check, hashing, numerics, pattern_of
from sipp.scoring import CutRule, ScoringTask, method_of


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
        return sum(weight.n_rows * pattern_of(options.pattern).kept(weight.fan_in) for weight in weights)
    if options.keep is not None:
        return numerics.budget_of(options.keep, n_weights)
    return check.whole("budget", options.budget, least=1, most=n_weights)  # all prunable weights


def cut(ranking: Ranking, budget: int, *, seed: int = 0, advance: Advance = nothing) -> Cut:
    """The network pruned to `budget` weights. The same ranking, budget and seed give the same bits."""
    prepared = prepare_rows(ranking)
    rows, choice = cut_rows(ranking, prepared, budget, seed=seed, advance=advance)
    model = copy_of(ranking.model)
    write_rows(model, ranking, rows)
    return Cut(
        model=model,
        masks=masks_by_name(model, ranking, rows),
        rows=tuple(rows),
        dense=tuple(prepared.dense),
        budget=budget,
        seed=seed,
        choice=choice,
    )


def cut_as_given(
    ranking: Ranking,
    given: nn.Module,
    masks: Mapping[str, Tensor],
    *,
    seed: int = 0,
    budget: int | None = None,
    choice: BlendChoice | None = None,
) -> Cut:
    """The rows of a network that was pruned, repaired or trained by any means, with the bound of T17.

    A weight without a mask is kept where it is not 0. Without a `budget`, what is kept counts as asked for.
    """
    dense, rows, all_masks = _dense_rows(ranking), list[SparseRows](), dict[str, Tensor]()
    for weight, dense_FK, sensitivity_FK in zip(ranking.weights, dense, _sensitivities(ranking)):
        parameter = given.get_parameter(weight.name).detach()
        all_masks[weight.name] = masks[weight.name].bool() if weight.name in masks else parameter != 0
        values_FK, mask_FK = (to_rows(weight, tensor).cpu() for tensor in (parameter, all_masks[weight.name]))
        c_constant = ranking.options.c_constant
        rows.append(given_rows(dense_FK, values_FK, mask_FK, sensitivity_FK, c_constant=c_constant))
    if budget is None:
        budget = sum(int(row.mask_FK.sum()) for row in rows)
    others = _other_differences(ranking, given)
    return Cut(
        model=given,
        masks=all_masks,
        rows=tuple(rows),
        dense=tuple(dense),
        budget=budget,
        seed=seed,
        choice=choice,
        others=others,
    )


def _other_differences(ranking: Ranking, given: nn.Module) -> tuple[str, ...]:
    """Names of tensors that differ but are no prunable weight: bounds do not cover them."""
    chosen = {name for weight in ranking.weights for name in (weight.name, *weight.aliases)}
    ours, theirs = hashing.tensors(ranking.model), hashing.tensors(given)
    return tuple(
        name for name, value in ours.items() if name not in chosen and not torch.equal(value, theirs[name].to(value))
    )


def output_change(ranking: Ranking, network_cut: Cut, task: ScoringTask) -> OutputChange | None:
    """How far the cut moves the output on a few calibration points; None without data or real numbers in the output.

    A blend has measured this on the held-back points; otherwise both networks run once on at most 32 points.
    """
    choice = network_cut.choice
    if choice is not None:
        moved = OutputChange(choice.taken.error, choice.n_inputs, is_held_back=choice.is_held_back)
        return moved if choice.n_inputs else None
    sample = ranking.sample
    if sample is None and task.data is not None and task.data.can_be_read_again:
        sample = points_at(next(task.data.batches(N_SAMPLE)), slice(N_SAMPLE))
    if sample is None:
        return None
    error = output_error(ranking.model, network_cut.model, [sample])
    return None if error is None else OutputChange(error, sample.n_points, is_held_back=False)


def dead_rows(dense_FK: Tensor, left_FK: Tensor) -> int:
    """How many rows had weights and have none now; `left_FK` are the values that are left, or their mask."""
    return int(((dense_FK != 0).any(1) & ~((left_FK != 0).any(1))).sum())


@dataclass(frozen=True)
class PreparedRows:
    """What cuts to several budgets share."""

    dense: list[Tensor]  # F x K, on the CPU
    ascending: np.ndarray | None  # all scores, sorted, if all are compared with each other
    problem: AllocationProblem | None  # OptAlloc without its budget, for the methods that sample


def prepare_rows(ranking: Ranking, *, many_budgets: bool = False) -> PreparedRows:
    """Prepares a ranking to be cut; for many budgets, scores are sorted. The result of a cut does not depend on it."""
    info, dense, ascending, problem = method_of(ranking.options.method), _dense_rows(ranking), None, None
    if many_budgets and info.cut == "global" and ranking.floor is None and ranking.blend is None:
        ascending = sorted_scores(ranking.scores)
    if info.is_sampled:
        problem = problem_of(ranking, dense)
    return PreparedRows(dense, ascending, problem)


def _dense_rows(ranking: Ranking) -> list[Tensor]:
    return [to_rows(weight, ranking.model.get_parameter(weight.name).detach()).cpu() for weight in ranking.weights]


def _sensitivities(ranking: Ranking) -> Iterator[Tensor | None]:
    """F x K per weight, on the CPU, one after the other; None for each if there are none."""
    for i in range(len(ranking.weights)):
        yield None if ranking.sensitivities is None else ranking.sensitivities.layers[i].sensitivity_FK.cpu()


def cut_rows(
    ranking: Ranking, prepared: PreparedRows, budget: int, *, seed: int, advance: Advance = nothing
) -> tuple[list[SparseRows], BlendChoice | None]:
    """The sparse rows of every layer at this budget (T5, T6, T8-T10), and the choice of a blend (T20).

    Without sampling, the largest scores stay with their values. `advance` is called for each candidate of a blend.
    """
    info, choice = method_of(ranking.options.method), None
    if prepared.problem is not None and budget < ranking.n_weights:
        rows = sampled_rows(ranking, prepared.dense, prepared.problem, budget, seed=seed)
    else:
        if ranking.blend is not None:
            masks, choice = _masks_of_blend(ranking, ranking.blend, prepared, budget, advance)
        else:
            masks = _masks(ranking, prepared, info.cut, ranking.scores, budget)
        c_constant = ranking.options.c_constant
        layers = zip(prepared.dense, masks, _sensitivities(ranking))
        rows = [masked_rows(*layer, c_constant=c_constant) for layer in layers]
    return rows, choice


def _masks(
    ranking: Ranking, prepared: PreparedRows, among: CutRule, scores: Sequence[Tensor], budget: int
) -> list[Tensor]:
    """The weights to keep: the largest scores of the network, of each layer or of each row, above the floor.

    With an n:m pattern, the largest of each group.
    """
    if ranking.pattern is not None:
        return [largest_in_groups(score_FK, ranking.pattern) for score_FK in scores]
    shapes, least = [rank_FK.shape for rank_FK in scores], 0 if ranking.floor is None else 1
    if among == "row":
        return [largest_in_rows(*layer) for layer in zip(scores, even_rows(shapes, budget, least=least))]
    if among == "layer":
        layers = zip(scores, prepared.dense, even_layers(shapes, budget, least=least))
        if ranking.floor is not None:
            return [largest_above_floor([s_FK], [w_FK], kept, share=0.0)[0] for s_FK, w_FK, kept in layers]
        return [largest([rank_FK], kept)[0] for rank_FK, _, kept in layers]
    if ranking.floor is not None:
        return largest_above_floor(scores, prepared.dense, budget, share=ranking.floor)
    return largest(scores, budget, ascending=prepared.ascending)


def _masks_of_blend(
    ranking: Ranking, blend: BlendInputs, prepared: PreparedRows, budget: int, advance: Advance
) -> tuple[list[Tensor], BlendChoice]:
    """The masks of the best blend; weights that an earlier cut pruned rank last in every candidate."""
    tiny = torch.finfo(numerics.SCORE_DTYPE).tiny
    if ranking.is_thinned:  # a row with fewer weights left than an even share would get pruned ones back
        blend = replace(blend, wanda_scores=None)

    def masks_for(scores: Sequence[Tensor], by_rows: bool) -> list[Tensor]:
        if ranking.is_thinned:
            pairs = zip(ranking.scores, scores)
            scores = [torch.where(rank_FK > 0, score_FK.clamp(min=tiny), 0.0) for rank_FK, score_FK in pairs]
        return _masks(ranking, prepared, "row" if by_rows else "global", scores, budget)

    return choose_blend(ranking.model, ranking.weights, prepared.dense, blend, masks_for, advance)


def write_rows(model: nn.Module, ranking: Ranking, rows: Sequence[SparseRows]) -> None:
    """Writes the values of sparse rows into the parameters of a model."""
    with torch.no_grad():
        for weight, sparse in zip(ranking.weights, rows):
            parameter = model.get_parameter(weight.name)
            parameter.copy_(from_rows(weight, sparse.values_FK.to(parameter.dtype), parameter))


def masks_by_name(model: nn.Module, ranking: Ranking, rows: Sequence[SparseRows]) -> dict[str, Tensor]:
    """{parameter name: bool tensor of its shape}, True = kept."""
    masks = {}
    for weight, sparse in zip(ranking.weights, rows):
        parameter = model.get_parameter(weight.name)
        masks[weight.name] = from_rows(weight, sparse.mask_FK, parameter).to(parameter.device)
    return masks
