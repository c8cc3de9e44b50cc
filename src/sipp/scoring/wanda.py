"""Wanda (Sun et al. 2024): magnitude times the norm of its input, compared within a row."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.inputs import Batch, Weight, WeightUse, from_rows, split_windows, to_rows
from sipp.results import numerics
from sipp.scoring.task import ScoringTask, each_use

CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}  # a GPU wants few large pieces


def wanda(task: ScoringTask) -> dict[str, Tensor]:
    """|w_ij| ||a_j||, a_j the activations that column j meets in all patches: {parameter name: tensor of its shape}."""
    squares: dict[str, dict[tuple[int, int], Tensor]] = {weight.name: {} for weight in task.weights}

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        rows = use.row_start, use.n_rows_of(weight)
        lengths_GK = _squared_lengths(use)
        found = squares[weight.name]
        found[rows] = found[rows] + lengths_GK if rows in found else lengths_GK

    each_use(task, on_use)
    parameters = task.parameters()
    return {weight.name: _scores(weight, parameters[weight.name].detach(), squares) for weight in task.weights}


def _scores(weight: Weight, parameter: Tensor, squares: dict[str, dict[tuple[int, int], Tensor]]) -> Tensor:
    """The scores of a weight from what its rows met, all or parts of them; 0 where they met nothing."""
    score_FK = torch.zeros(weight.n_rows, weight.fan_in, dtype=numerics.BOUND_DTYPE, device=parameter.device)
    for (start, n_rows), lengths_GK in squares.pop(weight.name).items():
        score_FK[start : start + n_rows].unflatten(0, (len(lengths_GK), -1)).add_(lengths_GK[:, None, :])
    score_FK.sqrt_().mul_(to_rows(weight, parameter).abs())
    return from_rows(weight, score_FK, parameter)


def _squared_lengths(use: WeightUse) -> Tensor:
    """The sum over all patches of a_k^2, G x K, in pieces of bounded size."""
    n_groups, fan_in = use.n_groups, use.fan_in
    total_GK = torch.zeros(n_groups, fan_in, dtype=numerics.BOUND_DTYPE, device=use.windows.device)
    positions = (0, *range(2, 2 + use.n_position_dims))
    bytes_per_window = (
        2 * numerics.BOUND_DTYPE.itemsize * fan_in
    )  # as wide numbers and their squares, where torch makes these
    chunk_bytes = numerics.for_device(CHUNK_BYTES, use.windows.device)
    for _, part in split_windows(use, bytes_per_window=bytes_per_window, chunk_bytes=chunk_bytes):
        lengths = torch.linalg.vector_norm(part, dim=positions, dtype=numerics.BOUND_DTYPE)  # on a GPU in one reading
        total_GK += lengths.square().reshape(n_groups, fan_in)
    return total_GK
