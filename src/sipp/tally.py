"""What has been seen of one weight so far: its running sensitivities, and the norms of its outputs.

For a chunk of patches and each sign t of the activations: D^{st} = W^s a^t for both signs s of the weights (ordinary
products), their reciprocals, and the (max, x) product of T2, or for `mean` the ordinary product of T3. The same D
are the quadrants Z^{st} of T11, so the sign complexity costs no further product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.kernels import reference
from sipp.numerics import (
    BOUND_DTYPE,
    SCORE_DTYPE,
    UNDERFLOW_GUARD,
    exact_matmul,
    inverse_or_zero,
    row_scales,
    scale_to_one,
    smallest_positive,
)
from sipp.patches import patches_of, split_windows
from sipp.records import Batch, LayerScores, Reduce, Use, Weight, to_rows

POSITIVE, NEGATIVE = 0, 1  # index of a sign, for weights and for activations
TOTAL = 4  # index of ||Z||^2, after the four quadrants 2 * t + s
FLOAT_BYTES = 4


class Tally:
    """The running state of one weight: `add` every use, `close_batch` after every batch, then take the `result`.

    The weight is used scaled by powers of two, each row's largest magnitude near 1: ratios do not notice.
    """

    def __init__(self, weight: Weight, model: nn.Module, kernel: ModuleType, reduce: Reduce, chunk_bytes: int) -> None:
        self.weight, self.kernel, self.reduce, self.chunk_bytes = weight, kernel, reduce, chunk_bytes
        self.rows_FK = to_rows(weight, model.get_parameter(weight.name).detach())
        self.scale_F = row_scales(self.rows_FK)[:, 0]
        self.scaled_FK = self._scaled_rows(slice(None)).to(SCORE_DTYPE)
        self.smallest_weight = smallest_positive(self._scaled_rows(slice(None)).abs())
        self.sensitivity_FK = torch.zeros_like(self.scaled_FK)
        self.order: int | None = None
        self.n_outputs = 0
        self.sign_complexity: float | None = 0.0
        self.output_ratio: float | None = 0.0
        self._open_batch()

    def _open_batch(self) -> None:
        self.attributed = True
        self.counts_BF: Tensor | None = None  # patches of each point, for each row
        self.squares_QB: Tensor | None = None  # ||Z^{st}(x)||^2 of the four quadrants, then ||Z(x)||^2
        self.sums_TBFK: Tensor | None = None  # `mean` only, for a weight with several uses

    def add(self, use: Use, batch: Batch, n_uses: int) -> None:
        """Nothing; takes one use into account. `n_uses` is how many this batch makes of the weight (for `mean`)."""
        n_rows = use.n_rows or self.weight.n_rows - use.row_start
        rows = slice(use.row_start, use.row_start + n_rows)
        self._count(use, rows, batch)
        with exact_matmul():
            if self.reduce == "max":
                for points, chunk_GKP, scale in self._chunks(use, rows, batch):
                    best_FK = self._max_over(chunk_GKP, rows, points, scale)
                    torch.maximum(self.sensitivity_FK[rows], best_FK, out=self.sensitivity_FK[rows])
            else:
                self._add_mean(use, rows, batch, n_uses)

    def close_batch(self, output_norms_B: Tensor | None) -> None:
        """Nothing; ends a batch: the points' means and norms are complete now."""
        if self.counts_BF is None or self.squares_QB is None:  # not used in this batch
            return
        self.n_outputs = max(self.n_outputs, int(self.counts_BF.sum(1).max()))
        if self.sums_TBFK is not None:
            self._fold(self.sums_TBFK, self.counts_BF, slice(None))
        norms_QB = self.squares_QB.sqrt()
        complexity_B = to_output_B = None
        if self.attributed:
            complexity_B = _ratio(norms_QB[:TOTAL].sum(0), norms_QB[TOTAL])
            if output_norms_B is not None:
                to_output_B = _ratio(norms_QB[TOTAL], output_norms_B)
        self.sign_complexity = _running_max(self.sign_complexity, complexity_B)
        self.output_ratio = _running_max(self.output_ratio, to_output_B)
        self._open_batch()

    def result(self) -> LayerScores:
        """The scores of this weight; raises if no input ever reached it."""
        if self.order is None:
            raise ModelError(
                f"no input reached {self.weight.name}: the layer is not called in forward, or its weight is used "
                f"through a functional call that cannot be seen; leave it as it is with exclude={self.weight.name!r}"
            )
        return LayerScores(
            weight=self.weight,
            sensitivity_FK=self.sensitivity_FK,
            order=self.order,
            n_outputs=self.n_outputs,
            sign_complexity=self.sign_complexity,
            output_ratio=self.output_ratio,
        )

    def _count(self, use: Use, rows: slice, batch: Batch) -> None:
        """Notes how many patches each point brings. A use that hides its points counts in full for every point."""
        if self.counts_BF is None:
            device = self.scale_F.device
            self.counts_BF = torch.zeros(batch.n_points, self.weight.n_rows, dtype=torch.int64, device=device)
            self.squares_QB = torch.zeros(TOTAL + 1, batch.n_points, dtype=BOUND_DTYPE, device=device)
        self.attributed &= use.attributed
        n_patches = use.windows.shape[2 : 2 + use.n_position_dims].numel()
        counts_B = torch.full((len(use.windows),), n_patches) if use.counts_B is None else use.counts_B
        self.counts_BF[:, rows] += counts_B.to(self.counts_BF)[:, None]

    def _chunks(self, use: Use, rows: slice, batch: Batch, offset: int = 0) -> Iterator[tuple[slice, Tensor, float]]:
        """The patches of a use in pieces of bounded memory: points, patches_GKP scaled to a peak near 1, the scale."""
        n_rows_per_group = (rows.stop - rows.start) // use.windows.shape[1]
        per_patch = FLOAT_BYTES * (2 * self.weight.fan_in + 5 * n_rows_per_group)
        for points, windows in split_windows(use, bytes_per_patch=per_patch, chunk_bytes=self.chunk_bytes):
            chunk_GKP = patches_of(windows, use.n_position_dims)
            peak = float(torch.stack(torch.aminmax(chunk_GKP)).abs().amax())
            if not peak < float("inf"):
                raise DataError(
                    f"batch {batch.index}: the inputs that reach {self.weight.name} are NaN or infinite, although the "
                    "batch itself is finite: the model overflows on it; use a wider dtype, or drop the batch"
                )
            if peak > 0:  # an all-zero chunk has no ratio but 0/0 := 0, and Z = 0
                scale = scale_to_one(peak)
                yield slice(points.start + offset, points.stop + offset), chunk_GKP.mul_(scale), scale

    def _max_over(self, chunk_GKP: Tensor, rows: slice, points: slice, scale: float) -> Tensor:
        """The largest ratio of each weight over the chunk, F x K."""
        kernel, weight_GRK, chunk_GKP = self._precision(chunk_GKP, rows)
        best_GRK: Tensor | None = None
        for _, patches_GKP, inverse_SGRP in self._quadrants(kernel, weight_GRK, chunk_GKP, rows, points, scale):
            product = kernel.max_times(patches_GKP, inverse_SGRP, weight_GRK > 0)
            best_GRK = product if best_GRK is None else torch.maximum(best_GRK, product)
        assert best_GRK is not None  # the peak is positive, so one of the signs occurs
        return (best_GRK * weight_GRK.abs()).clamp_(max=1).flatten(0, 1).to(SCORE_DTYPE)

    def _add_mean(self, use: Use, rows: slice, batch: Batch, n_uses: int) -> None:
        """Adds one use to the sums over patches, a block of points at a time."""
        if not self.attributed:
            raise DataError(
                f"batch {batch.index}: reduce='mean' needs the points of a batch told apart, but the inputs of "
                f"{self.weight.name} do not show them; use reduce='max', or batches of one point"
            )
        n_points, n_rows = len(use.windows), rows.stop - rows.start
        if n_uses > 1 and self.sums_TBFK is None:
            self.sums_TBFK = torch.zeros(2, n_points, *self.scaled_FK.shape, device=self.scale_F.device)
        block = max(1, self.chunk_bytes // (4 * FLOAT_BYTES * n_rows * self.weight.fan_in))
        for start in range(0, n_points, block):
            part = replace(use, windows=use.windows[start : start + block])
            sums_TBFK = torch.zeros(2, len(part.windows), n_rows, self.weight.fan_in, device=self.scale_F.device)
            for points, chunk_GKP, scale in self._chunks(part, rows, batch, offset=start):
                within = slice(points.start - start, points.stop - start)
                self._sum_over(chunk_GKP, rows, points, scale, sums_TBFK[:, within])
            if self.sums_TBFK is not None:
                self.sums_TBFK[:, start : start + block, rows] += sums_TBFK
            elif self.counts_BF is not None:
                self._fold(sums_TBFK, self.counts_BF[start : start + block, rows], rows)

    def _sum_over(self, chunk_GKP: Tensor, rows: slice, points: slice, scale: float, sums_TBFK: Tensor) -> None:
        kernel, weight_GRK, chunk_GKP = self._precision(chunk_GKP, rows)
        n_points = points.stop - points.start
        for t, patches_GKP, inverse_SGRP in self._quadrants(kernel, weight_GRK, chunk_GKP, rows, points, scale):
            by_point = patches_GKP.unflatten(-1, (n_points, -1)), inverse_SGRP.unflatten(-1, (n_points, -1))
            product_BGRK = kernel.sum_times(*by_point, weight_GRK > 0) * weight_GRK.abs()
            sums_TBFK[t] += product_BGRK.flatten(1, 2).to(SCORE_DTYPE)

    def _quadrants(
        self, kernel: ModuleType, weight_GRK: Tensor, chunk_GKP: Tensor, rows: slice, points: slice, scale: float
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """For each sign t that the activations have: t, patches a^t, and 1/D^{st} for both signs s of the weights.

        On the way it adds the norms of the quadrants Z^{st} = D^{st}, and of Z, to those of the points.
        """
        lowest, highest = (float(x) for x in torch.aminmax(chunk_GKP))
        z_GRP: Tensor | None = None
        for t, occurs in ((POSITIVE, highest > 0), (NEGATIVE, lowest < 0)):
            if not occurs:
                continue
            is_pure = lowest >= 0 if t == POSITIVE else False
            patches_GKP = chunk_GKP if is_pure else (chunk_GKP if t == POSITIVE else -chunk_GKP).clamp_min(0)
            sums_SGRP = kernel.quadrant_sums(weight_GRK, patches_GKP)
            signed = sums_SGRP[POSITIVE] - sums_SGRP[NEGATIVE]
            z_GRP = (signed if t == POSITIVE else -signed) if z_GRP is None else z_GRP - signed
            for s in (POSITIVE, NEGATIVE):
                self._add_squares(2 * t + s, sums_SGRP[s], rows, points, scale)
            yield t, patches_GKP, inverse_or_zero(sums_SGRP)
        if z_GRP is not None:
            self._add_squares(TOTAL, z_GRP, rows, points, scale)

    def _add_squares(self, index: int, values_GRP: Tensor, rows: slice, points: slice, scale: float) -> None:
        """Adds the squared norms of these outputs, in the units of the model, to their points (T11)."""
        if not self.attributed or self.squares_QB is None:
            return
        norms_FB = values_GRP.unflatten(-1, (points.stop - points.start, -1)).flatten(0, 1).norm(dim=-1)
        factors_F1 = 1 / (self.scale_F[rows, None] * scale)
        self.squares_QB[index, points] += (norms_FB.to(BOUND_DTYPE) * factors_F1).square().sum(0)

    def _precision(self, chunk_GKP: Tensor, rows: slice) -> tuple[ModuleType, Tensor, Tensor]:
        """The kernel, the scaled weights (G x R x K) and the chunk in float32; float64 where float32 might underflow.

        Underflow needs a weight and an activation of the same column whose product is below the guard.
        """
        weight_FK = self.scaled_FK[rows]
        n_groups = len(chunk_GKP)
        if smallest_positive(chunk_GKP.abs()) * self.smallest_weight < UNDERFLOW_GUARD:
            wide_FK = self._scaled_rows(rows)
            magnitude = chunk_GKP.to(BOUND_DTYPE).abs()
            smallest_GK = torch.where(magnitude > 0, magnitude, torch.inf).amin(-1)
            products = wide_FK.unflatten(0, (n_groups, -1)).abs() * smallest_GK[:, None]
            if bool(((products > 0) & (products < UNDERFLOW_GUARD)).any()):
                return reference, wide_FK.unflatten(0, (n_groups, -1)), chunk_GKP.to(BOUND_DTYPE)
        return self.kernel, weight_FK.unflatten(0, (n_groups, -1)), chunk_GKP.to(SCORE_DTYPE)

    def _scaled_rows(self, rows: slice) -> Tensor:
        return self.rows_FK[rows].to(BOUND_DTYPE) * self.scale_F[rows, None]

    def _fold(self, sums_TBFK: Tensor, counts_BF: Tensor, rows: slice) -> None:
        """Takes complete sums into the running maximum: mean over patches, max over quadrants, max over points (T3)."""
        means_BFK = sums_TBFK.amax(0) / counts_BF.clamp(min=1)[..., None]
        best_FK = means_BFK.amax(0).clamp_(max=1)
        torch.maximum(self.sensitivity_FK[rows], best_FK, out=self.sensitivity_FK[rows])


def _ratio(above_B: Tensor, below_B: Tensor) -> Tensor:
    """above / below, 0 for 0/0, infinity where only the denominator is 0: a claim may get weaker, never stronger."""
    return torch.where(above_B > 0, above_B / below_B, torch.zeros_like(above_B))


def _running_max(best: float | None, ratios_B: Tensor | None) -> float | None:
    """The larger of both; None once anything was unknown."""
    if best is None or ratios_B is None:
        return None
    return max(best, float(ratios_B.max()))
