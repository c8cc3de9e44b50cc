"""How many weights each layer keeps before a search: first masks of the same total size, by several rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from sipp.allocation.largest_scores import even_layers, largest, largest_above_floor
from sipp.records.numerics import SCORE_DTYPE
from sipp.records.ranking import Weight, from_rows, to_rows
from sipp.records.repair import Budgets

SAME_BUDGET = 0.01  # relative: closer budgets count as the same, and are not tried twice

Masks = Mapping[str, Tensor]


def masks_by_budgets(
    dense: nn.Module, weights: Mapping[str, Weight], masks: Masks, wanted: Sequence[Budgets], floor: float | None
) -> dict[Budgets, dict[str, Tensor]]:
    """First masks for each rule; a rule that gives nearly the same budgets as an earlier one is left out.

    All keep the same number of weights. Except for "given", the largest weights are kept. In a network that is sparse
    already, a layer's share refers to the weights it has left.
    """
    in_order = [weight for name, weight in weights.items() if name in masks]
    counts = [int(masks[weight.name].sum()) for weight in in_order]
    shapes = _shapes_left(in_order, dense, sum(counts))
    even = even_layers(shapes, sum(counts), least=0 if floor is None else 1)
    masks_of: dict[Budgets, dict[str, Tensor]] = {}
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
            masks_of[budgets] = start
    return masks_of


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
