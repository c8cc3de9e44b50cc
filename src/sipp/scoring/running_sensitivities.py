"""The sensitivities of one weight, accumulated over all of its uses and batches (T2, T3).

A kernel turns windows into the largest ratio of each weight, and into the norms that `running_norms.py` accumulates.
This file feeds it the windows in pieces that fit the memory, in the precision they need.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.patches import (
    ValueRange,
    n_groups_of,
    n_positions_of,
    patches_of,
    rows_of,
    split_windows,
    start_value_range,
    to_device,
    to_score_dtype,
)
from sipp.results.batches import Batch, WeightUse
from sipp.results.numerics import BOUND_DTYPE, SCORE_DTYPE, UNDERFLOW_GUARD, exact_matmul, is_out_of_memory
from sipp.results.options import Reduce
from sipp.results.ranking import LayerSensitivities, Weight, to_rows
from sipp.scoring.kernels.protocol import KernelFunctions, Signs
from sipp.scoring.running_norms import RunningNorms

FLOAT_BYTES = 4
ORDINARY_PEAKS = 2.0**-100, 2.0**100  # of points whose scales are far from the limits of float32
SMALLEST_NORMAL = torch.finfo(SCORE_DTYPE).tiny  # 2^-126: below it float32 has fewer digits, and soon none

_log = logging.getLogger("sipp")


class _Run(NamedTuple):
    """Consecutive points of a use, all of which float32 holds, or none of which it does."""

    use: WeightUse  # of all points
    rows: slice  # of the weight, that meet them
    values: ValueRange
    points: slice
    is_wide: bool  # float64 is needed


@dataclass
class _Maxima:
    """The largest values so far, over some of the points."""

    sensitivity_FK: Tensor | None = None  # None: all are 0
    # by first and last row and groups: ratios, a tensor or what a fused kernel keeps, not yet times their weights
    ratios: dict[tuple[int, int, int], Any] = field(default_factory=dict)


Squares = list[tuple[Tensor, slice]]  # squared norms of some points, Q x B, and which points these are


class RunningSensitivities:
    """The running state of one weight: `scale` it, `add` every use, `finish_batch` after every batch, read `result`.

    Each row of the weight, and each point, is scaled by a power of two to a largest magnitude near 1. That does not
    change ratios, and a point's ratios do not depend on the rest of its batch.
    """

    def __init__(
        self, weight: Weight, parameter: nn.Parameter, kernel: KernelFunctions, reduce: Reduce, chunk_bytes: int
    ) -> None:
        self.weight, self.kernel, self.reduce = weight, kernel, reduce
        self.chunk_bytes = self.given_bytes = chunk_bytes  # halved where memory runs out; as it was given
        self.rows_FK = to_rows(weight, parameter.detach())
        self.range_of_rows = start_value_range(self.rows_FK, kernel.extremes)  # of a row, as of a point
        self.maxima = _Maxima()  # of S1, if S is split
        self.order: int | None = None
        self.n_outputs = 0
        self.norms = RunningNorms()
        self.can_split = True  # whether patches of S1 and S2 can be told apart, if S is split
        self.s2_maxima: _Maxima | None = None  # the same of the points of S2, if S is split (T19)
        self.outputs_B: Tensor | int | None = None  # of this batch: output scalars of each point
        self.counts_BF: Tensor | None = None  # patches of each point for each row, for `sums_TBFK`
        self.sums_TBFK: Tensor | None = None  # of this batch, `mean` only, for a weight with several uses

    def scale(self) -> None:
        """Scales the weight. Not part of __init__, so that a GPU starts on the ranges of all weights before a sync."""
        values = self.range_of_rows()
        self.scale_F = values.scale_on_device_B
        self.factors_F = to_device(1 / values.scale_B, values.device)  # undo the scale
        self.smallest_weight = float((values.smallest_B * values.scale_B).min())
        self.scaled_FK = _times_powers_of_two(self.rows_FK, values)

    def add(self, use: WeightUse, batch: Batch, values: ValueRange, n_uses: int, n_first: int | None = None) -> None:
        """Adds one use. `n_uses` is how often a pass uses the weight: with `mean`, several uses are summed first.

        `values` is the range of its windows. The points from `n_first` on belong to S2, which has its own maxima (T19).
        """
        rows = rows_of(use, self.weight)
        self._count(use, rows, batch)
        if n_first is not None and n_first < batch.n_points and not use.attributed:
            self.can_split, n_first = False, None  # the patches of S2 are not known
        if not all(map(math.isfinite, values.peaks)):
            raise overflow_error(self.weight.name, "batch", where=f"batch {batch.index}")
        if self.reduce == "mean":
            self._prepare_means(use, rows, batch, n_uses)
        with exact_matmul(use.windows, self.rows_FK):  # scales are powers of two: half precision stays as short
            for run in self._runs(use, rows, values):
                for points, maxima in self._s1_and_s2(run.points, n_first):
                    self._add_run(run._replace(points=points), maxima, n_uses)

    def _s1_and_s2(self, points: slice, n_first: int | None) -> Iterator[tuple[slice, _Maxima]]:
        """The points before `n_first` (S1) and from it on (S2), with their maxima; an empty half is left out."""
        middle = points.stop if n_first is None else min(max(n_first, points.start), points.stop)
        if points.start < middle:
            yield slice(points.start, middle), self.maxima
        if middle < points.stop:
            if self.s2_maxima is None:
                self.s2_maxima = _Maxima()
            yield slice(middle, points.stop), self.s2_maxima

    def finish_batch(self) -> None:
        """Ends a batch: the points' means are complete now."""
        if self.outputs_B is not None:  # used in this batch
            n_outputs = int(self.outputs_B.max()) if isinstance(self.outputs_B, Tensor) else self.outputs_B
            self.n_outputs = max(self.n_outputs, n_outputs)
            if self.sums_TBFK is not None and self.counts_BF is not None:
                self._raise_to_means(self.maxima, self.sums_TBFK, self.counts_BF, slice(None))
        self.outputs_B = self.counts_BF = self.sums_TBFK = None

    def sensitivities(self) -> Tensor:
        """The largest ratios so far times their weights: of the points of S1 alone, if S is split."""
        return self._times_weights(self.maxima)

    def _times_weights(self, found: _Maxima) -> Tensor:
        best_FK = found.sensitivity_FK
        for (start, stop, n_groups), ratios in found.ratios.items():
            rows = slice(start, stop)
            weight_GRK = _rows_at(self.scaled_FK, rows).unflatten(0, (n_groups, -1))
            ratios_GRK = ratios if self.kernel.fused is None else self.kernel.fused.largest_ratios(ratios)
            best_FK = self._with_larger(best_FK, rows, ratios_GRK, weight_GRK)
        return torch.zeros_like(self.scaled_FK) if best_FK is None else best_FK

    def result(self) -> LayerSensitivities:
        """The scores of this weight; raises if no input ever reached it."""
        if self.order is None:
            raise unreached_error(self.weight.name)
        s1_FK = self.sensitivities()
        s2_FK = None if self.s2_maxima is None else self._times_weights(self.s2_maxima)
        return LayerSensitivities(
            weight=self.weight,
            # a maximum of maxima: the bits of one pass over all points
            sensitivity_FK=s1_FK if s2_FK is None else torch.maximum(s1_FK, s2_FK),
            order=self.order,
            n_outputs=self.n_outputs,
            sign_complexity=self.norms.sign_complexity,
            output_ratio=self.norms.output_ratio,
            quadrants_B=torch.cat(self.norms.quadrants) if self.norms.quadrants else None,
            sensitivity_s1_FK=None if s2_FK is None else s1_FK,
            sensitivity_s2_FK=s2_FK,
        )

    def _count(self, use: WeightUse, rows: slice, batch: Batch) -> None:
        """Counts the patches of each point. Patches that cannot be assigned count in full for every point."""
        if self.outputs_B is None:
            self.outputs_B = 0
            self.norms.start_batch(batch.n_points)
        self.norms.is_attributed &= use.attributed
        n_each = n_positions_of(use) if use.counts_B is None else use.counts_B.cpu()
        self.outputs_B = self.outputs_B + n_each * (rows.stop - rows.start)

    def _prepare_means(self, use: WeightUse, rows: slice, batch: Batch, n_uses: int) -> None:
        """Makes room for the sums of this batch's points if several uses are summed, and counts their patches."""
        if not self.norms.is_attributed:
            raise DataError(
                f"reduce='mean' needs to know which values belong to which input, but for {self.weight.name} that is "
                "unknown",
                where=f"batch {batch.index}",
                fix="put the inputs along dimension 0 there (batch_first=True, or a model that transposes around it), use "
                "reduce='max', or batches of one input",
            )
        if n_uses == 1:
            return
        if self.sums_TBFK is None or self.counts_BF is None:
            shape, device = self.scaled_FK.shape, self.scale_F.device
            self.sums_TBFK = torch.zeros(2, len(use.windows), *shape, dtype=SCORE_DTYPE, device=device)
            self.counts_BF = torch.zeros(len(use.windows), shape[0], dtype=torch.int64, device=device)
        self.counts_BF[:, rows] += _counts(use).to(self.counts_BF)[:, None]

    def _add_run(self, run: _Run, maxima: _Maxima, n_uses: int) -> None:
        """Takes the points of a run in, as many at a time as fit the memory; fewer if they do not after all."""
        start = run.points.start
        while start < run.points.stop:
            work, n_points = self._pick_routine(run, n_uses)
            part = run._replace(points=slice(start, min(start + max(1, n_points), run.points.stop)))
            squares = self._try_in_memory(work, part, maxima)
            if squares is not None:
                start = part.points.stop
                for squares_QB, points in squares:
                    self.norms.add(squares_QB, run.values.scale_B[points], points)

    def _pick_routine(self, run: _Run, n_uses: int) -> tuple[Callable[[_Run, _Maxima], Squares], int]:
        """Picks the routine for this run, and how many points it can take at once.

        After running out of memory it may be tried again: it raises maxima, or adds once, as its last action.
        """
        use, kernel = run.use, self._kernel(run.is_wide)
        if kernel.fused is not None and (self.reduce == "max" or n_uses == 1):
            return self._by_windows, len(use.windows) * self.chunk_bytes // self.given_bytes
        per_point = self._bytes_per_window(use, run.rows) * n_groups_of(use) * n_positions_of(use)
        if self.reduce == "max" or (n_uses == 1 and n_positions_of(use) == 1):  # the mean over one patch is its ratio
            return self._by_maxima, self.chunk_bytes // per_point
        per_sum = FLOAT_BYTES * (run.rows.stop - run.rows.start) * self.weight.fan_in
        if n_uses == 1 and kernel.mean_chunk is not None and per_point <= self.chunk_bytes:  # whole points in a chunk
            return self._by_means, self.chunk_bytes // (2 * per_sum)  # one for each sign of the weights
        return self._by_sums, self.chunk_bytes // (4 * per_sum)  # also of the activations, with temporaries

    def _by_windows(self, run: _Run, maxima: _Maxima) -> Squares:
        """One call of a fused kernel."""
        use, values, fused = _part(run.use, run.points), run.values, self.kernel.fused
        assert fused is not None
        windows, factors = use.windows, values.factors_TB
        if windows.dtype != SCORE_DTYPE:
            windows, factors = to_score_dtype(windows, values.scale_on_device_B[run.points]), values.signs_TB
        factors_TB = torch.from_numpy(factors[:, run.points].astype(np.float32))
        key = self._key(run)
        if key not in maxima.ratios:
            maxima.ratios[key] = fused.new_ratios(*self._operands(run))
        given = maxima.ratios[key], windows, use.n_position_dims, factors_TB
        if self.reduce == "max" or n_positions_of(use) == 1:  # the mean over one patch is its ratio
            return [(fused.max_ratios(*given), run.points)]
        return [(fused.mean_ratios(*given, _counts(use)), run.points)]

    def _by_maxima(self, run: _Run, maxima: _Maxima) -> Squares:
        """Raises the largest ratios, chunk by chunk; those in float64 become sensitivities at once, to save memory."""
        max_chunk, key, squares = self._kernel(run.is_wide).max_chunk, self._key(run), Squares()
        assert max_chunk is not None
        weight_GRK, factors_GR = self._operands(run)
        for points, n_points, patches_GKP, occurs in self._chunks(run):
            known_GRK = None if run.is_wide else maxima.ratios.get(key)
            known_GRK = torch.zeros_like(weight_GRK) if known_GRK is None else known_GRK
            best_GRK, squares_QB = max_chunk(patches_GKP, n_points, weight_GRK, factors_GR, occurs, known_GRK)
            if run.is_wide:
                maxima.sensitivity_FK = self._with_larger(maxima.sensitivity_FK, run.rows, best_GRK, weight_GRK)
            else:
                maxima.ratios[key] = best_GRK
            squares.append((squares_QB, points))
        return squares

    def _by_means(self, run: _Run, maxima: _Maxima) -> Squares:
        """Raises the sensitivities to the means of whole points, chunk by chunk."""
        mean_chunk, counts_B = self.kernel.mean_chunk, _counts(run.use)
        assert mean_chunk is not None
        weight_GRK, factors_GR = self._operands(run)
        best_FK = maxima.sensitivity_FK
        best_FK = torch.zeros_like(self.scaled_FK) if best_FK is None else best_FK
        maxima.sensitivity_FK = best_FK = best_FK.contiguous()
        best_GRK, squares = best_FK[run.rows].view(weight_GRK.shape), Squares()
        for points, n_points, patches_GKP, occurs in self._chunks(run):
            given = patches_GKP, n_points, weight_GRK, factors_GR, occurs
            squares.append((mean_chunk(*given, counts_B[points], best_GRK), points))
        return squares

    def _by_sums(self, run: _Run, maxima: _Maxima) -> Squares:
        """Sums the ratios of points over their patches; they wait for other uses, or raise the sensitivities."""
        sum_chunk, rows = self._kernel(run.is_wide).sum_chunk, run.rows
        weight_GRK, factors_GR = self._operands(run)
        first, n_points = run.points.start, run.points.stop - run.points.start
        shape = 2, n_points, *weight_GRK.flatten(0, 1).shape
        sums_TBFK, squares = torch.zeros(shape, dtype=SCORE_DTYPE, device=self.scale_F.device), Squares()
        for points, n_here, patches_GKP, occurs in self._chunks(run):
            ratios, squares_QB = sum_chunk(patches_GKP, n_here, weight_GRK, factors_GR, occurs)
            here = slice(points.start - first, points.stop - first)
            sums_TBFK[:, here] += (ratios * weight_GRK.abs()).flatten(2, 3).to(SCORE_DTYPE)
            squares.append((squares_QB, points))
        if self.sums_TBFK is not None:
            self.sums_TBFK[:, run.points, rows] += sums_TBFK
        else:
            self._raise_to_means(maxima, sums_TBFK, _counts(run.use)[run.points, None].to(sums_TBFK.device), rows)
        return squares

    def _chunks(self, run: _Run) -> Iterator[tuple[slice, int, Tensor, Signs]]:
        """The points of a run in pieces of bounded size: which points, how many, their patches, the signs of these."""
        dtype = BOUND_DTYPE if run.is_wide else SCORE_DTYPE
        for piece, windows in split_windows(
            _part(run.use, run.points),
            bytes_per_window=self._bytes_per_window(run.use, run.rows),
            chunk_bytes=self.chunk_bytes,
        ):
            points = slice(run.points.start + piece.start, run.points.start + piece.stop)
            is_double = BOUND_DTYPE in (windows.dtype, dtype)
            scale_B = run.values.scale_B[points].astype(np.float64 if is_double else np.float32)
            patches_GKP = patches_of(windows, run.use.n_position_dims, to_device(scale_B, windows.device), dtype)
            yield points, len(windows), patches_GKP, run.values.occurs(points)

    def _raise_to_means(self, found: _Maxima, sums_TBFK: Tensor, counts_BF: Tensor, rows: slice) -> None:
        """Updates the running maximum with complete sums: mean over patches, max over quadrants and points (T3)."""
        means_BFK = sums_TBFK.amax(0) / counts_BF.clamp(min=1)[..., None]
        best_FK = means_BFK.amax(0).clamp_(max=1)
        found.sensitivity_FK = self._with_larger_rows(found.sensitivity_FK, rows, best_FK)

    def _with_larger(self, best_FK: Tensor | None, rows: slice, ratios_GRK: Tensor, weight_GRK: Tensor) -> Tensor:
        """Raises some rows of the sensitivities to ratios times their weights, in place, and returns all rows."""
        # into a copy of the weights: the ratios may have another memory layout
        found_FK = weight_GRK.abs().mul_(ratios_GRK).clamp_(max=1).flatten(0, 1).to(SCORE_DTYPE)
        return self._with_larger_rows(best_FK, rows, found_FK)

    def _with_larger_rows(self, best_FK: Tensor | None, rows: slice, found_FK: Tensor) -> Tensor:
        if best_FK is None and found_FK.shape[0] == self.weight.n_rows:
            return found_FK
        best_FK = torch.zeros_like(self.scaled_FK) if best_FK is None else best_FK
        torch.maximum(best_FK[rows], found_FK, out=best_FK[rows])
        return best_FK

    def _runs(self, use: WeightUse, rows: slice, values: ValueRange) -> Iterator[_Run]:
        """Runs of points with nonzero activations; those for which float32 might underflow are wide.

        Points of zeros add nothing: all their ratios are 0/0 := 0, and Z = 0.
        """
        # Patches are divided by their sum at most, which is below fan-in x peak.
        lowest, highest = values.peaks
        if (
            ORDINARY_PEAKS[0] <= lowest <= highest <= ORDINARY_PEAKS[1]
            and values.smallest / (highest * self.weight.fan_in) * self.smallest_weight >= 2 * UNDERFLOW_GUARD
        ):  # holds for each point, with room for rounding
            yield _Run(use, rows, values, slice(0, len(values.peak_B)), False)
            return
        with np.errstate(all="ignore"):
            ratio_B = values.smallest_B / (values.peak_B * self.weight.fan_in)
        is_wide_B = ratio_B * self.smallest_weight < UNDERFLOW_GUARD
        is_extreme_B = _are_extreme(use.windows, values.scale_B)
        if not (is_wide_B | (values.peak_B == 0) | is_extreme_B).any():
            yield _Run(use, rows, values, slice(0, len(is_wide_B)), False)
            return
        scales, is_extreme, is_wide = values.scale_B.tolist(), is_extreme_B.tolist(), is_wide_B.tolist()
        kinds = [
            None if peak == 0 else extreme or (wide and self._underflows(use, rows, point, scale))
            for point, (peak, scale, extreme, wide) in enumerate(
                zip(values.peak_B.tolist(), scales, is_extreme, is_wide)
            )
        ]
        start = 0
        for kind, group in groupby(kinds):
            stop = start + len(list(group))
            if kind is not None:
                yield _Run(use, rows, values, slice(start, stop), kind)
            start = stop

    def _underflows(self, use: WeightUse, rows: slice, point: int, scale: float) -> bool:
        """Whether float32 would underflow for an activation of this point, or its product with a weight of its column.

        Fused kernels divide each patch by its sum first; others do not.
        """
        one = replace(use, windows=use.windows[point : point + 1])
        smallest_GK: Tensor | None = None
        per_window = self._bytes_per_window(use, rows)
        for _, windows in split_windows(one, bytes_per_window=per_window, chunk_bytes=self.chunk_bytes):
            scale_B = torch.tensor([scale], dtype=BOUND_DTYPE, device="cpu")
            patches = patches_of(windows, use.n_position_dims, scale_B, BOUND_DTYPE).abs()
            if bool(((patches > 0) & (patches < SMALLEST_NORMAL)).any()):
                return True
            shares = patches if self.kernel.fused is None else patches / patches.sum(1, keepdim=True)
            least = torch.where(patches > 0, shares, torch.inf).amin(-1)
            smallest_GK = least if smallest_GK is None else torch.minimum(smallest_GK, least)
        assert smallest_GK is not None  # every point has patches
        products = self._scaled_rows(rows).unflatten(0, (len(smallest_GK), -1)).abs() * smallest_GK[:, None]
        return bool(((products > 0) & (products < UNDERFLOW_GUARD)).any())

    def _kernel(self, is_wide: bool) -> KernelFunctions:
        return (self.kernel.in_float64 if is_wide else None) or self.kernel

    def _key(self, run: _Run) -> tuple[int, int, int]:
        return run.rows.start, run.rows.stop, n_groups_of(run.use)

    def _operands(self, run: _Run) -> tuple[Tensor, Tensor]:
        """The scaled weights (G x R x K), and the factors (G x R) that undo their scale."""
        n_groups = n_groups_of(run.use)
        weight_FK = self._scaled_rows(run.rows) if run.is_wide else _rows_at(self.scaled_FK, run.rows)
        factors_F = _rows_at(self.factors_F, run.rows)
        return weight_FK.unflatten(0, (n_groups, -1)), factors_F.unflatten(0, (n_groups, -1))

    def _scaled_rows(self, rows: slice) -> Tensor:
        return self.rows_FK[rows].to(BOUND_DTYPE) * self.scale_F[rows, None]

    def _bytes_per_window(self, use: WeightUse, rows: slice) -> int:
        """What a window of one group takes: its values, one signed copy, and seven numbers per row."""
        n_rows_per_group = (rows.stop - rows.start) // n_groups_of(use)
        return FLOAT_BYTES * (2 * self.weight.fan_in + 7 * n_rows_per_group)

    def _try_in_memory(self, work: Callable[[_Run, _Maxima], Squares], run: _Run, maxima: _Maxima) -> Squares | None:
        """What `work` gives; None if memory ran out, after halving chunk_bytes; raises if that cannot help."""
        try:
            return work(run, maxima)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        least = n_groups_of(run.use) * self._bytes_per_window(run.use, run.rows)  # of a patch
        if self.chunk_bytes <= least:
            raise ModelError(
                f"out of memory at {self.weight.name} even one patch at a time ({least} bytes)",
                fix=f"free memory, use smaller batches, or leave the weight as it is with exclude={self.weight.name!r}",
                option="exclude",
            )
        self.chunk_bytes //= 2
        _log.warning("out of memory at %s: continuing with chunk_bytes=%d", self.weight.name, self.chunk_bytes)
        return None


