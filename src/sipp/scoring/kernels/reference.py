"""The definition of every kernel: float64 torch, slow and obvious.

Shapes: patches_GKP are non-negative (one sign of the activations), inverse_SGRP holds 1/D for the two signs S of the
weights (0: positive, 1: negative), positive_GRK says which sign a weight has.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sipp.scoring.kernels import protocol
from sipp.scoring.kernels.protocol import KernelFunctions

_BLOCK = 1 << 24  # elements of one broadcast product


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights."""
    weight = weight_GRK.double()
    return torch.stack((weight.clamp(min=0), (-weight).clamp(min=0))) @ patches_GKP.double()


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """max over p of  a_kp * (1/D)_rp  with D of the weight's own sign: the (max, x) product of T2. Shape G x R x K."""
    n_groups, fan_in, n_patches = patches_GKP.shape
    n_rows = inverse_SGRP.shape[2]
    best = torch.zeros(2, n_groups, n_rows, fan_in, dtype=torch.float64, device=patches_GKP.device)
    step = max(1, _BLOCK // (2 * n_groups * n_rows * fan_in))
    for start in range(0, n_patches, step):
        a = patches_GKP[:, :, start : start + step].double()
        inverse = inverse_SGRP[..., start : start + step].double()
        best = torch.maximum(best, (a[None, :, None] * inverse[:, :, :, None]).amax(-1))
    return torch.where(positive_GRK, best[0], best[1])


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of the same products: B x G x R x K. An ordinary matrix product (T3)."""
    total = torch.einsum("gkbn,sgrbn->sbgrk", patches_GKBN.double(), inverse_SGRBN.double())
    return torch.where(positive_GRK, total[0], total[1])


def extremes(values_BN: Tensor) -> Tensor:
    """3 x B: lowest, highest, smallest magnitude above 0 or infinity of each line, NaN where a line has one."""
    lowest, highest = torch.aminmax(values_BN, dim=1)
    magnitude_BN = values_BN.abs()
    return torch.stack((lowest, highest, magnitude_BN.masked_fill_(magnitude_BN == 0, torch.inf).amin(1)))


max_chunk = partial(protocol.max_chunk, quadrant_sums, max_times)
sum_chunk = partial(protocol.sum_chunk, quadrant_sums, sum_times)
KERNEL = KernelFunctions(extremes, partial(protocol.ChunkRatios, max_chunk, sum_chunk))
