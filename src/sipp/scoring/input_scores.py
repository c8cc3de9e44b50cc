"""Scores that see the inputs of each layer: Wanda, and the optimal brain surgeon."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from sipp.errors import ModelError
from sipp.inputs import Batch, Weight, WeightUse, patches_of, split_windows
from sipp.results import numerics
from sipp.scoring.task import ScoringTask, each_use

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}  # a GPU wants few large pieces
DAMPING = 0.01  # of the mean of the diagonal: without it constant or equal inputs would make H singular


def wanda(task: ScoringTask) -> dict[str, Tensor]:
    """|w_ij| ||a_j||, a_j the activations that column j meets in all patches: {parameter name: tensor of its shape}.

    Sun et al. 2024. Weights are compared within their row. A sum a column is held while the data is read, not one a
    weight: of a language model these would be twice its size.
    """
    squares, scores = _summed(task, _squared_lengths), {}
    for weight, parameter in zip(task.weights, task.parameters().values()):
        score_FK = torch.zeros(weight.n_rows, weight.fan_in, dtype=numerics.BOUND_DTYPE, device=parameter.device)
        for rows, lengths_K in squares.pop(weight.name).items():
            score_FK[slice(*rows)] += lengths_K
        score_FK.sqrt_().mul_(weight.rows(parameter.detach()).abs())
        scores[weight.name] = weight.shaped(score_FK, parameter)
    return scores


def obs(task: ScoringTask) -> dict[str, Tensor]:
    """w_j^2 / (2 [H^-1]_jj), H = X X^T + damping of the row's own inputs X: {parameter name: tensor of its shape}.

    Optimal brain surgeon, layer by layer (Hassibi & Stork 1993, Frantar & Alistarh 2022): half the squared error, over
    all patches, that the removal of w_j leaves in the outputs of its row if the other weights of the row compensate for
    it optimally. Here they do not: the score only chooses weights, and `repair` compensates. Errors of different layers
    have different units, so weights compete within their layer. Rows that meet no patch score 0.

    Memory holds one float64 Gram matrix, K x K, for each weight (and group of a convolution, block of a projection);
    the patches come in chunks.
    """
    grams, scores = _summed(task, _gram), {}
    for weight, parameter in zip(task.weights, task.parameters().values()):
        weight_FK = weight.rows(parameter.detach()).to(numerics.BOUND_DTYPE)
        saliency_FK = weight_FK.square() * _stiffness(grams.pop(weight.name), weight_FK, weight.name) / 2
        if not bool(torch.isfinite(saliency_FK).all()):
            raise ModelError("squared inputs overflow", where=weight.name)
        scores[weight.name] = weight.shaped(saliency_FK, parameter)
    return scores


RowRange = tuple[int, int]  # first row, and the one after the last


def _summed(task: ScoringTask, sum_of: Callable[[WeightUse, Tensor], Tensor]) -> dict[str, dict[RowRange, Tensor]]:
    """For each weight, and each range of its rows that meets inputs of its own, the sum over all patches they meet.

    `sum_of` gives it for a piece of the windows of a use, for each of its groups.
    """
    found: dict[str, dict[RowRange, Tensor]] = {weight.name: {} for weight in task.weights}

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        bytes_per_window = 2 * numerics.BOUND_DTYPE.itemsize * use.fan_in  # as wide numbers, and their squares
        chunk_bytes = numerics.for_device(CHUNK_BYTES, use.windows.device)
        pieces = split_windows(use, bytes_per_window=bytes_per_window, chunk_bytes=chunk_bytes)
        step = use.n_rows_of(weight) // use.n_groups
        sums, starts = found[weight.name], range(use.row_start, use.row_start + step * use.n_groups, step)
        for _, windows in pieces:
            for start, total in zip(starts, sum_of(use, windows)):
                rows = start, start + step
                sums[rows] = sums[rows].add_(total) if rows in sums else total

    each_use(task, on_use)
    return found


def _squared_lengths(use: WeightUse, windows: Tensor) -> Tensor:
    """The sum over patches of a_k^2, G x K."""
    positions = (0, *range(2, 2 + use.n_position_dims))
    lengths = torch.linalg.vector_norm(windows, dim=positions, dtype=numerics.BOUND_DTYPE)  # on a GPU in one reading
    return lengths.square().reshape(use.n_groups, use.fan_in)


def _gram(use: WeightUse, windows: Tensor) -> Tensor:
    """The sum over patches of x x^T, G x K x K."""
    ones_B = torch.ones(len(windows), dtype=numerics.BOUND_DTYPE, device=windows.device)
    patches_GKP = patches_of(windows, use.n_position_dims, ones_B, numerics.BOUND_DTYPE)
    return patches_GKP @ patches_GKP.mT


def _stiffness(grams: dict[RowRange, Tensor], like_FK: Tensor, where: str) -> Tensor:
    """1 / [H^-1]_jj for every weight (F x K); H of a row is the sum over all uses that the row has a part in."""
    stiff_FK = torch.zeros_like(like_FK)
    edges = sorted({edge for rows in grams for edge in rows})
    for start, stop in pairwise(edges):
        met = [gram_KK for (first, last), gram_KK in grams.items() if first <= start and stop <= last]
        if met:
            stiff_FK[start:stop] = _inverse_of_inverse_diagonal(torch.stack(met).sum(0), where)
    return stiff_FK


def _inverse_of_inverse_diagonal(gram_KK: Tensor, where: str) -> Tensor:
    """1 / diag((X X^T + damping)^-1), in units in which the mean of the diagonal is 1; 0 where no input is."""
    mean = gram_KK.diagonal().mean()
    if not bool(torch.isfinite(mean)):
        raise ModelError("squared inputs overflow", where=where)
    if bool(mean == 0):
        return torch.zeros_like(gram_KK[0])
    damped_KK = gram_KK / mean
    damped_KK.diagonal().add_(DAMPING)
    inverse_KK = torch.cholesky_inverse(torch.linalg.cholesky(damped_KK))
    return mean / inverse_KK.diagonal()
