"""The norms of one weight's outputs, gathered over all points: sign complexity, shares of the output (T11, T12, T18).

For a point x the kernels give ||Z^{st}(x)||^2 of the four quadrants and ||Z(x)||^2. What is kept is the largest, over
all points, of their ratios to each other and to the norm of the network's output; if a point's is unknown, so is that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sipp.inputs.patches import ValueRange
from sipp.records.numerics import BOUND_DTYPE
from sipp.scoring.kernels.chunk_ratios import TOTAL

SAFE_PEAKS = 2.0**-500, 2.0**500  # the squares of their scales are ordinary numbers of float64


class RunningNorms:
    """The largest ratios of norms so far: `open` a batch, `add` the squares of its points, then `close_all`."""

    def __init__(self) -> None:
        self.sign_complexity: float | None = 0.0  # (T11); None once anything was unknown, as the others
        self.output_ratio: float | None = 0.0  # ||Z(x)|| to the norm of the output (T12)
        self.quadrants: list[Tensor] | None = []  # sums of ||Z^{st}(x)|| to the same, of each batch (T18)
        self.is_attributed = True  # to points: of this batch, whose squares these are
        self.n_points: int | None = None  # of this batch, if the weight is used in it
        self.squares_QB: Tensor | None = None  # of this batch; None where no output is known yet

    def open(self, n_points: int) -> None:
        """Begins a batch in which the weight is used."""
        self.n_points = n_points

    def add(self, squares_QB: Tensor, points: slice) -> None:
        """Adds the squared norms of these points' outputs, in the units of the model. They are ours from now on."""
        if not self.is_attributed or self.n_points is None:
            return
        if self.squares_QB is None and squares_QB.shape[1] == self.n_points:
            self.squares_QB = squares_QB
        else:
            self.squares_QB = self.squares(squares_QB.device)
            self.squares_QB[:, points] += squares_QB

    def squares(self, device: torch.device) -> Tensor:
        """Those of this batch, in which the weight is used; 0 where it met no activations."""
        if self.squares_QB is not None:
            return self.squares_QB
        assert self.n_points is not None
        return torch.zeros(TOTAL + 1, self.n_points, dtype=BOUND_DTYPE, device=device)

    def take(self, complexity: float | None, to_output: float | None, quadrants_B: Tensor | None) -> None:
        """Takes the largest ratios of a batch in, None where they are not known."""
        self.sign_complexity = _running_max(self.sign_complexity, complexity)
        self.output_ratio = _running_max(self.output_ratio, to_output)
        if quadrants_B is None or self.quadrants is None:
            self.quadrants = None
        else:
            self.quadrants.append(quadrants_B)


def close_all(running: Sequence[RunningNorms], output_norms_B: Tensor | None) -> None:
    """Ends a batch for all weights; the norms of the network's outputs, on the CPU, are None where they are unknown."""
    used = [one for one in running if one.n_points is not None]
    known = [one for one in used if one.is_attributed]
    for one in running:
        if one.n_points is None:
            one.take(0.0, 0.0, None if output_norms_B is None else torch.zeros_like(output_norms_B))
        elif not one.is_attributed:
            one.take(None, None, None)
    if known:
        found = [one.squares_QB for one in known if one.squares_QB is not None]
        device = found[0].device if found else torch.device("cpu")
        norms_WQB = torch.stack([one.squares(device) for one in known]).cpu().sqrt()  # a GPU is waited for only here
        above_WB, total_WB = norms_WQB[:, :TOTAL].sum(1).numpy(), norms_WQB[:, TOTAL].numpy()
        complexity = _ratio(above_WB, total_WB).max(1).tolist()
        if output_norms_B is None:
            for one, largest in zip(known, complexity):
                one.take(largest, None, None)
        else:
            to_output = _ratio(total_WB, output_norms_B.numpy()).max(1).tolist()
            quadrants_WB = torch.from_numpy(_ratio(above_WB, output_norms_B.numpy()))
            for one, of_all, of_output, quadrants_B in zip(known, complexity, to_output, quadrants_WB):
                one.take(of_all, of_output, quadrants_B)
    for one in used:
        one.is_attributed, one.n_points, one.squares_QB = True, None, None


def unscaled(squares_QB: Tensor, values: ValueRange, points: slice) -> Tensor:
    """Squares of scaled points with the scale taken out; infinite where that leaves the range of float64."""
    factor_B = values.scales_on_device_2B[1, points]
    if SAFE_PEAKS[0] <= values.peaks[0] <= values.peaks[1] <= SAFE_PEAKS[1]:
        return squares_QB / factor_B
    is_lost_B = (factor_B == 0) | factor_B.isinf()
    return torch.where(is_lost_B & (squares_QB > 0), math.inf, squares_QB / factor_B)


def _ratio(above_B: np.ndarray, below_B: np.ndarray) -> np.ndarray:
    """above / below, 0 for 0/0, infinity where only the denominator is 0 or anything is not finite.

    So a claim may get weaker, never stronger. (Arrays: for so few numbers each of torch's operations takes longer.)
    """
    with np.errstate(all="ignore"):
        ratio_B = np.where(above_B == 0, 0.0, above_B / below_B)
    return np.where(np.isfinite(above_B) & np.isfinite(below_B), ratio_B, math.inf)


def _running_max(best: float | None, largest: float | None) -> float | None:
    """The larger of both; None once anything was unknown."""
    if best is None or largest is None:
        return None
    return math.inf if math.isnan(largest) else max(best, largest)
