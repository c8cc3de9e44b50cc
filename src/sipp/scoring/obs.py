"""Optimal brain surgeon, layer by layer: the error that refitting the rest of the row cannot undo.

Hassibi & Stork 1993, Frantar & Alistarh 2022.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from sipp.errors import ModelError
from sipp.inputs import (
    Batch,
    Weight,
    WeightUse,
    from_rows,
    patches_of,
    split_windows,
    to_rows,
)
from sipp.results import numerics
from sipp.scoring.task import ScoringTask, each_use

CHUNK_BYTES = 32 << 20
DAMPING = 0.01  # of the mean of the diagonal: without it constant or equal inputs would make H singular

RowRange = tuple[int, int]  # first row, and the one after the last
Grams = dict[RowRange, Tensor]  # K x K sums of x x^T over the patches x that these rows met


def obs(task: ScoringTask) -> dict[str, Tensor]:
    """w_j^2 / (2 [H^-1]_jj), H = X X^T + damping of the row's own inputs X: {parameter name: tensor of its shape}.

    Half the squared error, over all patches, that the removal of w_j leaves in the outputs of its row if the other
    weights of the row compensate for it optimally. Here they do not: the score only chooses weights, and `repair`
    compensates. Errors of different layers have different units, so weights compete within their layer. Rows that meet
    no patch score 0.

    Memory holds one float64 Gram matrix, K x K, for each weight (and group of a convolution, block of a projection);
    the patches come in chunks.
    """
    grams: dict[str, Grams] = {weight.name: {} for weight in task.weights}

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        gram_GKK = _gram(use)
        step = use.n_rows_of(weight) // len(gram_GKK)
        for group, gram_KK in enumerate(gram_GKK):
            start = use.row_start + group * step
            met = grams[weight.name].setdefault((start, start + step), torch.zeros_like(gram_KK))
            met += gram_KK

    each_use(task, on_use)
    scores = {}
    for weight, parameter in zip(task.weights, task.parameters().values()):
        weight_FK = to_rows(weight, parameter.detach()).to(numerics.BOUND_DTYPE)
        saliency_FK = weight_FK.square() * _stiffness(weight, grams.pop(weight.name), weight_FK) / 2
        if not bool(torch.isfinite(saliency_FK).all()):
            raise ModelError("squared inputs overflow", where=weight.name)
        scores[weight.name] = from_rows(weight, saliency_FK, parameter)
    return scores


def _gram(use: WeightUse) -> Tensor:
    """The sum over all patches of x x^T, G x K x K, in pieces of bounded size."""
    fan_in = use.fan_in
    total_GKK = torch.zeros(use.n_groups, fan_in, fan_in, dtype=numerics.BOUND_DTYPE, device=use.windows.device)
    for _, part in split_windows(
        use, bytes_per_window=2 * numerics.BOUND_DTYPE.itemsize * fan_in, chunk_bytes=CHUNK_BYTES
    ):
        ones_B = torch.ones(len(part), dtype=numerics.BOUND_DTYPE, device=part.device)
        patches_GKP = patches_of(part, use.n_position_dims, ones_B, numerics.BOUND_DTYPE)
        total_GKK.baddbmm_(patches_GKP, patches_GKP.mT)
    return total_GKK


def _stiffness(weight: Weight, grams: Grams, like_FK: Tensor) -> Tensor:
    """1 / [H^-1]_jj for every weight (F x K); H of a row is the sum over all uses that the row has a part in."""
    stiff_FK = torch.zeros_like(like_FK)
    edges = sorted({edge for rows in grams for edge in rows})
    for start, stop in pairwise(edges):
        met = [gram_KK for (first, last), gram_KK in grams.items() if first <= start and stop <= last]
        if met:
            stiff_FK[start:stop] = _inverse_of_inverse_diagonal(torch.stack(met).sum(0), weight.name)
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
