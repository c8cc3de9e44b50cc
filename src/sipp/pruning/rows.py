"""Which weights of a layer's rows stay, and the bound on the relative error of what is left (T5, T10, T17).

`best_within` compares all layers, and exactly as many weights as the budget says stay (T10 for SiPP-det), perhaps with
a minimum for every row and layer; `largest_in_rows` works within rows (`even_rows` gives them the same share);
`largest_in_groups` keeps n of every m consecutive weights of a row. A row is that of the weight as a matrix in torch's
storage order: (out, in) of a linear layer, (out, in x height x width) of a convolution. All of it is on the CPU.

A bound is about one quadrant of one row: |z^ - z| <= eps * z, where the ES inequality (T4) holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sipp.errors import DataError, OptionError
from sipp.native import threads
from sipp.results import Pattern, numerics

DET = 0  # the most sensitive weights, unchanged (T5)
RAND = 1  # a re-weighted sample (T6, T8)
WHOLE = 2  # nothing of positive sensitivity was lost
STRATEGIES = {DET: "det", RAND: "rand", WHOLE: "whole"}

CHUNK = 2**17  # weights worked on at once: their float64 temporaries stay in a core's cache


@dataclass(frozen=True)
class SparseRows:
    """The rows of one weight after pruning."""

    values_FK: Tensor
    mask_FK: Tensor
    # int8: DET, RAND or WHOLE, of the row (S = 1) or of its weights of each sign (S = 2); S = 0 for given values
    strategy_FS: Tensor
    eps_F: Tensor  # float64, the bound of T5, T6 or T9

    @property
    def is_sampled(self) -> bool:
        return bool((self.strategy_FS == RAND).any())

    @property
    def strategies(self) -> dict[str, int]:
        """How many rows, or weights of one sign of a row, were cut in which way."""
        cut_FS = self.strategy_FS
        return {name: int((cut_FS == code).sum()) for code, name in STRATEGIES.items()} if cut_FS.numel() else {}

    def eps_by_values(self, weight_FK: Tensor, sensitivity_FK: Tensor, *, c_constant: float) -> Tensor:
        """The bound of each row from its new values alone (T17), F float64."""
        return eps_given(weight_FK, self.values_FK, sensitivity_FK, c_constant=c_constant)


def given_rows(
    weight_FK: Tensor, values_FK: Tensor, mask_FK: Tensor, sensitivity_FK: Tensor | None, *, c_constant: float
) -> SparseRows:
    """Rows with given values, however they were found, with the bound of T17.

    Without sensitivities the bound is 0 for a row that did not change, and infinite otherwise.
    """
    if sensitivity_FK is None:
        eps_F = torch.where((values_FK == weight_FK).all(1), 0.0, math.inf).to(numerics.BOUND_DTYPE)
    else:
        eps_F = eps_given(weight_FK, values_FK, sensitivity_FK, c_constant=c_constant)
    return SparseRows(values_FK, mask_FK, torch.empty(len(eps_F), 0, dtype=torch.int8, device="cpu"), eps_F)


def masked_rows(weight_FK: Tensor, mask_FK: Tensor, sensitivity_FK: Tensor | None, *, c_constant: float) -> SparseRows:
    """Rows with the masked weights unchanged, however the mask was chosen (T5, T17 with r_j = 0 or 1)."""
    values_FK = torch.where(mask_FK, weight_FK, 0.0)
    if sensitivity_FK is None:
        return given_rows(weight_FK, values_FK, mask_FK, None, c_constant=c_constant)
    eps_F = c_constant * tail_sum(torch.where(weight_FK != 0, sensitivity_FK, 0.0), mask_FK)
    strategy_F1 = torch.where(eps_F == 0, WHOLE, DET).to(torch.int8)[:, None]
    return SparseRows(values_FK, mask_FK, strategy_F1, eps_F)


def with_restored(rows: SparseRows, restored_FK: Tensor, weight_FK: Tensor) -> SparseRows:
    """The rows with these weights restored to their dense values."""
    values_FK = torch.where(restored_FK, weight_FK, rows.values_FK)
    return replace(rows, values_FK=values_FK, mask_FK=rows.mask_FK | restored_FK)


def eps_given(weight_FK: Tensor, values_FK: Tensor, sensitivity_FK: Tensor, *, c_constant: float) -> Tensor:
    """T17, F float64: C times the sum of |1 - r_j| s_j for rows whose weights w_j became r_j w_j, however chosen.

    With r_j = 0 for removed and 1 for kept weights this is T5. Infinite if a weight was 0 and no longer is, or is NaN:
    then there is no r_j.
    """
    sums = [torch.zeros(0, dtype=numerics.BOUND_DTYPE, device="cpu")]
    for rows in row_chunks(*weight_FK.shape):
        weight, values = weight_FK[rows].to(numerics.BOUND_DTYPE), values_FK[rows].to(numerics.BOUND_DTYPE)
        changed = torch.where(values == weight, 0.0, (1.0 - values / weight).abs())  # infinite or NaN: no r_j
        lost = torch.where(changed < torch.inf, changed * sensitivity_FK[rows].to(numerics.BOUND_DTYPE), torch.inf)
        sums.append(lost.sum(1))
    return c_constant * torch.cat(sums)


def tail_sum(sensitivity_FK: Tensor, mask_FK: Tensor) -> Tensor:
    """F float64: the sum of the entries outside the mask, computed directly, not as a difference of sums."""
    sums = [torch.zeros(0, dtype=numerics.BOUND_DTYPE, device="cpu")]
    for rows in row_chunks(*sensitivity_FK.shape):
        sums.append(sensitivity_FK[rows].to(numerics.BOUND_DTYPE).masked_fill(mask_FK[rows], 0.0).sum(1))
    return torch.cat(sums)


def row_chunks(n_rows: int, fan_in: int) -> Iterator[slice]:
    """Slices of a bounded number of weights, at least a row, that cover a matrix."""
    step = max(1, CHUNK // max(1, fan_in))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))


# --- Which weights stay -----------------------------------------------------------------------------------------------


def largest(scores: Sequence[Tensor], budget: int) -> list[Tensor]:
    """One bool mask per layer: the `budget` largest scores of all layers, ties in (layer, row, column) order.

    T10 for SiPP-det: the sum of eps_det over rows is C times the sum of the scores left out.
    """
    n_scores = sum(layer.numel() for layer in scores)
    if not 0 <= budget <= n_scores:
        raise OptionError(f"budget={budget} must lie between 0 and the number of weights, {n_scores}", option="budget")
    check_scores(scores)
    if budget == 0 or budget == n_scores:
        return [torch.full(layer.shape, budget > 0, dtype=torch.bool, device=layer.device) for layer in scores]
    # in a dtype that NumPy knows and that holds every score exactly
    dtype = torch.float64 if any(layer.dtype == torch.float64 for layer in scores) else torch.float32
    flat = [layer.detach().flatten().to(dtype) for layer in scores]
    ascending = torch.cat([layer.cpu() for layer in flat]).numpy()
    ascending.partition(n_scores - budget)
    threshold = float(ascending[n_scores - budget])
    n_ties = budget - int((ascending[n_scores - budget :] > threshold).sum())
    masks = []
    for layer, values in zip(scores, flat):
        mask = values > threshold
        tied = (values == threshold).nonzero()[:n_ties, 0]
        mask[tied] = True
        n_ties -= len(tied)
        masks.append(mask.view(layer.shape))
    return masks


def check_scores(scores: Sequence[Tensor]) -> None:
    """Raises a DataError for scores that are NaN or not floating point."""
    for index, layer in enumerate(scores):
        if not layer.is_floating_point() or bool(layer.isnan().any()):
            raise DataError(f"scores of layer {index} contain NaN or are not floating point ({layer.dtype})")


def best_within(
    scores: Sequence[Tensor],
    weights: Sequence[Tensor],
    budget: int,
    *,
    floor: float | None,
    alive: Sequence[Tensor] = (),
) -> list[Tensor]:
    """One bool mask per layer: exactly `budget` weights, the largest scores, above a floor if there is one.

    T10 with lower limits: with a floor, every row that has a weight keeps its best one, and every layer keeps at least
    this share of an even cut. If the budget is too small for both, rows come first; if it is too small for all rows,
    those with the best weights do.
    """
    if floor is None:
        return largest(scores, budget)
    best = [best_in_each_row(layer_FK, weight_FK) for layer_FK, weight_FK in zip(scores, weights)]
    limits = minimum_of_layers(scores, budget, floor, alive)
    forced = [best_FK | largest([layer_FK], limit)[0] for layer_FK, best_FK, limit in zip(scores, best, limits)]
    if _count(forced) > budget:  # the best weights of rows also count towards the floor of their layer
        forced = [
            largest([torch.where(b, torch.inf, s)], max(limit, int(b.sum())))[0]
            for s, b, limit in zip(scores, best, limits)
        ]
    if _count(forced) > budget:
        forced = best
    if _count(forced) > budget:
        return largest([torch.where(f, s, -torch.inf) for f, s in zip(forced, scores)], budget)
    return largest([torch.where(f, torch.inf, s) for f, s in zip(forced, scores)], budget)


def minimum_of_layers(scores: Sequence[Tensor], budget: int, share: float, alive: Sequence[Tensor] = ()) -> list[int]:
    """The minimum number of weights of each layer: this share of an even cut, or what an earlier pruning left of it."""
    n_weights = sum(layer.numel() for layer in scores)
    n_left = [int(mask.sum()) for mask in alive] or [layer.numel() for layer in scores]
    return [min(left, int(share * budget * layer.numel() / n_weights)) for layer, left in zip(scores, n_left)]


def best_in_each_row(scores_FK: Tensor, weight_FK: Tensor) -> Tensor:
    """Masks the weight with the largest score in each row (largest magnitude if all scores are 0; never a zero)."""
    magnitude_FK = weight_FK.to(scores_FK.device, numerics.BOUND_DTYPE).abs()
    worth_FK = torch.where(magnitude_FK > 0, scores_FK.to(numerics.BOUND_DTYPE), 0.0)
    is_blind_F = worth_FK.amax(1) <= 0
    column_F = torch.where(is_blind_F, magnitude_FK.argmax(1), worth_FK.argmax(1))
    mask_FK = torch.zeros(scores_FK.shape, dtype=torch.bool, device=scores_FK.device)
    mask_FK.scatter_(1, column_F[:, None], magnitude_FK.amax(1, keepdim=True) > 0)
    return mask_FK


def _count(masks: Sequence[Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def largest_in_rows(values_FK: Tensor, kept_F: Tensor) -> Tensor:
    """F x K bool: the `kept_F` largest values of each row, ties going to the smaller column."""
    rows_FK, kept_F1 = values_FK.detach().cpu().numpy(), kept_F.cpu().numpy()[:, None]
    mask_FK = np.zeros(rows_FK.shape, dtype=bool)
    chunks = list(row_chunks(*rows_FK.shape))
    n_threads = max(1, min(torch.get_num_threads(), len(chunks)))

    def work(thread: int) -> None:
        for rows in chunks[thread::n_threads]:
            mask_FK[rows] = _largest(rows_FK[rows], kept_F1[rows])

    threads.run_parallel(work, n_threads)
    return torch.from_numpy(mask_FK).to(values_FK.device)


def _largest(values_FK: np.ndarray, kept_F1: np.ndarray) -> np.ndarray:
    """The mask of a few rows. NumPy's vectorised sort is many times faster than torch's on a CPU."""
    fan_in = values_FK.shape[1]
    last_F1 = np.clip(fan_in - kept_F1, 0, fan_in - 1)  # position of the m-th largest in ascending order
    threshold_F1 = np.take_along_axis(np.sort(values_FK, axis=1), last_F1, axis=1)
    above_FK, tied_FK = values_FK > threshold_F1, values_FK == threshold_F1
    room_F1 = kept_F1 - above_FK.sum(1, keepdims=True)
    if not np.array_equal(room_F1, tied_FK.sum(1, keepdims=True)):  # more of the threshold's value than there is room
        tied_FK &= tied_FK.cumsum(1) <= room_F1
    return (above_FK & (kept_F1 > 0)) | tied_FK


def even_rows(shapes: Sequence[tuple[int, ...]], budget: int, *, least: int = 0) -> list[Tensor]:
    """How many weights each row of each F x K layer keeps: the same share of every row, rounded.

    No row gets fewer than `least`, as far as the budget allows.
    """
    fan_ins = torch.cat([torch.full((n_rows,), fan_in, dtype=torch.int64, device="cpu") for n_rows, fan_in in shapes])
    return list(_even(fan_ins, fan_ins.clamp(max=least), budget).split([n_rows for n_rows, _ in shapes]))


def even_layers(shapes: Sequence[tuple[int, ...]], budget: int, *, least: int = 0) -> list[int]:
    """How many weights each F x K layer keeps: the same share of every layer, rounded.

    No layer gets fewer than `least` per row, as far as the budget allows.
    """
    table = torch.tensor([tuple(shape) for shape in shapes], dtype=torch.int64, device="cpu").view(-1, 2)
    n_rows, fan_ins = table.unbind(1)
    kept: list[int] = _even(n_rows * fan_ins, n_rows * fan_ins.clamp(max=least), budget).tolist()
    return kept


def _even(sizes: Tensor, limits: Tensor, budget: int) -> Tensor:
    """Splits the budget in proportion to the sizes, rounded, none below its limit if the budget allows that.

    Rounding at one common share (Webster's method) is monotone: with a smaller budget nobody gets more, so that pruning
    again only removes weights. Ties at the same share are rounded up from the first on.
    """
    n_weights = int(sizes.sum())
    if not 0 <= budget <= n_weights:
        raise OptionError(f"budget={budget} must lie between 0 and the number of weights, {n_weights}", option="budget")
    if int(limits.sum()) > budget:
        limits = torch.zeros_like(sizes)
    low, high = 0.0, 2.0  # shares at which too few, and enough, are kept: at 2 all are
    while (middle := (low + high) / 2) not in (low, high):
        if int(_rounded(sizes, limits, middle).sum()) < budget:
            low = middle
        else:
            high = middle
    kept, most = _rounded(sizes, limits, low), _rounded(sizes, limits, high)
    waiting = (most > kept).nonzero().flatten()
    kept[waiting[: budget - int(kept.sum())]] += 1
    return kept


def _rounded(sizes: Tensor, limits: Tensor, share: float) -> Tensor:
    whole = torch.floor(sizes.to(torch.float64) * share + 0.5).to(torch.int64)
    return torch.minimum(torch.maximum(whole, limits), sizes)


def largest_in_groups(score_FK: Tensor, pattern: Pattern) -> Tensor:
    """F x K bool: the n largest scores of every group of m, ties going to the smaller column.

    If the fan-in is no multiple of m, the row counts as padded with zeros, as in kernels for such patterns: its last,
    shorter group keeps up to n of its weights.
    """
    check_scores([score_FK])
    n_rows, fan_in = score_FK.shape
    n_groups = -(-fan_in // pattern.m)
    groups_NM = F.pad(score_FK, (0, n_groups * pattern.m - fan_in), value=-torch.inf).reshape(-1, pattern.m)
    kept_FG = torch.full((n_rows, n_groups), pattern.n, dtype=torch.int64, device=score_FK.device)
    if fan_in % pattern.m:
        kept_FG[:, -1] = min(pattern.n, fan_in % pattern.m)
    mask = largest_in_rows(groups_NM, kept_FG.reshape(-1))
    return mask.view(n_rows, n_groups * pattern.m)[:, :fan_in].contiguous()
