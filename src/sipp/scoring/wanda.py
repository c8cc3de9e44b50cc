"""Wanda (Sun et al. 2024): magnitude times the length of the input it meets, to be compared within a row."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.inputs.patches import split_windows
from sipp.inputs.scoring_task import ScoringTask, each_use
from sipp.records.batches import Batch, WeightUse
from sipp.records.numerics import BOUND_DTYPE
from sipp.records.weights import Weight, from_rows, to_rows

CHUNK_BYTES = 32 << 20


def wanda(task: ScoringTask) -> dict[str, Tensor]:
    """|w_ij| ||a_j||, a_j the activations that column j meets in all patches: {parameter name: tensor of its shape}."""
    squares: dict[str, Tensor] = {
        name: torch.zeros(to_rows(weight, parameter).shape, dtype=BOUND_DTYPE, device=parameter.device)
        for weight, (name, parameter) in zip(task.weights, task.parameters().items())
    }

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        n_rows = use.n_rows or weight.n_rows - use.row_start
        lengths_GK = _squared_lengths(use)
        rows_FK = squares[weight.name][use.row_start : use.row_start + n_rows]
        rows_FK.unflatten(0, (len(lengths_GK), -1)).add_(lengths_GK[:, None, :])

    each_use(task, on_use)
    return {
        weight.name: parameter.detach().abs().to(BOUND_DTYPE)
        * from_rows(weight, squares[weight.name].sqrt(), parameter)
        for weight, parameter in zip(task.weights, task.parameters().values())
    }


def _squared_lengths(use: WeightUse) -> Tensor:
    """The sum over all patches of a_k^2, G x K, in pieces of bounded size."""
    n_groups, fan_in = use.windows.shape[1], use.windows.shape[2 + use.n_position_dims :].numel()
    total_GK = torch.zeros(n_groups, fan_in, dtype=BOUND_DTYPE, device=use.windows.device)
    positions = (0, *range(2, 2 + use.n_position_dims))
    bytes_per_patch = 2 * BOUND_DTYPE.itemsize * fan_in  # wide, and squared
    for _, part in split_windows(use, bytes_per_patch=bytes_per_patch, chunk_bytes=CHUNK_BYTES):
        total_GK += part.to(BOUND_DTYPE).square().sum(positions).reshape(n_groups, fan_in)
    return total_GK