def _are_extreme(scaled: Tensor, scale_B: np.ndarray) -> np.ndarray:
    """Whether the scale of a point is not a normal float32 number, so that scaling in float32 would lose digits."""
    is_ordinary_B = (scale_B >= SMALLEST_NORMAL) & (scale_B <= 1 / SMALLEST_NORMAL)
    return np.zeros_like(is_ordinary_B) if scaled.dtype == BOUND_DTYPE else ~is_ordinary_B


def _counts(use: WeightUse) -> Tensor:
    """How many patches each point has."""
    if use.counts_B is not None:
        return use.counts_B
    return torch.full(use.windows.shape[:1], n_positions_of(use), dtype=torch.int64, device=use.windows.device)


def _part(use: WeightUse, points: slice) -> WeightUse:
    """The use of some of its points."""
    if points == slice(0, use.windows.shape[0]):
        return use
    counts_B = None if use.counts_B is None else use.counts_B[points]
    return replace(use, windows=use.windows[points], counts_B=counts_B)


def _rows_at(tensor: Tensor, rows: slice) -> Tensor:
    """These rows of a tensor; the tensor itself if they are all."""
    return tensor if rows == slice(0, tensor.shape[0]) else tensor[rows]


def _times_powers_of_two(rows_FK: Tensor, values: ValueRange) -> Tensor:
    """The rows times their scales in float32, rounded once."""
    if rows_FK.dtype == SCORE_DTYPE and not _are_extreme(rows_FK, values.scale_B).any():
        return rows_FK * to_device(values.scale_B.astype(np.float32)[:, None], values.device)
    return (rows_FK.to(BOUND_DTYPE) * values.scale_on_device_B[:, None]).to(SCORE_DTYPE)


def overflow_error(weight: str, unit: str, *, where: str) -> DataError:
    """The error for a layer whose inputs are not finite, although the given data is; `unit` is "batch" or "input"."""
    return DataError(
        f"the values that reach {weight} are NaN or infinite, although the {unit} itself is finite: the model "
        "overflows on it",
        where=where,
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
