"""What a kernel provides (`KernelFunctions`), and how most kernels work: on chunks of patches laid out in memory.

Axes: G groups, R rows of each, K fan-in, P patches, B points, S the sign of weights, T that of activations, Q norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sipp.inputs import WeightUse, patches_of, split_windows
from sipp.results import numerics

POSITIVE, NEGATIVE = 0, 1  # index of a sign, for weights and for activations
TOTAL = 4  # index of ||Z||^2, after the four quadrants 2 t + s (T11)
N_SQUARES = TOTAL + 1


class Ratios(Protocol):
    """The largest ratios a_kp / D_rp of some rows so far (T2), or the means of points (T3), and their weights."""

    weight_GRK: Tensor

    def take_in(self, use: WeightUse, factors_TB: Tensor, counts_B: Tensor | None, chunk_bytes: int) -> Tensor:
        """Takes in the patches of a use, and gives ||Z^{st}(x)||^2, ||Z(x)||^2 of each point: Q x B, float64.

        They are of the points as `factors_TB` scales them. With `counts_B`, the patches of each point, it takes their
        means. Patches laid out in memory are in pieces of at most `chunk_bytes`.
        """
        ...

    def sensitivities(self) -> Tensor:
        """The largest so far times their weights, G x R x K."""
        ...


@dataclass(frozen=True)
class KernelFunctions:
    """The functions of a kernel: KERNEL of `reference`, `gpu`, `cpu` and `plain_loops`.

    Inputs are finite: `RunningWeight` refuses others before any kernel sees them.
    """

    extremes: Callable[[Tensor], Tensor]
    # weight_GRK and row_factors_GR, which take the scale of the rows out of norms -> their ratios, none yet:
    # `ChunkRatios`, unless the kernel is fused
    ratios: Callable[[Tensor, Tensor], Ratios]
    dtype: torch.dtype = numerics.BOUND_DTYPE  # of patches and weights
    in_float64: KernelFunctions | None = None  # for points that float32 does not hold; None: this one is float64
    # whether windows are never unfolded in memory, and each patch is divided by its sum, so that float32 holds more
    # points; such a kernel does not give the sums of points
    is_fused: bool = False


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


# --- Chunks of patches ------------------------------------------------------------------------------------------------

# A kernel that is not fused gives two functions of a `Chunk`:
#     max_chunk(chunk, best_GRK)    the larger of best_GRK and of a_kp / D_rp over patches
#     sum_chunk(chunk)              the sums over the patches of each point of a_kp / D_rp, T x B x G x R x K
# and with both squares_QB, the squared norms of the quadrants and of Z for each point as it is scaled. Those below are
# made of plain products, which `reference.py` defines; those of `gpu.py` are its own.
#
# For each sign t of the activations: D^{st} = W^s a^t for both signs s of the weights (ordinary products), their
# reciprocals, and the (max, x) product of T2, or for `mean` the ordinary product of T3. The same D are the quadrants
# Z^{st} of T11, so the norms cost no further product.

FLOAT_BYTES = numerics.SCORE_DTYPE.itemsize
Product = Callable[..., Tensor]
ChunkFunction = Callable[..., tuple[Tensor, Tensor]]


class Chunk(NamedTuple):
    """Some patches, and the weights they are multiplied with."""

    patches_GKP: Tensor  # one point after the other
    n_points: int
    weight_GRK: Tensor
    row_factors_GR: Tensor  # take the scale of the rows out of norms
    occurs: tuple[bool, bool]  # whether there are positive and negative activations


class ChunkRatios:
    """`Ratios` of patches that are laid out in memory, chunk by chunk."""

    def __init__(
        self, max_chunk: ChunkFunction, sum_chunk: ChunkFunction, weight_GRK: Tensor, row_factors_GR: Tensor
    ) -> None:
        self.max_chunk, self.sum_chunk = max_chunk, sum_chunk
        self.weight_GRK, self.row_factors_GR = weight_GRK, row_factors_GR
        self.best_GRK: Tensor | None = None  # ratios of single patches
        self.means_GRK: Tensor | None = None  # of points, times their weights

    def sensitivities(self) -> Tensor:
        """The largest so far times their weights, G x R x K."""
        if self.best_GRK is None:
            return torch.zeros_like(self.weight_GRK) if self.means_GRK is None else self.means_GRK
        found_GRK = self.weight_GRK.abs().mul_(self.best_GRK).clamp_(max=1).to(numerics.SCORE_DTYPE)
        return found_GRK if self.means_GRK is None else torch.maximum(found_GRK, self.means_GRK)

    def take_in(self, use: WeightUse, factors_TB: Tensor, counts_B: Tensor | None, chunk_bytes: int) -> Tensor:
        """Takes in the patches of a use, as `cpu.Ratios` does; gives their squares, Q x B."""
        if counts_B is not None:
            sums_TBGRK, squares_QB = self.sums_of_points(use, factors_TB, chunk_bytes)
            means_BGRK = sums_TBGRK.amax(0) / counts_B.to(sums_TBGRK.device).clamp(min=1).view(-1, 1, 1, 1)
            means_GRK = means_BGRK.amax(0).clamp_(max=1)
            self.means_GRK = means_GRK if self.means_GRK is None else torch.maximum(self.means_GRK, means_GRK)
            return squares_QB
        squares = list[tuple[slice, Tensor]]()
        for points, chunk in self._chunks(use, factors_TB, chunk_bytes):
            best_GRK = torch.zeros_like(self.weight_GRK) if self.best_GRK is None else self.best_GRK
            self.best_GRK, squares_QB = self.max_chunk(chunk, best_GRK)
            squares.append((points, squares_QB))
        return _all_squares(squares, len(use.windows))

    def sums_of_points(self, use: WeightUse, factors_TB: Tensor, chunk_bytes: int) -> tuple[Tensor, Tensor]:
        """The ratios times their weights, summed over each point's patches (T x B x G x R x K), and the squares."""
        n_points, weight_GRK, squares = len(use.windows), self.weight_GRK, list[tuple[slice, Tensor]]()
        shape = 2, n_points, *weight_GRK.shape
        sums_TBGRK = torch.zeros(shape, dtype=numerics.SCORE_DTYPE, device=weight_GRK.device)
        for points, chunk in self._chunks(use, factors_TB, chunk_bytes):
            found_TBGRK, squares_QB = self.sum_chunk(chunk)
            sums_TBGRK[:, points] += (found_TBGRK * weight_GRK.abs()).to(numerics.SCORE_DTYPE)
            squares.append((points, squares_QB))
        return sums_TBGRK, _all_squares(squares, n_points)

    def _chunks(self, use: WeightUse, factors_TB: Tensor, chunk_bytes: int) -> Iterator[tuple[slice, Chunk]]:
        """The points of a use in pieces of bounded size: which they are, and their chunk."""
        weight_GRK, all_TB = self.weight_GRK, factors_TB.numpy()
        is_double = numerics.BOUND_DTYPE in (use.windows.dtype, weight_GRK.dtype)
        scale_B = abs(all_TB).max(0).astype("f8" if is_double else "f4")  # of points of zeros: 0
        per_window = bytes_per_window(weight_GRK)
        for points, windows in split_windows(use, bytes_per_window=per_window, chunk_bytes=chunk_bytes):
            scale = numerics.on_device(scale_B[points], windows.device)
            patches_GKP = patches_of(windows, use.n_position_dims, scale, weight_GRK.dtype)
            positive, negative = (all_TB[:, points] != 0).any(1).tolist()
            yield points, Chunk(patches_GKP, len(windows), weight_GRK, self.row_factors_GR, (positive, negative))


