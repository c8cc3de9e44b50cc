"""The (max, x) product by the compiled loops themselves, block after block, without the layer around them."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from sipp.native import processor
from sipp.scoring.kernels.cpu import every_product, kernel as cpu, maxima
from sipp.scoring.kernels.cpu.layout import BLOCK, ROW_TILE, Scratch


def floats_at(address: int, n_lines: int) -> np.ndarray:
    """Lines of a block that lie there."""
    return np.ctypeslib.as_array((ctypes.c_float * (n_lines * BLOCK)).from_address(address)).reshape(n_lines, BLOCK)


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor, *, skip: bool) -> Tensor:
    """max over p of a_kp * (1/D)_rp, G x R x K: of every product, or of those alone that the bars let through."""
    return counted(patches_GKP, inverse_SGRP, positive_GRK, skip=skip)[0]


def counted(
    patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor, *, skip: bool = True, understate: float = 1.0
) -> tuple[Tensor, int]:
    """The same, and how many products were computed; the reach of the patches is multiplied by `understate`."""
    n_rows, fan_in = positive_GRK.shape[1:]
    cpu.MOST_WEIGHTS, before = -1 if skip else 2**30, cpu.MOST_WEIGHTS  # decides how maxima lie in memory
    try:
        n_groups = len(positive_GRK)
        ratios = cpu.new_ratios(positive_GRK.float() - 0.5, torch.ones(n_groups, n_rows, dtype=torch.float64))
        signs, (_, at) = ratios.signs_GKR, cpu._scratch(ratios)
        addresses = Scratch(*at.tolist())
        a_KP, d_LP = floats_at(addresses.a_KP, fan_in), floats_at(addresses.d_LP, 2 * ROW_TILE * signs.shape[-1])
        reach = floats_at(addresses.reach, signs.shape[-1])
        width = signs.shape[-1] * ROW_TILE if skip else n_rows * processor.LANES
        ratios.maxima = best = torch.zeros(n_groups, fan_in, width)
        for g in range(n_groups):
            for start in range(0, patches_GKP.shape[-1], BLOCK):
                a, u = patches_GKP[g, :, start : start + BLOCK], inverse_SGRP[:, g, :, start : start + BLOCK]
                n = a.shape[1]
                a_KP[:], d_LP[:] = 0.0, 0.0
                a_KP[:, :n] = a.numpy()
                d = torch.where(u > 0, 1 / u, 0.0)
                d_LP[: 2 * n_rows, :n] = d.transpose(0, 1).flatten(0, 1).numpy()  # line 2 r + s
                given = at.ctypes.data, signs[g].data_ptr(), n_rows, fan_in, best[g].data_ptr()
                if skip:
                    maxima.transpose_lines(at.ctypes.data, n_rows, signs.shape[-1])
                    reach[:] *= understate
                    maxima.raise_best(*given)
                else:
                    every_product.raise_by_all(*given)
        return cpu.largest_ratios(ratios), ctypes.c_int64.from_address(addresses.n_computed).value
    finally:
        cpu.MOST_WEIGHTS = before


def max_ratios(
    windows: Tensor, n_position_dims: int, weight_GRK: Tensor, *, factors_TB: Tensor, row_factors_GR: Tensor
) -> tuple[Tensor, Tensor]:
    """The largest ratios of these windows alone, and the squared norms of their points as they are scaled."""
    ratios = cpu.new_ratios(weight_GRK, row_factors_GR)
    squares_QB = cpu.max_ratios(ratios, windows, n_position_dims, factors_TB=factors_TB)
    return cpu.largest_ratios(ratios), squares_QB


def mean_ratios(
    windows: Tensor,
    n_position_dims: int,
    weight_GRK: Tensor,
    *,
    factors_TB: Tensor,
    row_factors_GR: Tensor,
    counts_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same of the means over the patches of each point."""
    ratios = cpu.new_ratios(weight_GRK, row_factors_GR)
    squares_QB = cpu.mean_ratios(ratios, windows, n_position_dims, factors_TB=factors_TB, counts_B=counts_B)
    return cpu.largest_ratios(ratios), squares_QB
