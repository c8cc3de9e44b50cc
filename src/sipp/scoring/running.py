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

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs import (
    Batch,
    ValueRange,
    Weight,
    WeightUse,
    value_range,
)
from sipp.results import Reduce, numerics
from sipp.scoring.kernels.protocol import (
    FLOAT_BYTES,
    N_SQUARES,
    TOTAL,
    ChunkRatios,
    KernelFunctions,
    Ratios,
    bytes_per_window,
)
from sipp.scoring.task import LayerSensitivities

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
    """The running state of one weight: `add` every use, `finish_batch` after every batch, read `result`.

    Each row of the weight, and each point, is scaled by a power of two to a largest magnitude near 1. That does not
    change ratios, and a point's ratios do not depend on the rest of its batch.
    """

    def __init__(
        self, weight: Weight, parameter: nn.Parameter, kernel: KernelFunctions, reduce: Reduce, chunk_bytes: int
    ) -> None:
        self.weight, self.kernel, self.reduce = weight, kernel, reduce
        self.chunk_bytes = self.given_bytes = chunk_bytes  # halved where memory runs out; as it was given
        self.rows_FK = weight.rows(parameter.detach())
        values = value_range(self.rows_FK, kernel.extremes)  # of a row, as of a point
        self.scale_F = values.scale_on_device_B
        self.factors_F = numerics.on_device(1 / values.scale_B, values.device)  # undo the scale
        self.smallest_weight = float((values.smallest_B * values.scale_B).min())
        self.scaled_FK = _times_powers_of_two(self.rows_FK, values)
        self.best_FK: Tensor | None = None  # the largest sensitivities; None: all are 0
        # what a kernel keeps, by first and last row, groups and whether it is in float64
        self.ratios: dict[tuple[int, int, int, bool], Ratios] = {}
        self.n_outputs = 0
        self.norms = _RunningNorms()
        self._start_batch()

    def _start_batch(self) -> None:
        self.outputs_B: Tensor | int | None = None  # output scalars of each point; None: not used in this batch
        self.is_attributed = True  # the values, to points
        self.counts_BF: Tensor | None = None  # patches of each point for each row, for `sums_TBFK`
        self.sums_TBFK: Tensor | None = None  # `mean` only, for a weight with several uses

    def add(self, use: WeightUse, batch: Batch, values: ValueRange, n_uses: int) -> None:
        """Adds one use. `n_uses` is how often a pass uses the weight: with `mean`, several uses are summed first.

        `values` is the range of its windows.
        """
        rows = use.rows_of(self.weight)
        if not all(map(math.isfinite, values.peaks)):
            raise overflow_error(self.weight.name, batch)
        n_each = use.n_positions if use.counts_B is None else use.counts_B.cpu()
        n_outputs_B = n_each * (rows.stop - rows.start)  # patches that cannot be assigned count in full for every point
        self.outputs_B = n_outputs_B if self.outputs_B is None else self.outputs_B + n_outputs_B
        self.is_attributed &= use.attributed
        if self.reduce == "mean":
            self._prepare_means(use, rows, batch, n_uses)
        with numerics.exact_matmul(use.windows, self.rows_FK):  # powers of two: half precision stays as short
            for part in self._parts(use, rows, values):
                self._add_part(part)

    def finish_batch(self, n_points: int, output_norms_B: Tensor | None) -> None:
        """Ends a batch: the points' means are complete now. The norms of the network's outputs are None if unknown."""
        if self.outputs_B is not None:  # used in this batch
            n_outputs = int(self.outputs_B.max()) if isinstance(self.outputs_B, Tensor) else self.outputs_B
            self.n_outputs = max(self.n_outputs, n_outputs)
            if self.sums_TBFK is not None and self.counts_BF is not None:
                means_BFK = self.sums_TBFK.amax(0) / self.counts_BF.clamp(min=1)[..., None]
                self._raise(slice(None), means_BFK.amax(0).clamp_(max=1))
        self.norms.finish_batch(n_points, output_norms_B, is_attributed=self.is_attributed)
        self._start_batch()

    def sensitivities(self) -> Tensor:
        """The largest ratios so far times their weights."""
        for (start, stop, *_), ratios in self.ratios.items():
            self._raise(slice(start, stop), ratios.sensitivities().flatten(0, 1))
        return torch.zeros_like(self.scaled_FK) if self.best_FK is None else self.best_FK

    def result(self, order: int, mean_FK: Tensor | None) -> LayerSensitivities:
        """What was found of this weight, with its place in the order of execution, and its means if they are known."""
        return LayerSensitivities(
            weight=self.weight,
            sensitivity_FK=self.sensitivities(),
            order=order,
            n_outputs=self.n_outputs,
            sign_complexity=self.norms.sign_complexity,
            output_ratio=self.norms.output_ratio,
            quadrants_B=torch.cat(self.norms.quadrants) if self.norms.quadrants else None,
            mean_FK=mean_FK,
        )

    # --- One batch ----------------------------------------------------------------------------------------------------

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
                self.norms.add(piece.points, squares_QB, part.values.scale_B[piece.points])

    def _n_at_once(self, part: _Part) -> int:
        """How many points may be taken in at once: sums take as much memory as some copies of the weight per point."""
        if self._is_maximum(part) or self._kernel(part).is_fused:
            return max(1, len(part.use.windows) * self.chunk_bytes // self.given_bytes)
        n_weights = (part.rows.stop - part.rows.start) * self.weight.fan_in
        return max(1, self.chunk_bytes // (4 * FLOAT_BYTES * n_weights))  # two signs, with temporaries

    def _is_maximum(self, part: _Part) -> bool:
        return self.reduce == "max" or (self.sums_TBFK is None and part.use.n_positions == 1)  # the mean of one patch

    def _try_in_memory(self, part: _Part) -> Tensor | None:
        """What `_take_in` gives; None if memory ran out, after halving chunk_bytes; raises if that cannot help."""
        try:
            return self._take_in(part)
        except (MemoryError, RuntimeError) as error:
            if not numerics.is_out_of_memory(error):
                raise
        least = part.use.n_groups * bytes_per_window(self._ratios_of(part).weight_GRK)  # of a patch
        if self.chunk_bytes <= least:
            raise ModelError(
                f"out of memory at {self.weight.name} even one patch at a time ({least} bytes)",
                fix=f"free memory, use smaller batches, or leave the weight as it is with exclude={self.weight.name!r}",
                option="exclude",
            )
        self.chunk_bytes //= 2
        _log.warning("out of memory at %s: continuing in pieces of %d bytes", self.weight.name, self.chunk_bytes)
        return None

    def _take_in(self, part: _Part) -> Tensor:
        """Raises maxima, or the sums of points, to what these points give, and gives the squares of their norms, Q x B.

        It may be tried again if it fails: it raises maxima, or adds once, as its last action.
        """
        ratios, use, values, points = self._ratios_of(part), part.own_use, part.values, part.points
        factors = values.factors_TB
        if self._kernel(part).is_fused and use.windows.dtype != numerics.SCORE_DTYPE:
            use, factors = replace(use, windows=values.scaled(use.windows, points)), values.signs_TB
        factors_TB = torch.from_numpy(factors[:, points])
        if self.sums_TBFK is None:
            counts_B = None if self._is_maximum(part) else part.counts_B
            return ratios.take_in(use, factors_TB, counts_B, self.chunk_bytes)
        assert isinstance(ratios, ChunkRatios)  # a fused kernel does not give these sums: its float64 one does
        sums_TBGRK, squares_QB = ratios.sums_of_points(use, factors_TB, self.chunk_bytes)
        self.sums_TBFK[:, points, part.rows] += sums_TBGRK.flatten(2, 3)
        return squares_QB

    def _ratios_of(self, part: _Part) -> Ratios:
        """The ratios of the rows and in the precision of this part."""
        key = part.rows.start, part.rows.stop, part.use.n_groups, part.is_wide
        if key not in self.ratios:
            kernel, rows = self._kernel(part), part.rows
            weight_FK = _rows_at(self.scaled_FK, rows)
            if kernel.dtype == numerics.BOUND_DTYPE:
                weight_FK = self.rows_FK[rows].to(kernel.dtype) * self.scale_F[rows, None]
            each = weight_FK, _rows_at(self.factors_F, rows)
            self.ratios[key] = kernel.ratios(*(tensor.unflatten(0, (part.use.n_groups, -1)) for tensor in each))
        return self.ratios[key]

    def _raise(self, rows: slice, found_FK: Tensor) -> None:
        if self.best_FK is None and found_FK.shape[0] == self.weight.n_rows:
            self.best_FK = found_FK
            return
        self.best_FK = torch.zeros_like(self.scaled_FK) if self.best_FK is None else self.best_FK
        torch.maximum(self.best_FK[rows], found_FK, out=self.best_FK[rows])

    # --- Which points float32 holds -----------------------------------------------------------------------------------

    def _parts(self, use: WeightUse, rows: slice, values: ValueRange) -> Iterator[_Part]:
        """Parts with nonzero activations; those for which float32 might underflow are wide.

        Points of zeros add nothing: all their ratios are 0/0 := 0, and Z = 0. Sums of several uses are kept for each
        point, which no fused kernel does: they are wide too.
        """
        # Patches are divided by their sum at most, which is below fan-in x peak.
        is_wide = self.sums_TBFK is not None and self.kernel.is_fused
        lowest, highest = values.peaks
        if (
            ORDINARY_PEAKS[0] <= lowest <= highest <= ORDINARY_PEAKS[1]
            and values.smallest / (highest * self.weight.fan_in) * self.smallest_weight >= 2 * UNDERFLOW_GUARD
        ):  # holds for each point, with room for rounding
            yield _Part(use, rows, values, slice(0, len(values.peak_B)), is_wide)
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
                yield _Part(use, rows, values, slice(start, stop), is_wide=kind)
            start = stop

    def _kernel(self, part: _Part) -> KernelFunctions:
        return (self.kernel.in_float64 if part.is_wide else None) or self.kernel


class _RunningNorms:
    """The largest ratios of norms so far, over all points; None once anything was unknown."""

    def __init__(self) -> None:
        self.sign_complexity: float | None = 0.0  # (T11)
        self.output_ratio: float | None = 0.0  # ||Z(x)|| to the norm of the output (T12)
        self.quadrants: list[Tensor] | None = []  # sums of ||Z^{st}(x)|| to the same, of each batch (T18)
        self.squares: list[tuple[slice, Tensor, np.ndarray]] = []  # of some points of this batch; their scales

    def add(self, points: slice, squares_QB: Tensor, scale_B: np.ndarray) -> None:
        """Adds the squared norms of some points, which are of the points times their scales."""
        self.squares.append((points, squares_QB, scale_B))

    def finish_batch(self, n_points: int, output_norms_B: Tensor | None, *, is_attributed: bool) -> None:
        """Ends a batch of so many points, whose outputs have these norms."""
        complexity = to_output = quadrants_B = None
        if is_attributed:
            squares_QB = np.zeros((N_SQUARES, n_points))  # in the units of the model; 0 without activations
            for points, found_QB, scale_B in self.squares:
                squares_QB[:, points] += _unscaled(found_QB.cpu().numpy(), scale_B)
            norms_QB = torch.from_numpy(squares_QB).sqrt().numpy()
            above_B, total_B = norms_QB[:TOTAL].sum(0), norms_QB[TOTAL]
            complexity = float(_ratio(above_B, total_B).max())
            if output_norms_B is not None:
                to_output = float(_ratio(total_B, output_norms_B.numpy()).max())
                quadrants_B = torch.from_numpy(_ratio(above_B, output_norms_B.numpy()))
        self.squares.clear()
        self.sign_complexity = _running_max(self.sign_complexity, complexity)
        self.output_ratio = _running_max(self.output_ratio, to_output)
        if self.quadrants is None or quadrants_B is None:
            self.quadrants = None
        else:
            self.quadrants.append(quadrants_B)


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
