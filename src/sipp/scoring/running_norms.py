"""The norms of one weight's outputs, gathered over all points: sign complexity, shares of the output (T11, T12, T18).

For a point x the kernels give ||Z^{st}(x)||^2 of the four quadrants and ||Z(x)||^2. What is kept is the largest, over
all points, of their ratios to each other and to the norm of the network's output; if a point's is unknown, so is that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sipp.records.numerics import BOUND_DTYPE
from sipp.scoring.kernels.chunk_ratios import TOTAL


class RunningNorms:
    """The largest ratios of norms so far: `open` a batch, `add` the squares of its points, `close` it."""

    def __init__(self) -> None:
        self.sign_complexity: float | None = 0.0  # (T11); None once anything was unknown, as the others
        self.output_ratio: float | None = 0.0  # ||Z(x)|| to the norm of the output (T12)
        self.quadrants: list[Tensor] | None = []  # sums of ||Z^{st}(x)|| to the same, of each batch (T18)
        self.is_attributed = True  # to points: of this batch, whose squares these are
        self._squares_QB: Tensor | None = None

    def open(self, n_points: int, device: torch.device) -> None:
        """Begins a batch in which the weight is used."""
        self._squares_QB = torch.zeros(TOTAL + 1, n_points, dtype=BOUND_DTYPE, device=device)

    def add(self, squares_QB: Tensor, points: slice) -> None:
        """Adds the squared norms of these points' outputs, in the units of the model."""
        if self.is_attributed and self._squares_QB is not None:
            self._squares_QB[:, points] += squares_QB

    def close(self, output_norms_B: Tensor | None) -> None:
        """Ends a batch; the norms of the network's outputs, on the CPU, are None where they are not known."""
        if self._squares_QB is None:  # not used in this batch
            self._keep_quadrants(None if output_norms_B is None else torch.zeros_like(output_norms_B))
            return
        norms_QB = self._squares_QB.cpu().sqrt()  # a GPU is waited for only here
        complexity_B = to_output_B = quadrants_B = None
        if self.is_attributed:
            complexity_B = _ratio(norms_QB[:TOTAL].sum(0), norms_QB[TOTAL])
            if output_norms_B is not None:
                to_output_B = _ratio(norms_QB[TOTAL], output_norms_B)
                quadrants_B = _ratio(norms_QB[:TOTAL].sum(0), output_norms_B)
        self.sign_complexity = _running_max(self.sign_complexity, complexity_B)
        self.output_ratio = _running_max(self.output_ratio, to_output_B)
        self._keep_quadrants(quadrants_B)
        self.is_attributed, self._squares_QB = True, None

    def _keep_quadrants(self, quadrants_B: Tensor | None) -> None:
        if quadrants_B is None or self.quadrants is None:
            self.quadrants = None
        else:
            self.quadrants.append(quadrants_B.to(BOUND_DTYPE))


def unscaled(squares_QB: Tensor, scale_B: Tensor) -> Tensor:
    """Squares of scaled points with the scale taken out; infinite where that leaves the range of float64."""
    factor_B = scale_B.square()
    is_lost_B = (factor_B == 0) | factor_B.isinf()
    return torch.where(is_lost_B & (squares_QB > 0), math.inf, squares_QB / factor_B)


def _ratio(above_B: Tensor, below_B: Tensor) -> Tensor:
    """above / below, 0 for 0/0, infinity where only the denominator is 0 or anything is not finite.

    So a claim may get weaker, never stronger.
    """
    is_known_B = above_B.isfinite() & below_B.isfinite()
    ratio_B = torch.where(above_B == 0, torch.zeros_like(above_B), above_B / below_B)
    return torch.where(is_known_B, ratio_B, torch.full_like(above_B, math.inf))


def _running_max(best: float | None, ratios_B: Tensor | None) -> float | None:
    """The larger of both; None once anything was unknown."""
    if best is None or ratios_B is None:
        return None
    largest = float(ratios_B.max())
    return math.inf if math.isnan(largest) else max(best, largest)
