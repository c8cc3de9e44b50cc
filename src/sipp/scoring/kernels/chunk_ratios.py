"""The ratios of a chunk of patches, for kernels without a fused `max_ratios`.

For each sign t of the activations: D^{st} = W^s a^t for both signs s of the weights (ordinary products), their
reciprocals, and the (max, x) product of T2, or for `mean` the ordinary product of T3. The same D are the quadrants
Z^{st} of T11, so the norms cost no further product.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from sipp.records.numerics import BOUND_DTYPE, inverse_or_zero

POSITIVE, NEGATIVE = 0, 1  # index of a sign, for weights and for activations
TOTAL = 4  # index of ||Z||^2, after the four quadrants 2 t + s
Signs = tuple[bool, bool]  # whether there are positive and negative activations


def max_chunk(
    kernel: ModuleType,
    patches_GKP: Tensor,
    n_points: int,
    weight_GRK: Tensor,
    row_factors_GR: Tensor,
    occurs: Signs,
    best_GRK: Tensor,
) -> tuple[Tensor, Tensor]:
    """(The larger of best_GRK and of a_kp / D_rp over patches, G x R x K;  squared norms of the quadrants and of Z for
    each point, Q x B). A kernel may have its own `max_chunk`, and `sum_chunk`.
    """
    if hasattr(kernel, "max_chunk"):
        found: tuple[Tensor, Tensor] = kernel.max_chunk(
            patches_GKP, n_points, weight_GRK, row_factors_GR, occurs, best_GRK
        )
        return found
    squares_QB = _no_squares(n_points, patches_GKP)
    for _, part_GKP, inverse_SGRP in _quadrants(kernel, patches_GKP, weight_GRK, row_factors_GR, occurs, squares_QB):
        best_GRK = torch.maximum(best_GRK, kernel.max_times(part_GKP, inverse_SGRP, weight_GRK > 0))
    return best_GRK, squares_QB


def sum_chunk(
    kernel: ModuleType, patches_GKP: Tensor, n_points: int, weight_GRK: Tensor, row_factors_GR: Tensor, occurs: Signs
) -> tuple[Tensor, Tensor]:
    """(sums over the patches of each point of a_kp / D_rp, T x B x G x R x K;  the same norms)."""
    if hasattr(kernel, "sum_chunk"):
        found: tuple[Tensor, Tensor] = kernel.sum_chunk(patches_GKP, n_points, weight_GRK, row_factors_GR, occurs)
        return found
    squares_QB = _no_squares(n_points, patches_GKP)
    sums_TBGRK = torch.zeros(2, n_points, *weight_GRK.shape, dtype=weight_GRK.dtype, device=weight_GRK.device)
    for t, part_GKP, inverse_SGRP in _quadrants(kernel, patches_GKP, weight_GRK, row_factors_GR, occurs, squares_QB):
        by_point = part_GKP.unflatten(-1, (n_points, -1)), inverse_SGRP.unflatten(-1, (n_points, -1))
        sums_TBGRK[t] = kernel.sum_times(*by_point, weight_GRK > 0)
    return sums_TBGRK, squares_QB


def _quadrants(
    kernel: ModuleType,
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
        sums_SGRP = kernel.quadrant_sums(weight_GRK, part_GKP)
        signed = sums_SGRP[POSITIVE] - sums_SGRP[NEGATIVE]
        z_GRP = (signed if t == POSITIVE else -signed) if z_GRP is None else z_GRP - signed
        for s in (POSITIVE, NEGATIVE):
            squares_QB[2 * t + s] += _squares(sums_SGRP[s], row_factors_GR, squares_QB.shape[1])
        yield t, part_GKP, inverse_or_zero(sums_SGRP)
    if z_GRP is not None:
        squares_QB[TOTAL] += _squares(z_GRP, row_factors_GR, squares_QB.shape[1])


def _squares(values_GRP: Tensor, row_factors_GR: Tensor, n_points: int) -> Tensor:
    """The squared norm of each point's values, rows taken back to the units of the weights."""
    norms_GRB = values_GRP.unflatten(-1, (n_points, -1)).norm(dim=-1)
    squares_GRB = (norms_GRB.to(BOUND_DTYPE) * row_factors_GR[..., None]).square()
    return squares_GRB.flatten(0, 1).t().contiguous().sum(1)  # line by line: no point's sum depends on the others


def _no_squares(n_points: int, like: Tensor) -> Tensor:
    return torch.zeros(TOTAL + 1, n_points, dtype=BOUND_DTYPE, device=like.device)
