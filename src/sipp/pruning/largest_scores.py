"""Selects the weights with the largest scores, exactly as many as the budget says (T10 for SiPP-det).

`largest` compares all layers; `largest_above_floor` also leaves every row and layer a minimum; `largest_in_rows` works
within rows (`even_rows` gives them the same share); `largest_in_groups` keeps n of every m consecutive weights of a
row. A row is that of the weight as a matrix in torch's storage order: (out, in) of a linear layer, (out, in x height x
width) of a convolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sipp.errors import DataError, OptionError
from sipp.native import threads
from sipp.pruning.sparse_rows import row_chunks
from sipp.results import Pattern, numerics


def largest(scores: Sequence[Tensor], budget: int, *, ascending: np.ndarray | None = None) -> list[Tensor]:
    """One bool mask per layer: the `budget` largest scores of all layers, ties in (layer, row, column) order.

    T10 for SiPP-det: the sum of eps_det over rows is C times the sum of the scores left out. `ascending` are the scores
    as `sorted_scores` gives them: with several budgets, one sort is faster than a selection for each.
    """
    n_scores = sum(layer.numel() for layer in scores)
    if not 0 <= budget <= n_scores:
        raise OptionError(f"budget={budget} must lie between 0 and the number of weights, {n_scores}", option="budget")
    check_scores(scores)
    if budget == 0 or budget == n_scores:
        return [torch.full(layer.shape, budget > 0, dtype=torch.bool, device=layer.device) for layer in scores]
    flat = _flat(scores)
    if ascending is None:
        ascending = _joined(flat)
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


def sorted_scores(scores: Sequence[Tensor]) -> np.ndarray:
    """The scores of all layers, from the smallest to the largest."""
    check_scores(scores)
    ascending = _joined(_flat(scores))
    ascending.sort()
    return ascending


def _flat(scores: Sequence[Tensor]) -> list[Tensor]:
    """The scores of each layer in one row, all in a dtype that NumPy knows and that holds every score exactly."""
    dtype = torch.float64 if any(layer.dtype == torch.float64 for layer in scores) else torch.float32
    return [layer.detach().flatten().to(dtype) for layer in scores]


def _joined(flat: Sequence[Tensor]) -> np.ndarray:
    """A copy of all scores, to be reordered."""
    return torch.cat([layer.cpu() for layer in flat]).numpy()


def check_scores(scores: Sequence[Tensor]) -> None:
    """Raises a DataError for scores that are NaN or not floating point."""
    for index, layer in enumerate(scores):
        if not layer.is_floating_point() or bool(layer.isnan().any()):
            raise DataError(f"scores of layer {index} hold NaN or are not floating point ({layer.dtype})")


# --- With a floor under rows and layers -------------------------------------------------------------------------------


def largest_above_floor(
    scores: Sequence[Tensor], weights: Sequence[Tensor], budget: int, *, share: float
) -> list[Tensor]:
    """One bool mask per layer: exactly `budget` weights, the largest scores, with a floor under rows and layers.

    T10 with lower limits: every row that has a weight keeps its best one, and every layer keeps at least `share` of an
    even cut. If the budget is too small for both, rows come first; if it is too small for all rows, those with the best
    weights do.
    """
    best = [best_in_each_row(layer_FK, weight_FK) for layer_FK, weight_FK in zip(scores, weights)]
    limits = minimum_of_layers(scores, budget, share)
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


def minimum_of_layers(scores: Sequence[Tensor], budget: int, share: float) -> list[int]:
    """The minimum number of weights of each layer: this share of an even cut."""
    n_weights = sum(layer.numel() for layer in scores)
    return [int(share * budget * layer.numel() / n_weights) for layer in scores]


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


# --- Within rows, with the same share for all -------------------------------------------------------------------------


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


# --- n of every m weights of a row ------------------------------------------------------------------------------------


# If the fan-in is no multiple of m, the row counts as padded with zeros, as in kernels for such patterns: its last,
# shorter group keeps up to n of its weights.


def largest_in_groups(score_FK: Tensor, pattern: Pattern) -> Tensor:
    """F x K bool: the n largest scores of every group of m, ties going to the smaller column."""
    check_scores([score_FK])
    n_rows, fan_in = score_FK.shape
    groups_FGM = _groups(score_FK, pattern.m, fill=-torch.inf)
    n_groups = groups_FGM.shape[1]
    kept_FG = torch.full((n_rows, n_groups), pattern.n, dtype=torch.int64, device=score_FK.device)
    if fan_in % pattern.m:
        kept_FG[:, -1] = min(pattern.n, fan_in % pattern.m)
    mask = largest_in_rows(groups_FGM.reshape(-1, pattern.m), kept_FG.reshape(-1))
    return mask.view(n_rows, n_groups * pattern.m)[:, :fan_in].contiguous()


def obeys_pattern(weight_FK: Tensor, pattern: Pattern) -> bool:
    """Whether every group of m has at most n non-zero (or True) entries."""
    return bool((_groups(weight_FK != 0, pattern.m, fill=0).sum(2) <= pattern.n).all())


def breaking_pattern(tensors: Mapping[str, Tensor], pattern: Pattern) -> list[str]:
    """The names of masks or weights that break the pattern; empty if all obey it.

    Rows lie along the first axis; a matrix that is stored transposed (inputs x outputs) may obey it along its columns.
    """
    names = []
    for name, tensor in tensors.items():
        matrix_FK = tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(1, -1)
        if not obeys_pattern(matrix_FK, pattern) and not (tensor.dim() == 2 and obeys_pattern(matrix_FK.t(), pattern)):
            names.append(name)
    return names


def _groups(matrix_FK: Tensor, m: int, fill: float) -> Tensor:
    """F x G x m: the rows, padded to whole groups."""
    n_rows, fan_in = matrix_FK.shape
    n_groups = -(-fan_in // m)
    return F.pad(matrix_FK, (0, n_groups * m - fan_in), value=fill).reshape(n_rows, n_groups, m)
