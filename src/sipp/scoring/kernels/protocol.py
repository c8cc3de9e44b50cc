"""What a kernel provides (`KernelFunctions`), and how its functions of a chunk follow from plain products.

Axes: G groups, R rows of each, K fan-in, P patches, B points, S the sign of weights, T that of activations, Q norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sipp.results import numerics

POSITIVE, NEGATIVE = 0, 1  # index of a sign, for weights and for activations
TOTAL = 4  # index of ||Z||^2, after the four quadrants 2 t + s (T11)
N_SQUARES = TOTAL + 1
Signs = tuple[bool, bool]  # whether there are positive and negative activations


@dataclass(frozen=True)
class KernelFunctions:
    """The functions of a kernel: KERNEL of `reference`, `gpu`, `cpu` and `plain_loops`.

    A chunk is patches_GKP (one point after the other), the number of points, weight_GRK, row_factors_GR (which take the
    scale of the rows out of norms) and the signs that occur. Each function of a chunk gives squares_QB as well, the
    squared norms of the quadrants and of Z for each point as it is scaled. Inputs are finite: `RunningWeight`
    refuses others before any kernel sees them.

    A kernel that is `fused` takes windows (B, G, *positions, *fan_in) instead, a view of a layer's inputs that is never
    unfolded in memory, and divides each patch by its sum, so float32 holds more points.
    """

    extremes: Callable[[Tensor], Tensor]
    # a chunk -> sums over the patches of each point of a_kp / D_rp, T x B x G x R x K; squares
    sum_chunk: Callable[[Tensor, int, Tensor, Tensor, Signs], tuple[Tensor, Tensor]] | None = None
    # a chunk, best_GRK -> the larger of best_GRK and of a_kp / D_rp over patches; squares
    max_chunk: Callable[[Tensor, int, Tensor, Tensor, Signs, Tensor], tuple[Tensor, Tensor]] | None = None
    fused: Callable[[Tensor, Tensor], Any] | None = None  # weight_GRK, row_factors_GR -> as `cpu.Ratios`
    in_float64: KernelFunctions | None = None  # for points that float32 does not hold; None: this one is float64


# For each sign t of the activations: D^{st} = W^s a^t for both signs s of the weights (ordinary products), their
# reciprocals, and the (max, x) product of T2, or for `mean` the ordinary product of T3. The same D are the quadrants
# Z^{st} of T11, so the norms cost no further product. `reference.py` defines the products.

Product = Callable[..., Tensor]


def max_chunk(
    quadrant_sums: Product,
    max_times: Product,
    patches_GKP: Tensor,
    n_points: int,
    weight_GRK: Tensor,
    row_factors_GR: Tensor,
    occurs: Signs,
    best_GRK: Tensor,
) -> tuple[Tensor, Tensor]:
    """`max_chunk` of a kernel with these products."""
    squares_QB = _no_squares(n_points, patches_GKP)
    operands = patches_GKP, weight_GRK, row_factors_GR, occurs
    for _, part_GKP, inverse_SGRP in _quadrants(quadrant_sums, *operands, squares_QB):
        best_GRK = torch.maximum(best_GRK, max_times(part_GKP, inverse_SGRP, weight_GRK > 0))
    return best_GRK, squares_QB


def sum_chunk(
    quadrant_sums: Product,
    sum_times: Product,
    patches_GKP: Tensor,
    n_points: int,
    weight_GRK: Tensor,
    row_factors_GR: Tensor,
    occurs: Signs,
) -> tuple[Tensor, Tensor]:
    """`sum_chunk` of a kernel with these products."""
    squares_QB = _no_squares(n_points, patches_GKP)
    sums_TBGRK = torch.zeros(2, n_points, *weight_GRK.shape, dtype=weight_GRK.dtype, device=weight_GRK.device)
    operands = patches_GKP, weight_GRK, row_factors_GR, occurs
    for t, part_GKP, inverse_SGRP in _quadrants(quadrant_sums, *operands, squares_QB):
        by_point = part_GKP.unflatten(-1, (n_points, -1)), inverse_SGRP.unflatten(-1, (n_points, -1))
        sums_TBGRK[t] = sum_times(*by_point, weight_GRK > 0)
    return sums_TBGRK, squares_QB


def _quadrants(
    quadrant_sums: Product,
    patches_GKP: Tensor,
    weight_GRK: Tensor,
    row_factors_GR: Tensor,
    occurs: Signs,
    squares_QB: Tensor,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each sign t that the activations have: t, patches a^t, and 1/D^{st} for both signs s of the weights.

    On the way it adds the squared norms of the quadrants Z^{st} = D^{st}, and of Z, to those of the points.
    """
    z_GRP: Tensor | None = None
    for t in (POSITIVE, NEGATIVE):
        if not occurs[t]:
            continue
        is_pure = t == POSITIVE and not occurs[NEGATIVE]
        part_GKP = patches_GKP if is_pure else (patches_GKP if t == POSITIVE else -patches_GKP).clamp_min(0)
        sums_SGRP = quadrant_sums(weight_GRK, part_GKP)
        signed = sums_SGRP[POSITIVE] - sums_SGRP[NEGATIVE]
        z_GRP = (signed if t == POSITIVE else -signed) if z_GRP is None else z_GRP - signed
        for s in (POSITIVE, NEGATIVE):
            squares_QB[2 * t + s] += _squares(sums_SGRP[s], row_factors_GR, squares_QB.shape[1])
        yield t, part_GKP, numerics.inverse_or_zero(sums_SGRP)
    if z_GRP is not None:
        squares_QB[TOTAL] += _squares(z_GRP, row_factors_GR, squares_QB.shape[1])


def _squares(values_GRP: Tensor, row_factors_GR: Tensor, n_points: int) -> Tensor:
    """The squared norm of each point's values, rows taken back to the units of the weights."""
    norms_GRB = values_GRP.unflatten(-1, (n_points, -1)).norm(dim=-1)
    squares_GRB = (norms_GRB.to(numerics.BOUND_DTYPE) * row_factors_GR[..., None]).square()
    return squares_GRB.flatten(0, 1).t().contiguous().sum(1)  # line by line: no point's sum depends on the others


def _no_squares(n_points: int, like: Tensor) -> Tensor:
    return torch.zeros(N_SQUARES, n_points, dtype=numerics.BOUND_DTYPE, device=like.device)


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
