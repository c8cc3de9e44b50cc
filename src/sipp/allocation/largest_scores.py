"""Scores and a budget in, a mask of exactly as many of the largest scores out (T10 for SiPP-det)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sipp.errors import DataError, OptionError

_CHUNK = 2**20  # scores worked on at once
_KEY_BITS = 64
_DIGIT_BITS = 16  # radix selection: four digits


def largest(scores: Sequence[Tensor], budget: int, *, order: Tensor | None = None) -> list[Tensor]:
    """One bool mask a layer, of its shape: the `budget` largest scores of all, ties in (layer, row, column) order.

    T10 for SiPP-det: the sum of eps_det over rows is C times the sum of what is left out. Exact, by radix selection,
    or at once from the order of these scores where it is given.
    """
    n_scores = sum(layer.numel() for layer in scores)
    if not 0 <= budget <= n_scores:
        raise OptionError(f"budget={budget} must lie between 0 and the number of weights, {n_scores}", option="budget")
    if order is not None:
        chosen = torch.zeros(n_scores, dtype=torch.bool, device="cpu")
        chosen[order[:budget]] = True
        parts = chosen.split([layer.numel() for layer in scores])
        return [part.view(layer.shape).to(layer.device) for part, layer in zip(parts, scores)]
    check_scores(scores)
    if budget == 0 or budget == n_scores:
        return [torch.full(layer.shape, budget > 0, dtype=torch.bool, device=layer.device) for layer in scores]
    threshold, n_ties = _select(scores, budget)
    masks = []
    for layer in scores:
        mask = torch.empty(layer.numel(), dtype=torch.bool, device=layer.device)
        for part, keys in _keys(layer):
            tied = keys == threshold
            n_tied = int(tied.sum())
            if n_tied > n_ties:
                tied &= tied.cumsum(0) <= n_ties
            n_ties -= min(n_tied, n_ties)
            mask[part] = (keys > threshold) | tied
        masks.append(mask.view(layer.shape))
    return masks


def order_of(scores: Sequence[Tensor]) -> Tensor:
    """Where the scores of all layers, laid end to end, stand from the largest to the smallest, ties in their order.

    One sorting serves any number of budgets; for a single one, `largest` without it takes less time and memory.
    """
    check_scores(scores)
    flat = [(layer.detach().cpu().to(torch.float64) + 0.0).flatten().numpy() for layer in scores]
    return torch.from_numpy(np.argsort(-np.concatenate(flat or [np.zeros(0)]), kind="stable"))


def check_scores(scores: Sequence[Tensor]) -> None:
    """Refuses scores that have no order."""
    for index, layer in enumerate(scores):
        if not layer.is_floating_point() or bool(layer.isnan().any()):
            raise DataError(f"scores of layer {index} hold NaN or are not floating point ({layer.dtype})")


def _select(scores: Sequence[Tensor], rank: int) -> tuple[int, int]:
    """The key of the score of this rank (1 = largest), and how many scores of that key belong to the first `rank`."""
    if sum(layer.numel() for layer in scores) <= _CHUNK:  # at once; the counts of all digits would be more work
        every = np.concatenate([keys.cpu().numpy() for layer in scores for _, keys in _keys(layer)])
        threshold = np.partition(every, len(every) - rank)[len(every) - rank]
        return int(threshold), rank - int((every > threshold).sum())
    prefix = 0
    n_digits = 1 << _DIGIT_BITS
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        is_top = shift == _KEY_BITS - _DIGIT_BITS
        counts = torch.zeros(n_digits, dtype=torch.int64, device="cpu")
        for layer in scores:
            for _, keys in _keys(layer):
                if not is_top:
                    keys = keys[(keys >> (shift + _DIGIT_BITS)) == prefix]
                digits = ((keys >> shift) + n_digits // 2) if is_top else ((keys >> shift) & (n_digits - 1))
                counts += torch.bincount(digits, minlength=n_digits).cpu()
        at_least = counts.flip(0).cumsum(0).flip(0)  # scores (of this prefix) with this digit or a larger one
        digit = int((at_least >= rank).sum()) - 1
        rank -= int(at_least[digit] - counts[digit])
        prefix = digit - n_digits // 2 if is_top else (prefix << _DIGIT_BITS) + digit
    return prefix, rank


def _keys(layer: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of the flattened layer as int64 keys in the order of the scores; -0.0 equals 0.0."""
    flat = layer.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        bits = (flat[part].to(torch.float64) + 0.0).view(torch.int64)
        yield part, bits ^ ((bits >> (_KEY_BITS - 1)) & torch.iinfo(torch.int64).max)
