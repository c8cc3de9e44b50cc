"""How many weights each layer keeps while mask and weights are searched: half way between the first masks and even."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from sipp.inputs import Weight, from_rows, to_rows
from sipp.pruning import even_layers, largest, largest_above_floor
from sipp.repairing.walk import Masks, NetworkTask
from sipp.results import Budgets, numerics

SAME_BUDGET = 0.01  # relative: closer budgets count as the same, and the first masks stay


def masks_between(task: NetworkTask, masks: Masks, floor: float | None) -> tuple[dict[str, Tensor], Budgets]:
    """The masks to begin a search with, of as many weights as the given ones, and the name of their budgets.

    Each layer keeps the geometric mean of what its mask keeps and of an even share, in its largest weights. A score of
    the whole network may leave a layer too little to be repaired, and even shares forget what the score knows. In a
    network that is sparse already, a layer's share refers to the weights it has left.
    """
    weights = [weight for name, weight in task.weights.items() if name in masks]
    counts = [int(masks[weight.name].sum()) for weight in weights]
    left = [int(task.dense.get_parameter(weight.name).detach().count_nonzero()) for weight in weights]
    shapes = _shapes_left(weights, left, sum(counts))
    shares = _geometric_means(counts, even_layers(shapes, sum(counts), least=0 if floor is None else 1), shapes)
    if all(abs(share - count) <= SAME_BUDGET * count for share, count in zip(shares, counts)):
        return dict(masks), "given"
    found = {}
    for weight, n_kept in zip(weights, shares):
        size_FK = to_rows(weight, task.dense.get_parameter(weight.name).detach()).cpu().abs().to(numerics.SCORE_DTYPE)
        if floor is None:
            (mask_FK,) = largest([size_FK], n_kept)
        else:
            (mask_FK,) = largest_above_floor([size_FK], [size_FK], n_kept, share=0.0)
        given = masks[weight.name]
        found[weight.name] = from_rows(weight, mask_FK, given).to(given.device)
    return found, "between"


def _shapes_left(weights: Sequence[Weight], left: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Rows and columns of each weight; a weight with zeros counts as one row of the others, if they are enough."""
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
