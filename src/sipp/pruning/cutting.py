"""A ranking and a budget in, sparse rows out, and the network that has them (T5-T10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sipp.allocation import (
    Posed,
    allocate_posed,
    best_of_rows,
    even_layers,
    even_rows,
    largest,
    largest_above_floor,
    largest_in_groups,
    least_of_layers,
    order_of,
    pose,
)
from sipp.allocation.row_bounds import largest_in_rows
from sipp.numerics import SCORE_DTYPE
from sipp.pruning.blending import Blend, Choice, choose
from sipp.pruning.result import Ranking
from sipp.pruning.sparse_rows import RowMethod, SparseRows, det_rows, given_rows, sparsify_layers
from sipp.records import from_rows, to_rows
from sipp.scoring.methods import MethodRow, method_of

ROW_METHODS: dict[str, RowMethod] = {"sampled": "rand", "hybrid": "hybrid"}  # how rows that are sampled are made


@dataclass(frozen=True)
class Uncut:
    """What all budgets share: the weights before pruning (F x K, on the CPU), and what is worth preparing for many."""

    dense: list[Tensor]
    order: Tensor | None  # of the scores
    posed: Posed | None  # OptAlloc without its budget, for the methods that sample


def before_cut(ranking: Ranking, *, n_cuts: int = 1) -> Uncut:
    """The weights of a ranking, ready for this many budgets. Rows do not depend on the number."""
    dense = [to_rows(w, ranking.model.get_parameter(w.name).detach()).cpu() for w in ranking.weights]
    cut = method_of(ranking.method).cut if ranking.method != "given" else "global"
    is_sampled = cut in ROW_METHODS
    is_ordered = n_cuts > 1 and cut == "global" and ranking.floor is None and ranking.blend is None
    order = order_of(ranking.ranks) if is_ordered else None
    return Uncut(dense, order, _pose(ranking) if n_cuts > 1 and is_sampled else None)


def _pose(ranking: Ranking) -> Posed:
    assert ranking.scores is not None
    return pose(
        ranking.ranks,
        n_outputs=ranking.scores.n_outputs,
        delta=ranking.delta,
        c_constant=ranking.constants.c_constant,
    )


def sparse_rows(ranking: Ranking, uncut: Uncut, budget: int, *, seed: int) -> tuple[list[SparseRows], Choice | None]:
    """Budget (T10), then rows (T5, T6, T8, T9). Without sampling: the largest scores, values unchanged.

    For a blend also which one was taken (T20).
    """
    row, choice = method_of(ranking.method), None
    if row.is_sampled and budget < ranking.n_weights:
        return _sampled_rows(ranking, uncut, row, budget, seed), None
    if ranking.blend is not None:
        masks, choice = _blended(ranking, ranking.blend, uncut, row, budget)
    else:
        masks = _masks(ranking, uncut, row, ranking.ranks, budget)
    scored = ranking.ranks if row.is_scored and not row.is_sampled and not row.is_blend else None
    return [masked_rows(ranking, i, *layer, scored) for i, layer in enumerate(zip(uncut.dense, masks))], choice


def _masks(ranking: Ranking, uncut: Uncut, row: MethodRow, scores: Sequence[Tensor], budget: int) -> list[Tensor]:
    """The weights to keep: the largest scores of all, of each layer or of each row, with the floor asked for.

    With a pattern: those of each group, which leaves every row and layer an even share of its own.
    """
    if ranking.pattern is not None:
        return [largest_in_groups(score_FK, ranking.pattern) for score_FK in scores]
    shapes, least = [rank_FK.shape for rank_FK in scores], 0 if ranking.floor is None else 1
    if row.cut == "row":
        return [largest_in_rows(*layer) for layer in zip(scores, even_rows(shapes, budget, least=least))]
    if row.cut == "layer":
        layers = zip(scores, uncut.dense, even_layers(shapes, budget, least=least))
        if ranking.floor is not None:
            return [largest_above_floor([s_FK], [w_FK], kept, share=0.0)[0] for s_FK, w_FK, kept in layers]
        return [largest([rank_FK], kept)[0] for rank_FK, _, kept in layers]
    if ranking.floor is not None:
        return largest_above_floor(scores, uncut.dense, budget, share=ranking.floor)
    return largest(scores, budget, order=uncut.order)


def _blended(ranking: Ranking, blend: Blend, uncut: Uncut, row: MethodRow, budget: int) -> tuple[list[Tensor], Choice]:
    """The masks of the best blend; weights that an earlier step pruned come last in every one of them."""
    tiny = torch.finfo(SCORE_DTYPE).tiny
    if ranking.is_thinned:  # a row may have fewer weights left than an even share, and would get others back
        blend = replace(blend, lengths=None)

    def cut(scores: Sequence[Tensor], by_rows: bool) -> list[Tensor]:
        if ranking.is_thinned:
            pairs = zip(ranking.ranks, scores)
            scores = [torch.where(rank_FK > 0, score_FK.clamp(min=tiny), 0.0) for rank_FK, score_FK in pairs]
        return _masks(ranking, uncut, replace(row, cut="row") if by_rows else row, scores, budget)

    return choose(ranking.model, ranking.weights, uncut.dense, blend, cut)


def _sampled_rows(ranking: Ranking, uncut: Uncut, row: MethodRow, budget: int, seed: int) -> list[SparseRows]:
    assert ranking.scores is not None
    generator = torch.Generator().manual_seed(seed)
    posed, least, layer_least = uncut.posed or _pose(ranking), 0, [0] * len(uncut.dense)
    blind = [torch.zeros(rank_FK.shape, dtype=torch.bool, device="cpu") for rank_FK in ranking.ranks]
    if ranking.floor is not None:
        least, layer_least = 1, least_of_layers(ranking.ranks, budget, ranking.floor)
        found = [_blind_rows(*layer) for layer in zip(ranking.ranks, uncut.dense)]
        if (
            sum(int(mask_FK.sum()) for mask_FK in found) + int((posed.caps_R > 0).sum()) <= budget
        ):  # else they come last
            blind = found
    n_blind = [int(mask_FK.sum()) for mask_FK in blind]
    layer_least = [max(0, limit - n) for limit, n in zip(layer_least, n_blind)]
    rows = sparsify_layers(
        uncut.dense,
        ranking.ranks,
        allocate_posed(posed, budget - sum(n_blind), generator=generator, least=least, layer_least=layer_least),
        method=ROW_METHODS[row.cut],
        draws=ranking.draws,
        n_outputs=ranking.scores.n_outputs,
        delta=ranking.delta,
        c_constant=ranking.constants.c_constant,
        generator=generator,
    )
    return [_with_blind(*layer) if n else layer[0] for n, layer in zip(n_blind, zip(rows, blind, uncut.dense))]


def _blind_rows(rank_FK: Tensor, weight_FK: Tensor) -> Tensor:
    """The best weight of each row that has weights and no sensitivity: such a row is never drawn from."""
    can_draw_F = ((rank_FK > 0) & (weight_FK != 0)).any(1)
    return best_of_rows(rank_FK, weight_FK) & ~can_draw_F[:, None]


def _with_blind(rows: SparseRows, blind_FK: Tensor, weight_FK: Tensor) -> SparseRows:
    """The rows with these weights too, as they were; the rows they are in lose nothing that was seen (T5)."""
    values_FK = torch.where(blind_FK, weight_FK, rows.values_FK)
    return replace(rows, values_FK=values_FK, mask_FK=rows.mask_FK | blind_FK)


def masked_rows(
    ranking: Ranking, i: int, weight_FK: Tensor, mask_FK: Tensor, scored: Sequence[Tensor] | None
) -> SparseRows:
    """The weights of layer i under a mask, unchanged, with the bound of T5 or T17 where there are sensitivities."""
    c_constant = ranking.constants.c_constant
    if scored is not None:
        return det_rows(weight_FK, scored[i], mask_FK, c_constant=c_constant)
    if ranking.scores is None:
        values_FK = torch.where(mask_FK, weight_FK, 0.0)
        return given_rows(weight_FK, values_FK, mask_FK, None, c_constant=c_constant)
    return det_rows(weight_FK, ranking.scores.layers[i].sensitivity_FK.cpu(), mask_FK, c_constant=c_constant)


def write_rows(model: nn.Module, ranking: Ranking, rows: Sequence[SparseRows]) -> None:
    """Puts the rows' values into the parameters of a copy of the ranked model."""
    with torch.no_grad():
        for weight, row in zip(ranking.weights, rows):
            parameter = model.get_parameter(weight.name)
            parameter.copy_(from_rows(weight, row.values_FK.to(parameter.dtype), parameter))


def masks_by_name(model: nn.Module, ranking: Ranking, rows: Sequence[SparseRows]) -> dict[str, Tensor]:
    """{parameter name: bool tensor of its shape}, True = kept."""
    masks = {}
    for weight, row in zip(ranking.weights, rows):
        parameter = model.get_parameter(weight.name)
        masks[weight.name] = from_rows(weight, row.mask_FK, parameter).to(parameter.device)
    return masks
