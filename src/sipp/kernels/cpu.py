"""The kernels on the CPU: float32, the (max, x) product in Numba, the ordinary products in torch."""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights."""
    n_groups, n_rows, _ = weight_GRK.shape
    both = torch.cat((weight_GRK.clamp(min=0), (-weight_GRK).clamp(min=0)), dim=1)
    return torch.bmm(both, patches_GKP).view(n_groups, 2, n_rows, -1).transpose(0, 1)


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """max over p of  a_kp * (1/D)_rp  with D of the weight's own sign: the (max, x) product of T2. Shape G x R x K."""
    best = torch.zeros(positive_GRK.shape, dtype=torch.float32)
    _max_times(patches_GKP.numpy(), inverse_SGRP.numpy(), positive_GRK.numpy(), best.numpy())
    return best


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of the same products: B x G x R x K. An ordinary matrix product (T3)."""
    total = torch.einsum("gkbn,sgrbn->sbgrk", patches_GKBN, inverse_SGRBN)
    return torch.where(positive_GRK, total[0], total[1])


@numba.njit(parallel=True, cache=True, fastmath={"nnan", "nsz", "reassoc"})
def _max_times(patches: np.ndarray, inverse: np.ndarray, positive: np.ndarray, best: np.ndarray) -> None:
    n_groups, n_rows, fan_in = positive.shape
    n_patches = patches.shape[2]
    for i in numba.prange(n_groups * n_rows):
        g = i // n_rows
        r = i - g * n_rows
        for k in range(fan_in):
            s = 0 if positive[g, r, k] else 1
            top = np.float32(0.0)
            for p in range(n_patches):
                value = patches[g, k, p] * inverse[s, g, r, p]
                top = value if value > top else top
            best[g, r, k] = top
