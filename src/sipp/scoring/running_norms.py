"""The norms of one weight's outputs over all points: sign complexity, shares of the output (T11, T12, T18).

For a point x the kernels compute ||Z^{st}(x)||^2 of the four quadrants and ||Z(x)||^2. Kept are the largest ratios,
over all points, of these to each other and to the norm of the network's output. If one is unknown, so is the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sipp.scoring.kernels.protocol import N_SQUARES, TOTAL


@dataclass(frozen=True)
class _Part:
    """The squared norms of some points of a batch."""

    squares_QB: Tensor  # of the points as they were scaled
    scale_B: np.ndarray
    points: slice


class RunningNorms:
    """The largest ratios of norms so far: `start_batch`, `add` the squares of its points, then `finish_norms`."""

    def __init__(self) -> None:
        self.sign_complexity: float | None = 0.0  # (T11); None once anything was unknown, as the others
        self.output_ratio: float | None = 0.0  # ||Z(x)|| to the norm of the output (T12)
        self.quadrants: list[Tensor] | None = []  # sums of ||Z^{st}(x)|| to the same, of each batch (T18)
        self.is_attributed = True  # to points: of this batch, whose squares these are
        self.n_points: int | None = None  # of this batch, if the weight is used in it
        self.parts: list[_Part] = []  # of this batch

    def start_batch(self, n_points: int) -> None:
        """Begins a batch in which the weight is used."""
        self.n_points = n_points

    def add(self, squares_QB: Tensor, scale_B: np.ndarray, points: slice) -> None:
        """Adds the squared norms of these points' outputs, each point multiplied by its scale, without a copy.

        Nothing is computed before the batch ends; then it is done for all weights at once.
        """
        if self.is_attributed and self.n_points is not None:
            self.parts.append(_Part(squares_QB, scale_B, points))

    def update(self, complexity: float | None, to_output: float | None, quadrants_B: Tensor | None) -> None:
        """Updates the largest ratios with those of a batch, None if they are not known."""
        self.sign_complexity = _running_max(self.sign_complexity, complexity)
        self.output_ratio = _running_max(self.output_ratio, to_output)
        if quadrants_B is None or self.quadrants is None:
            self.quadrants = None
        else:
            self.quadrants.append(quadrants_B)


def finish_norms(running: Sequence[RunningNorms], output_norms_B: Tensor | None) -> None:
    """Ends a batch for all weights. The norms of the network's outputs are on the CPU, or None if unknown."""
    used = [one for one in running if one.n_points is not None]
    known = [one for one in used if one.is_attributed]
    for one in running:
        if one.n_points is None:
            one.update(0.0, 0.0, None if output_norms_B is None else torch.zeros_like(output_norms_B))
        elif not one.is_attributed:
            one.update(None, None, None)
    if known:
        norms_WQB = torch.from_numpy(_squares(known)).sqrt()
        above_WB, total_WB = norms_WQB[:, :TOTAL].sum(1).numpy(), norms_WQB[:, TOTAL].numpy()
        complexity = _ratio(above_WB, total_WB).max(1).tolist()
        if output_norms_B is None:
            for one, largest in zip(known, complexity):
                one.update(largest, None, None)
        else:
            to_output = _ratio(total_WB, output_norms_B.numpy()).max(1).tolist()
            quadrants_WB = torch.from_numpy(_ratio(above_WB, output_norms_B.numpy()))
            for one, of_all, of_output, quadrants_B in zip(known, complexity, to_output, quadrants_WB):
                one.update(of_all, of_output, quadrants_B)
    for one in used:
        one.is_attributed, one.n_points, one.parts = True, None, []


def _squares(known: Sequence[RunningNorms]) -> np.ndarray:
    """The squared norms of all points of a batch, in the units of the model: W x Q x B; 0 without activations."""
    n_points = known[0].n_points
    assert n_points is not None
    squares_WQB = np.zeros((len(known), N_SQUARES, n_points))
    parts = [(squares_QB, part) for squares_QB, one in zip(squares_WQB, known) for part in one.parts]
    if not parts:
        return squares_WQB
    found_QX = torch.cat([part.squares_QB for _, part in parts], 1).cpu().numpy()  # a GPU is waited for only here
    found_QX = _unscaled(found_QX, np.concatenate([part.scale_B for _, part in parts]))
    start = 0
    for squares_QB, part in parts:
        stop = start + len(part.scale_B)
        squares_QB[:, part.points] += found_QX[:, start:stop]
        start = stop
    return squares_WQB


def _unscaled(squares_QX: np.ndarray, scale_X: np.ndarray) -> np.ndarray:
    """Squares of scaled points, with the scale undone; infinite beyond the range of float64."""
    with np.errstate(all="ignore"):
        factor_X = np.square(scale_X)
        is_lost_X = (factor_X == 0) | np.isinf(factor_X)
        return np.where(is_lost_X & (squares_QX > 0), math.inf, squares_QX / factor_X)


def _ratio(above_B: np.ndarray, below_B: np.ndarray) -> np.ndarray:
    """above / below, 0 for 0/0, infinity where only the denominator is 0 or anything is not finite.

    So a claim may get weaker, never stronger. (NumPy, because for so few numbers torch's overhead dominates.)
    """
    with np.errstate(all="ignore"):
        ratio_B = np.where(above_B == 0, 0.0, above_B / below_B)
    return np.where(np.isfinite(above_B) & np.isfinite(below_B), ratio_B, math.inf)


def _running_max(best: float | None, largest: float | None) -> float | None:
    """The larger of both; None once anything was unknown."""
    if best is None or largest is None:
        return None
    return math.inf if math.isnan(largest) else max(best, largest)
