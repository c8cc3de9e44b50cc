"""What one weight's uses add up to, over all batches: its sensitivities (T2, T3) and the norms of its outputs (T11).

A kernel turns windows into the largest ratio of each weight, and into squared norms. This file feeds it the windows in
pieces that fit the memory, in the precision they need.

For a point x the kernels compute ||Z^{st}(x)||^2 of the four quadrants and ||Z(x)||^2. Kept are the largest ratios,
over all points, of these to each other and to the norm of the network's output. If one is unknown, so is the largest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs import (
    Batch,
    ValueRange,
    Weight,
    WeightUse,
    patches_of,
    split_windows,
    start_value_range,
)
from sipp.results import Reduce, numerics
from sipp.scoring.kernels.protocol import N_SQUARES, TOTAL, KernelFunctions, Signs
from sipp.scoring.task import LayerSensitivities

FLOAT_BYTES = 4
ORDINARY_PEAKS = 2.0**-100, 2.0**100  # of points whose scales are far from the limits of float32
# A product of a weight and an activation (both scaled to a maximum near 1) below this could underflow in float32 and
# turn a ratio of 1 into 0/0. Where that is possible, float64 is used.
UNDERFLOW_GUARD = 2.0**-100
SMALLEST_NORMAL = torch.finfo(numerics.SCORE_DTYPE).tiny  # 2^-126: below it float32 has fewer digits, and soon none

_log = logging.getLogger("sipp")


@dataclass(frozen=True)
class _Part:
    """Consecutive points of a use, which go through a kernel in the same precision."""

    use: WeightUse  # of all points
    rows: slice  # of the weight, that meet them
    values: ValueRange
    points: slice
    n_uses: int  # of the weight in a pass
    is_wide: bool  # float64 is needed

    @property
    def n_points(self) -> int:
        return self.points.stop - self.points.start

    @property
    def counts_B(self) -> Tensor:
        """How many patches each of these points has."""
        use = self.use
        if use.counts_B is not None:
            return use.counts_B[self.points]
        return torch.full((self.n_points,), use.n_positions, dtype=torch.int64, device=use.windows.device)

    @property
    def own_use(self) -> WeightUse:
        """The use of these points."""
        if self.n_points == len(self.use.windows):
            return self.use
        return replace(self.use, windows=self.use.windows[self.points], counts_B=None)


class RunningWeight:
    """The running state of one weight: `scale` it, `add` every use, `finish_batch` after every batch, read `result`.

    Each row of the weight, and each point, is scaled by a power of two to a largest magnitude near 1. That does not
    change ratios, and a point's ratios do not depend on the rest of its batch.
    """

    def __init__(
        self, weight: Weight, parameter: nn.Parameter, kernel: KernelFunctions, reduce: Reduce, chunk_bytes: int
    ) -> None:
        self.weight, self.kernel, self.reduce = weight, kernel, reduce
        self.chunk_bytes = self.given_bytes = chunk_bytes  # halved where memory runs out; as it was given
        self.rows_FK = weight.rows(parameter.detach())
        self.range_of_rows = start_value_range(self.rows_FK, kernel.extremes)  # of a row, as of a point
        self.best_FK: Tensor | None = None  # the largest sensitivities; None: all are 0
        # by first and last row and groups: ratios, a tensor or what a fused kernel keeps, not yet times their weights
        self.ratios: dict[tuple[int, int, int], Any] = {}
        self.order: int | None = None
        self.n_outputs = 0
        # The largest ratios of norms so far; None once anything was unknown.
        self.sign_complexity: float | None = 0.0  # (T11)
        self.output_ratio: float | None = 0.0  # ||Z(x)|| to the norm of the output (T12)
        self.quadrants: list[Tensor] | None = []  # sums of ||Z^{st}(x)|| to the same, of each batch (T18)
        self._start_batch()

    def _start_batch(self) -> None:
        self.outputs_B: Tensor | int | None = None  # output scalars of each point; None: not used in this batch
        self.is_attributed = True  # the values, to points
        self.squares: list[tuple[slice, Tensor, np.ndarray]] = []  # of some points: Q x B as they were scaled; scales
        self.counts_BF: Tensor | None = None  # patches of each point for each row, for `sums_TBFK`
        self.sums_TBFK: Tensor | None = None  # `mean` only, for a weight with several uses

    def scale(self) -> None:
        """Scales the weight. Not part of __init__, so that a GPU starts on the ranges of all weights before a sync."""
        values = self.range_of_rows()
        self.scale_F = values.scale_on_device_B
        self.factors_F = numerics.on_device(1 / values.scale_B, values.device)  # undo the scale
        self.smallest_weight = float((values.smallest_B * values.scale_B).min())
        self.scaled_FK = _times_powers_of_two(self.rows_FK, values)

    def add(self, use: WeightUse, batch: Batch, values: ValueRange, n_uses: int) -> None:
        """Adds one use. `n_uses` is how often a pass uses the weight: with `mean`, several uses are summed first.

        `values` is the range of its windows.
        """
        rows = use.rows_of(self.weight)
        if use.fan_in != self.weight.fan_in:
            raise DataError(
                f"the inputs of {self.weight.name} show {use.fan_in} values to each output, which has "
                f"{self.weight.fan_in} weights",
                where=batch.where,
                fix="give inputs of the size that the layer takes",
            )
        if not all(map(math.isfinite, values.peaks)):
            raise overflow_error(self.weight.name, batch)
        n_each = use.n_positions if use.counts_B is None else use.counts_B.cpu()
        n_outputs_B = n_each * (rows.stop - rows.start)  # patches that cannot be assigned count in full for every point
        self.outputs_B = n_outputs_B if self.outputs_B is None else self.outputs_B + n_outputs_B
        self.is_attributed &= use.attributed
        if self.reduce == "mean":
            self._prepare_means(use, rows, batch, n_uses)
        with numerics.exact_matmul(use.windows, self.rows_FK):  # powers of two: half precision stays as short
            for part in self._parts(use, rows, values, n_uses):
                self._add_part(part)

    def finish_batch(self, n_points: int, output_norms_B: Tensor | None) -> None:
        """Ends a batch: the points' means are complete now. The norms of the network's outputs are None if unknown."""
        if self.outputs_B is not None:  # used in this batch
            n_outputs = int(self.outputs_B.max()) if isinstance(self.outputs_B, Tensor) else self.outputs_B
            self.n_outputs = max(self.n_outputs, n_outputs)
            if self.sums_TBFK is not None and self.counts_BF is not None:
                self._raise_to_means(self.sums_TBFK, self.counts_BF, slice(None))
        complexity = to_output = quadrants_B = None
        if self.is_attributed:
            norms_QB = torch.from_numpy(self._squares(n_points)).sqrt().numpy()
            above_B, total_B = norms_QB[:TOTAL].sum(0), norms_QB[TOTAL]
            complexity = float(_ratio(above_B, total_B).max())
            if output_norms_B is not None:
                to_output = float(_ratio(total_B, output_norms_B.numpy()).max())
                quadrants_B = torch.from_numpy(_ratio(above_B, output_norms_B.numpy()))
        self.sign_complexity = _running_max(self.sign_complexity, complexity)
        self.output_ratio = _running_max(self.output_ratio, to_output)
        if self.quadrants is None or quadrants_B is None:
            self.quadrants = None
        else:
            self.quadrants.append(quadrants_B)
        self._start_batch()

    def sensitivities(self) -> Tensor:
        """The largest ratios so far times their weights."""
        for (start, stop, n_groups), ratios in self.ratios.items():
            rows = slice(start, stop)
            weight_GRK = _rows_at(self.scaled_FK, rows).unflatten(0, (n_groups, -1))
            self._raise_ratios(rows, ratios if self.kernel.fused is None else ratios.largest(), weight_GRK)
        return torch.zeros_like(self.scaled_FK) if self.best_FK is None else self.best_FK

    def result(self) -> LayerSensitivities:
        """The scores of this weight; raises if no input ever reached it."""
        if self.order is None:
            raise unreached_error(self.weight.name)
        return LayerSensitivities(
            weight=self.weight,
            sensitivity_FK=self.sensitivities(),
            order=self.order,
            n_outputs=self.n_outputs,
            sign_complexity=self.sign_complexity,
            output_ratio=self.output_ratio,
            quadrants_B=torch.cat(self.quadrants) if self.quadrants else None,
        )

    # --- One batch ----------------------------------------------------------------------------------------------------

    def _squares(self, n_points: int) -> np.ndarray:
        """The squared norms of all points of this batch, in the units of the model, Q x B; 0 without activations."""
        total_QB = np.zeros((N_SQUARES, n_points))
        for points, squares_QB, scale_B in self.squares:
            total_QB[:, points] += _unscaled(squares_QB.cpu().numpy(), scale_B)
        return total_QB

    def _prepare_means(self, use: WeightUse, rows: slice, batch: Batch, n_uses: int) -> None:
        """Makes room for the sums of this batch's points if several uses are summed, and counts their patches."""
        if not self.is_attributed:
            raise DataError(
                f"reduce='mean' needs to know which values belong to which input, but for {self.weight.name} that is "
                "unknown",
                where=batch.where,
                fix="put the inputs along dimension 0 there (batch_first=True, or a model that transposes around it), "
                "use reduce='max', or batches of one input",
            )
        if n_uses == 1:
            return
        if self.sums_TBFK is None or self.counts_BF is None:
            shape, device = self.scaled_FK.shape, self.scale_F.device
            self.sums_TBFK = torch.zeros(2, len(use.windows), *shape, dtype=numerics.SCORE_DTYPE, device=device)
            self.counts_BF = torch.zeros(len(use.windows), shape[0], dtype=torch.int64, device=device)
        n_each = use.n_positions if use.counts_B is None else use.counts_B.to(self.counts_BF)[:, None]
        self.counts_BF[:, rows] += n_each

    def _add_part(self, part: _Part) -> None:
        """Takes the points of a part in, as many at a time as fit the memory; fewer if they do not after all."""
        start, stop = part.points.start, part.points.stop
        while start < stop:
            piece = replace(part, points=slice(start, min(start + self._n_at_once(part), stop)))
            squares_QB = self._try_in_memory(piece)
            if squares_QB is not None:
                start = piece.points.stop
                self.squares.append((piece.points, squares_QB, part.values.scale_B[piece.points]))

    def _n_at_once(self, part: _Part) -> int:
        """How many points may be taken in at once: sums take as much memory as some copies of the weight per point."""
        if self._is_maximum(part) or self._kernel(part).fused is not None:
            return max(1, len(part.use.windows) * self.chunk_bytes // self.given_bytes)
        n_weights = (part.rows.stop - part.rows.start) * self.weight.fan_in
        return max(1, self.chunk_bytes // (4 * FLOAT_BYTES * n_weights))  # two signs, with temporaries

    def _is_maximum(self, part: _Part) -> bool:
        return self.reduce == "max" or (part.n_uses == 1 and part.use.n_positions == 1)  # the mean of one patch

    def _try_in_memory(self, part: _Part) -> Tensor | None:
        """What `_take_in` gives; None if memory ran out, after halving chunk_bytes; raises if that cannot help."""
        try:
            return self._take_in(part)
        except (MemoryError, RuntimeError) as error:
            if not numerics.is_out_of_memory(error):
                raise
        least = part.use.n_groups * self._bytes_per_window(part)  # of a patch
        if self.chunk_bytes <= least:
            raise ModelError(
                f"out of memory at {self.weight.name} even one patch at a time ({least} bytes)",
                fix=f"free memory, use smaller batches, or leave the weight as it is with exclude={self.weight.name!r}",
                option="exclude",
            )
        self.chunk_bytes //= 2
        _log.warning("out of memory at %s: continuing with chunk_bytes=%d", self.weight.name, self.chunk_bytes)
        return None

    def _take_in(self, part: _Part) -> Tensor:
        """Raises maxima, or the sums of points, to what these points give, and gives the squares of their norms, Q x B.

        It may be tried again if it fails: it raises maxima, or adds once, as its last action.
        """
        if self._kernel(part).fused is not None:
            return self._by_windows(part)
        return self._by_maxima(part) if self._is_maximum(part) else self._by_sums(part)

    def _by_windows(self, part: _Part) -> Tensor:
        """One call of a fused kernel."""
        values, key = part.values, self._key(part)
        windows, factors = part.own_use.windows, values.factors_TB
        if windows.dtype != numerics.SCORE_DTYPE:
            windows, factors = values.scaled(windows, part.points), values.signs_TB
        factors_TB = torch.from_numpy(factors[:, part.points].astype(np.float32))
        if key not in self.ratios:
            assert self.kernel.fused is not None
            self.ratios[key] = self.kernel.fused(*self._operands(part))
        counts_B = None if self._is_maximum(part) else part.counts_B
        squares_QB: Tensor = self.ratios[key].take_in(windows, part.use.n_position_dims, factors_TB, counts_B)
        return squares_QB

    def _by_maxima(self, part: _Part) -> Tensor:
        """Raises the largest ratios, chunk by chunk; those in float64 become sensitivities at once, to save memory."""
        max_chunk, key, squares = self._kernel(part).max_chunk, self._key(part), list[tuple[slice, Tensor]]()
        assert max_chunk is not None
        weight_GRK, factors_GR = self._operands(part)
        for points, patches_GKP, occurs in self._chunks(part):
            n_points = points.stop - points.start
            known_GRK = None if part.is_wide else self.ratios.get(key)
            known_GRK = torch.zeros_like(weight_GRK) if known_GRK is None else known_GRK
            best_GRK, found_QB = max_chunk(patches_GKP, n_points, weight_GRK, factors_GR, occurs, known_GRK)
            if part.is_wide:
                self._raise_ratios(part.rows, best_GRK, weight_GRK)
            else:
                self.ratios[key] = best_GRK
            squares.append((points, found_QB))
        return _all_squares(squares, part)

    def _by_sums(self, part: _Part) -> Tensor:
        """Sums the ratios of points over their patches; they wait for other uses, or raise the sensitivities."""
        sum_chunk, squares = self._kernel(part).sum_chunk, list[tuple[slice, Tensor]]()
        assert sum_chunk is not None
        weight_GRK, factors_GR = self._operands(part)
        shape = 2, part.n_points, *weight_GRK.flatten(0, 1).shape
        sums_TBFK = torch.zeros(shape, dtype=numerics.SCORE_DTYPE, device=self.scale_F.device)
        for points, patches_GKP, occurs in self._chunks(part):
            n_points = points.stop - points.start
            ratios, found_QB = sum_chunk(patches_GKP, n_points, weight_GRK, factors_GR, occurs)
            sums_TBFK[:, points] += (ratios * weight_GRK.abs()).flatten(2, 3).to(numerics.SCORE_DTYPE)
            squares.append((points, found_QB))
        squares_QB = _all_squares(squares, part)
        if self.sums_TBFK is not None:
            self.sums_TBFK[:, part.points, part.rows] += sums_TBFK
        else:
            self._raise_to_means(sums_TBFK, part.counts_B[:, None].to(sums_TBFK.device), part.rows)
        return squares_QB

    def _chunks(self, part: _Part) -> Iterator[tuple[slice, Tensor, Signs]]:
        """The points of a part in pieces of bounded size: which of its points, their patches, the signs of these."""
        dtype = numerics.BOUND_DTYPE if part.is_wide else numerics.SCORE_DTYPE
        for points, windows in split_windows(
            part.own_use, bytes_per_window=self._bytes_per_window(part), chunk_bytes=self.chunk_bytes
        ):
            of_all = slice(part.points.start + points.start, part.points.start + points.stop)
            is_double = numerics.BOUND_DTYPE in (windows.dtype, dtype)
            scale_B = part.values.scale_B[of_all].astype(np.float64 if is_double else np.float32)
            patches_GKP = patches_of(
                windows, part.use.n_position_dims, numerics.on_device(scale_B, windows.device), dtype
            )
            yield points, patches_GKP, part.values.occurs(of_all)

    def _raise_to_means(self, sums_TBFK: Tensor, counts_BF: Tensor, rows: slice) -> None:
        """Raises some rows to complete sums: mean over patches, max over quadrants and points (T3)."""
        means_BFK = sums_TBFK.amax(0) / counts_BF.clamp(min=1)[..., None]
        self._raise(rows, means_BFK.amax(0).clamp_(max=1))

    def _raise_ratios(self, rows: slice, ratios_GRK: Tensor, weight_GRK: Tensor) -> None:
        """Raises some rows to ratios times their weights."""
        # into a copy of the weights: the ratios may have another memory layout
        self._raise(rows, weight_GRK.abs().mul_(ratios_GRK).clamp_(max=1).flatten(0, 1).to(numerics.SCORE_DTYPE))

    def _raise(self, rows: slice, found_FK: Tensor) -> None:
        if self.best_FK is None and found_FK.shape[0] == self.weight.n_rows:
            self.best_FK = found_FK
            return
        self.best_FK = torch.zeros_like(self.scaled_FK) if self.best_FK is None else self.best_FK
        torch.maximum(self.best_FK[rows], found_FK, out=self.best_FK[rows])

    # --- Which points float32 holds -----------------------------------------------------------------------------------

    def _parts(self, use: WeightUse, rows: slice, values: ValueRange, n_uses: int) -> Iterator[_Part]:
        """Parts with nonzero activations; those for which float32 might underflow are wide.

        Points of zeros add nothing: all their ratios are 0/0 := 0, and Z = 0. Sums of several uses are kept for each
        point, which no fused kernel does: they are wide too.
        """
        # Patches are divided by their sum at most, which is below fan-in x peak.
        is_wide = self.reduce == "mean" and n_uses > 1 and self.kernel.fused is not None
        whole = _Part(use, rows, values, slice(0, len(values.peak_B)), n_uses, is_wide)
        lowest, highest = values.peaks
        if (
            ORDINARY_PEAKS[0] <= lowest <= highest <= ORDINARY_PEAKS[1]
            and values.smallest / (highest * self.weight.fan_in) * self.smallest_weight >= 2 * UNDERFLOW_GUARD
        ):  # holds for each point, with room for rounding
            yield whole
            return
        with np.errstate(all="ignore"):
            ratio_B = values.smallest_B / (values.peak_B * self.weight.fan_in)
        is_wide_B = is_wide | (ratio_B * self.smallest_weight < UNDERFLOW_GUARD)
        is_wide_B |= _are_extreme(use.windows, values.scale_B)
        kinds = [None if peak == 0 else wide for peak, wide in zip(values.peak_B.tolist(), is_wide_B.tolist())]
        start = 0
        for kind, group in groupby(kinds):
            stop = start + len(list(group))
            if kind is not None:
                yield replace(whole, points=slice(start, stop), is_wide=kind)
            start = stop

    def _kernel(self, part: _Part) -> KernelFunctions:
        return (self.kernel.in_float64 if part.is_wide else None) or self.kernel

    def _key(self, part: _Part) -> tuple[int, int, int]:
        return part.rows.start, part.rows.stop, part.use.n_groups

    def _operands(self, part: _Part) -> tuple[Tensor, Tensor]:
        """The scaled weights (G x R x K), and the factors (G x R) that undo their scale."""
        n_groups, rows = part.use.n_groups, part.rows
        if part.is_wide:
            weight_FK = self.rows_FK[rows].to(numerics.BOUND_DTYPE) * self.scale_F[rows, None]
        else:
            weight_FK = _rows_at(self.scaled_FK, rows)
        return weight_FK.unflatten(0, (n_groups, -1)), _rows_at(self.factors_F, rows).unflatten(0, (n_groups, -1))

    def _bytes_per_window(self, part: _Part) -> int:
        """What a window of one group takes: its values, one signed copy, and seven numbers per row."""
        n_rows_per_group = (part.rows.stop - part.rows.start) // part.use.n_groups
        return FLOAT_BYTES * (2 * self.weight.fan_in + 7 * n_rows_per_group)


def _all_squares(squares: list[tuple[slice, Tensor]], part: _Part) -> Tensor:
    """The squares of norms that the chunks of a part gave, Q x B: of a point in several chunks their sum."""
    if len(squares) == 1:
        return squares[0][1]
    squares_QB = torch.zeros(N_SQUARES, part.n_points, dtype=numerics.BOUND_DTYPE, device=part.use.windows.device)
    for points, found_QB in squares:
        squares_QB[:, points] += found_QB
    return squares_QB


def _unscaled(squares_QB: np.ndarray, scale_B: np.ndarray) -> np.ndarray:
    """Squares of scaled points, with the scale undone; infinite beyond the range of float64."""
    with np.errstate(all="ignore"):
        factor_B = np.square(scale_B)
        is_lost_B = (factor_B == 0) | np.isinf(factor_B)
        return np.where(is_lost_B & (squares_QB > 0), math.inf, squares_QB / factor_B)


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


def _are_extreme(scaled: Tensor, scale_B: np.ndarray) -> np.ndarray:
    """Whether the scale of a point is not a normal float32 number, so that scaling in float32 would lose digits."""
    is_ordinary_B = (scale_B >= SMALLEST_NORMAL) & (scale_B <= 1 / SMALLEST_NORMAL)
    return np.zeros_like(is_ordinary_B) if scaled.dtype == numerics.BOUND_DTYPE else ~is_ordinary_B


def _rows_at(tensor: Tensor, rows: slice) -> Tensor:
    """These rows of a tensor; the tensor itself if they are all."""
    return tensor if rows == slice(0, tensor.shape[0]) else tensor[rows]


def _times_powers_of_two(rows_FK: Tensor, values: ValueRange) -> Tensor:
    """The rows times their scales in float32, rounded once."""
    if rows_FK.dtype == numerics.SCORE_DTYPE and not _are_extreme(rows_FK, values.scale_B).any():
        return rows_FK * numerics.on_device(values.scale_B.astype(np.float32)[:, None], values.device)
    return (rows_FK.to(numerics.BOUND_DTYPE) * values.scale_on_device_B[:, None]).to(numerics.SCORE_DTYPE)


def overflow_error(weight: str, batch: Batch) -> DataError:
    """The error for a layer whose inputs are not finite, although the given data is."""
    unit = "input" if batch.n_points == 1 else "batch"
    return DataError(
        f"the values that reach {weight} are NaN or infinite, although the {unit} itself is finite: the model "
        "overflows on it",
        where=batch.where,
        fix=f"use a wider dtype, or drop the {unit}",
    )


def unreached_error(weight: str) -> ModelError:
    """The error for a weight that no input ever reached."""
    return ModelError(
        f"no input reached {weight}: the layer is not called in forward, or its weight is used through a functional "
        "call that cannot be seen",
        fix=f"leave it as it is with exclude={weight!r}",
        option="exclude",
    )
