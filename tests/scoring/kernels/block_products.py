"""The (max, x) product by the compiled loops themselves, block after block, without the layer around them."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.native.compiling import as_numbers
from sipp.scoring.kernels.cpu import every_product, maxima
from sipp.scoring.kernels.cpu import kernel as cpu
from sipp.scoring.kernels.cpu.layout import BLOCK


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
        best, signs = cpu._maxima(torch.zeros(positive_GRK.shape)), cpu._signs(positive_GRK)
        scratch = cpu._scratch(positive_GRK)
        at = as_numbers(scratch)
        for g in range(len(patches_GKP)):
            for start in range(0, patches_GKP.shape[-1], BLOCK):
                a, u = patches_GKP[g, :, start : start + BLOCK], inverse_SGRP[:, g, :, start : start + BLOCK]
                n = a.shape[1]
                scratch.a_KP[:], scratch.d_LP[:] = 0.0, 0.0
                scratch.a_KP[:, :n] = a.numpy()
                scratch.d_LP[: 2 * n_rows, :n] = u.transpose(0, 1).flatten(0, 1).numpy()  # line 2 r + s
                given = at.ctypes.data, signs[g].ctypes.data, n_rows, fan_in, best[g].data_ptr()
                if skip:
                    maxima.transpose_lines(at.ctypes.data, signs.shape[-1])
                    scratch.reach[:] *= understate
                    maxima.raise_best(*given)
                else:
                    every_product.raise_by_all(*given)
        return cpu._joined([best], positive_GRK), int(scratch.n_computed[0])
    finally:
        cpu.MOST_WEIGHTS = before
