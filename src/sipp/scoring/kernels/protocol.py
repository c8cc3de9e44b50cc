"""What a kernel provides (`KernelFunctions`), and the numbers that decide what its (max, x) products leave out.

Axes: G groups, R rows of each, K fan-in, P patches, B points, S the sign of weights, T that of activations, Q norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sipp.results import numerics

POSITIVE, NEGATIVE = 0, 1  # index of a sign, for weights and for activations
TOTAL = 4  # index of ||Z||^2, after the four quadrants 2 t + s (T11)
N_SQUARES = TOTAL + 1


@dataclass(frozen=True)
class KernelFunctions:
    """The functions of a kernel: KERNEL of `reference`, `gpu`, `cpu` and `plain_loops`.

    Inputs are finite: `RunningWeight` refuses others before any kernel sees them.
    """

    extremes: Callable[[Tensor], Tensor]
    # weight_GRK and row_factors_GR, which take the scale of the rows out of norms -> their ratios, none yet: as
    # `chunks.ChunkRatios`, or, if the kernel is fused, as `cpu.Ratios`
    ratios: Callable[[Tensor, Tensor], Any]
    dtype: torch.dtype = numerics.BOUND_DTYPE  # of patches and weights
    in_float64: KernelFunctions | None = None  # for points that float32 does not hold; None: this one is float64
    # whether windows are never unfolded in memory, and each patch is divided by its sum, so that float32 holds more
    # points; such a kernel does not give the sums of points
    is_fused: bool = False


def sensitivities_of(ratios_GRK: Tensor, weight_GRK: Tensor) -> Tensor:
    """The largest ratios times their weights (T2)."""
    # into a copy of the weights: the ratios may have another memory layout
    return weight_GRK.abs().mul_(ratios_GRK).clamp_(max=1).to(numerics.SCORE_DTYPE)


# --- What is left out -------------------------------------------------------------------------------------------------

# On the CPU (`loops.py`) and on a GPU (`gpu.py`), line k, patch p is left out of a band of rows where
#     a_kp * max_r (u_rp * scale_r)  <=  min_r (best_kr * scale_r)  less the rounding of these products,
# u the reciprocals 1/D; then a_kp * u_rp <= best_kr for every row r of the band, so this is exact. The left side is the
# activation times the patch's reach, the right side the column's bar (`README.md`). How lines are scaled changes how
# much is left out, never what is found.

# A test whose numbers are not normal proves nothing: it is made between these bounds only (and inputs are finite).
LEAST_BAR, LARGEST_BAR = 2.0**-100, 2.0**126
LEAST_REACH = 2.0**-60
LARGEST_SCALE = 2.0**100  # of a line: any number serves, if its products stay finite
# Rounding of the five operations of a test, 2^-24 each, with room: a patch that only ties is not left out by it.
BAR_SLACK = 1.0 - 2.0**-20