def bytes_per_window(weight_GRK: Tensor) -> int:
    """What a window of one group takes: its values, one signed copy, and seven numbers per row."""
    _, n_rows, fan_in = weight_GRK.shape
    return FLOAT_BYTES * (2 * fan_in + 7 * n_rows)


def _all_squares(squares: list[tuple[slice, Tensor]], n_points: int) -> Tensor:
    """The squares of norms that the chunks gave, Q x B: of a point in several chunks their sum."""
    if len(squares) == 1:
        return squares[0][1]
    squares_QB = _no_squares(n_points, squares[0][1])
    for points, found_QB in squares:
        squares_QB[:, points] += found_QB
    return squares_QB


# --- Functions of a chunk from plain products -------------------------------------------------------------------------


def max_chunk(quadrant_sums: Product, max_times: Product, chunk: Chunk, best_GRK: Tensor) -> tuple[Tensor, Tensor]:
    """`max_chunk` of a kernel with these products."""
    squares_QB = _no_squares(chunk.n_points, chunk.patches_GKP)
    for _, part_GKP, inverse_SGRP in _quadrants(quadrant_sums, chunk, squares_QB):
        best_GRK = torch.maximum(best_GRK, max_times(part_GKP, inverse_SGRP, chunk.weight_GRK > 0))
    return best_GRK, squares_QB


def sum_chunk(quadrant_sums: Product, sum_times: Product, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """`sum_chunk` of a kernel with these products."""
    n_points, weight_GRK = chunk.n_points, chunk.weight_GRK
    squares_QB = _no_squares(n_points, weight_GRK)
    sums_TBGRK = torch.zeros(2, n_points, *weight_GRK.shape, dtype=weight_GRK.dtype, device=weight_GRK.device)
    for t, part_GKP, inverse_SGRP in _quadrants(quadrant_sums, chunk, squares_QB):
        by_point = part_GKP.unflatten(-1, (n_points, -1)), inverse_SGRP.unflatten(-1, (n_points, -1))
        sums_TBGRK[t] = sum_times(*by_point, weight_GRK > 0)
    return sums_TBGRK, squares_QB


def _quadrants(quadrant_sums: Product, chunk: Chunk, squares_QB: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each sign t that the activations have: t, patches a^t, and 1/D^{st} for both signs s of the weights.

    On the way it adds the squared norms of the quadrants Z^{st} = D^{st}, and of Z, to those of the points.
    """
    patches_GKP, n_points, weight_GRK, row_factors_GR, occurs = chunk
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
            squares_QB[2 * t + s] += _squares(sums_SGRP[s], row_factors_GR, n_points)
        yield t, part_GKP, numerics.inverse_or_zero(sums_SGRP)
    if z_GRP is not None:
        squares_QB[TOTAL] += _squares(z_GRP, row_factors_GR, n_points)


def _squares(values_GRP: Tensor, row_factors_GR: Tensor, n_points: int) -> Tensor:
    """The squared norm of each point's values, rows taken back to the units of the weights."""
    norms_GRB = values_GRP.unflatten(-1, (n_points, -1)).norm(dim=-1)
    squares_GRB = (norms_GRB.to(numerics.BOUND_DTYPE) * row_factors_GR[..., None]).square()
    return squares_GRB.flatten(0, 1).t().contiguous().sum(1)  # line by line: no point's sum depends on the others


def _no_squares(n_points: int, like: Tensor) -> Tensor:
    return torch.zeros(N_SQUARES, n_points, dtype=numerics.BOUND_DTYPE, device=like.device)
