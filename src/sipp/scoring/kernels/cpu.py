"""The kernel on the CPU: float32, compiled loops over vector code, on as many threads as torch uses (README.md).

`Ratios.take_in` goes over the windows of a layer block by block: a block of patches is unfolded in the cache, its
denominators, their reciprocals, the norms and the maxima follow at once, and nothing of the unfolded size ever
reaches memory. Few products of an activation and a reciprocal can raise a maximum, and most are never computed.

Threads are torch's own (`native/threads.py`) over compiled code that holds no lock, each with a fixed stretch of
patches and maxima of its own, so results are the same bits in every run. Numba's own thread pool, not safe to share, is
not used.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sipp.inputs import WeightUse
from sipp.native import compiling, memory, threads
from sipp.results import numerics
from sipp.scoring.kernels import loops, plain_loops, reference
from sipp.scoring.kernels.loops import EVERY_PRODUCT, MEANS, SKIPPING, SUM_BLOCK, Job, Scratch, Weights
from sipp.scoring.kernels.protocol import N_SQUARES, KernelFunctions
from sipp.scoring.kernels.vector_code import (
    BLOCK,
    DOUBLE_BYTES,
    FLOAT_BYTES,
    LANES,
    LINE,
    LONG_BYTES,
    N_PATTERNS,
    PANEL,
    PATCH_BYTES,
    ROW_TILE,
    TILE_BYTES,
)

MOST_WEIGHTS = 512  # of a group where every product is computed, rows times fan-in: their maxima take 32 KiB
ALIGNED = 64  # bytes: a line of the cache, and the widest vector
KEPT_GEOMETRIES = 64  # where each position and column lies: a network has many layers of few shapes
MOST_COPIED = 1 << 30  # bytes that all copies of the maxima of one weight may take
PACKING_READS = 4  # to sort a weight into its panel takes some 2 ns, as long as to read a few


def extremes(values_BN: Tensor) -> Tensor:
    """3 x B: lowest up to 0, highest from 0, smallest magnitude above 0 or infinity of each line, in one reading.

    A NaN makes the highest (or, with its sign bit set, the lowest) NaN. Other dtypes than float32 go the slow way.
    """
    if values_BN.dtype != torch.float32 or values_BN.stride(1) != 1:
        return reference.extremes(values_BN)
    (n_lines, n_values), n_threads = values_BN.shape, threads.threads_for(values_BN)
    found = memory.blank(3, n_lines)
    given = values_BN.data_ptr(), values_BN.stride(0), n_values, memory.address(found), n_lines
    cuts = threads.cut_evenly(n_lines, n_threads)
    compiling.call_each(loops.find_extremes, [(*given, *cut) for cut in cuts])
    return found


class Ratios:
    """The largest ratios a_kp / D_rp of some rows so far (T2), or the means of points (T3), and their weights."""

    def __init__(self, weight_GRK: Tensor, row_factors_GR: Tensor) -> None:
        """row_factors_GR take the scale of the weights out of norms again."""
        self.weight_GRK, self.shape = weight_GRK, weight_GRK.shape
        self.computes_every_product = weight_GRK[0].numel() <= MOST_WEIGHTS  # else looks for what can be skipped
        self.weights = pack_weights(weight_GRK, row_factors_GR)
        self.maxima: Tensor | None = None  # of single patches, as compiled loops keep them
        self.means: Tensor | None = None  # of points

    def largest(self) -> Tensor:
        """The largest of them so far, G x R x K."""
        n_groups, n_rows, fan_in = self.shape
        largest = memory.zeros(n_groups, fan_in, n_rows) if self.means is None else self.means[..., :n_rows]
        if self.maxima is not None:
            maxima = self.maxima.unflatten(2, (n_rows, LANES)).amax(-1) if self.computes_every_product else self.maxima
            largest = torch.maximum(largest, maxima[..., :n_rows])
        return largest.transpose(1, 2)

    def sensitivities(self) -> Tensor:
        """The largest of them so far times their weights, G x R x K."""
        return self.weight_GRK.abs().mul_(self.largest()).clamp_(max=1)

    def take_in(
        self, use: WeightUse, factors_TB: Tensor, counts_B: Tensor | None = None, chunk_bytes: int = 0
    ) -> Tensor:
        """Takes the ratios of all patches into the largest, and gives ||Z^{st}(x)||^2, ||Z(x)||^2 of each point.

        These are Q x B, float64, of the points as they are scaled. The windows are float32; factors_TB[t, b] is the
        scale that brings point b to a peak near 1, with the sign of t, or 0 where the point has no activation of that
        sign. The larger the ratios already are, the more is skipped. No patches are laid out in chunks: `chunk_bytes`
        makes no difference.

        With `counts_B` it takes the means over a point's patches, of each sign: point b has counts_B[b] of them, others
        that its windows show are 0. They are summed in the same order whatever stands beside them.
        """
        windows = use.windows
        form = _form(tuple(windows.shape), windows.stride(), use.n_position_dims)
        _, n_rows, fan_in = self.shape
        n_points, n_positions, way = len(windows), len(form.positions), self._way(counts_B)
        best = self._ratios_of(way)
        n_threads = min(torch.get_num_threads(), max(1, MOST_COPIED // (best.nbytes or 1)))  # each has a copy of `best`
        if counts_B is None:
            shares_B, cuts = None, _stretches(n_points * n_positions, n_threads)
        else:
            shares_B = counts_B.clamp(min=1).to(torch.float32).reciprocal()  # 1 / integers: of torch's default dtype
            of_points = threads.cut_evenly(n_points, n_threads)
            cuts = [(first * n_positions, last * n_positions) for first, last in of_points]
        factors_TB = factors_TB.to(torch.float32).contiguous()
        has_positive, has_negative = np.logical_or.reduce(factors_TB.numpy() != 0, axis=1).tolist()
        n_summed = BLOCK if n_positions % BLOCK == 0 else 1
        squares_QX = memory.zeros(N_SQUARES, n_points * n_positions // n_summed, dtype=torch.float64)
        job = Job(
            n_points=n_points,
            n_positions=n_positions,
            point_stride=windows.stride(0),
            group_stride=windows.stride(1),
            positions=form.positions.data_ptr(),
            fan=form.fan.data_ptr(),
            step=form.step,
            source=memory.strided_address(windows),
            factors_TB=memory.address(factors_TB),
            has_positive=has_positive,
            has_negative=has_negative,
            way=way,
            shares_B=0 if shares_B is None else memory.address(shares_B),
            n_summed=n_summed,
            n_squares=squares_QX.shape[1],
            squares_QX=squares_QX.data_ptr(),
        )
        numbers, group_step = np.array(job, np.int64), best.stride(0) * FLOAT_BYTES
        n_totals = 1 + has_negative if way == MEANS and n_positions > BLOCK else 0  # of signs: points of several blocks
        bests = [best, *(best.clone() for _ in cuts[1:])]  # of each thread; what it works in is there before it starts
        scratches = [_scratch(n_rows, fan_in) for _ in cuts]
        totals = [memory.zeros(n_totals, *best.shape) for _ in cuts]
        of_all = self.weights.numbers.ctypes.data, numbers.ctypes.data
        of_each = zip(scratches, bests, totals, cuts)
        rows = [
            (*of_all, at.ctypes.data, one.data_ptr(), group_step, wait.data_ptr(), *cut)
            for (_, at), one, wait, cut in of_each
        ]
        compiling.call_each(loops.take_in, rows)
        for other in bests[1:]:
            torch.maximum(best, other, out=best)
        return squares_QX if squares_QX.shape[1] == n_points else squares_QX.view(N_SQUARES, n_points, -1).sum(-1)

    def _way(self, counts_B: Tensor | None) -> int:
        if counts_B is not None:
            return MEANS
        return EVERY_PRODUCT if self.computes_every_product else SKIPPING

    def _ratios_of(self, way: int) -> Tensor:
        """The ratios that are raised this way, G x K x rows; of every product LANES for each row."""
        n_groups, n_rows, fan_in = self.shape
        if way == MEANS:
            if self.means is None:
                self.means = memory.zeros(n_groups, fan_in, _padded(n_rows))
            return self.means
        if self.maxima is None:
            self.maxima = memory.zeros(n_groups, fan_in, n_rows * LANES if way == EVERY_PRODUCT else _padded(n_rows))
        return self.maxima


KERNEL = KernelFunctions(extremes, Ratios, torch.float32, in_float64=plain_loops.KERNEL, is_fused=True)


def _stretches(n_patches: int, n_threads: int) -> list[tuple[int, int]]:
    """The patches cut into one stretch of whole blocks for each thread."""
    cuts = threads.cut_evenly(-(-n_patches // BLOCK), n_threads)
    return [(first * BLOCK, min(last * BLOCK, n_patches)) for first, last in cuts]


def _padded(n_rows: int) -> int:
    """Rows in whole tiles."""
    return -(-n_rows // ROW_TILE) * ROW_TILE


class _Form(NamedTuple):
    """The key of all windows of some sizes and strides, and what follows from it."""

    positions: Tensor  # where each lies, in numbers after the first
    fan: Tensor  # and each column of a patch
    step: int  # as in `Job`


@lru_cache(maxsize=KEPT_GEOMETRIES)
def _form(sizes: tuple[int, ...], strides: tuple[int, ...], n_position_dims: int) -> _Form:
    ends = 2 + n_position_dims
    positions, fan = _offsets(sizes[2:ends], strides[2:ends]), _offsets(sizes[ends:], strides[ends:])
    steps = np.diff(positions.numpy()) if len(positions) > 1 else np.array([strides[0]])
    values, counts = np.unique(steps, return_counts=True)
    step = int(values[counts.argmax()])
    return _Form(positions, fan, step if step in (1, 2) else 0)


def _offsets(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Where elements of these sizes lie, in memory, after the first; the last dimension runs fastest."""
    total = memory.zeros(1, dtype=torch.int64)
    for size, stride in zip(sizes, strides):
        total = (total[:, None] + numerics.integers(0, size) * stride).flatten()
    return total


def _scratch(n_rows: int, fan_in: int) -> tuple[Tensor, np.ndarray]:
    """Memory that a thread works in, torch's, whose lines are aligned, and the addresses of its pieces (`Scratch`).

    Only the padding of the rows is set to zero; everything else is written before it is read.
    """
    starts, n_bytes = _scratch_pieces(n_rows, fan_in)
    whole = memory.blank(n_bytes, dtype=torch.uint8)
    whole[starts.d_LP + 2 * n_rows * LINE : starts.outputs_RP].zero_()
    return whole, whole.data_ptr() + np.array(starts, np.int64)


@lru_cache(maxsize=KEPT_GEOMETRIES)
def _scratch_pieces(n_rows: int, fan_in: int) -> tuple[Scratch, int]:
    """Where the pieces of a thread's memory begin, and its size, in bytes."""
    n_tiles = _padded(n_rows) // ROW_TILE
    sizes = Scratch(
        a_KP=fan_in * LINE,
        d_LP=2 * ROW_TILE * n_tiles * LINE,
        outputs_RP=n_rows * BLOCK * DOUBLE_BYTES,
        sums_P=LINE,
        squares_XP=3 * BLOCK * DOUBLE_BYTES,
        offsets_P=BLOCK * LONG_BYTES,
        factors_P=LINE,
        transposed=n_tiles * TILE_BYTES,
        scales=n_tiles * PATCH_BYTES,
        floors=n_tiles * PATCH_BYTES,
        reach=n_tiles * LINE,
        bars_K=fan_in * FLOAT_BYTES,
        masks_K=fan_in * LONG_BYTES,
    )
    ends = list(accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes))
    return Scratch(0, *ends[:-1]), ends[-1]


class PackedWeights(NamedTuple):
    """The weights as compiled loops read them (`Weights`)."""

    numbers: np.ndarray
    held: tuple[Tensor | np.ndarray, ...]  # what these are addresses of


def pack_weights(weight_GRK: Tensor, row_factors_GR: Tensor) -> PackedWeights:
    """The weights sorted into panels, and their signs."""
    n_groups, n_rows, fan_in = weight_GRK.shape
    weight, factors_GR = weight_GRK.detach().to(torch.float32).contiguous(), row_factors_GR.detach().contiguous()
    panels, n_tiles = _panels(n_rows), _padded(n_rows) // ROW_TILE
    n_panels, n_chunks = len(panels) - 1, -(-fan_in // SUM_BLOCK)
    magnitudes_GX = memory.blank(n_groups, n_rows * fan_in)
    places_GNK = memory.blank(n_groups, n_panels, fan_in, dtype=torch.int32)
    ends_GNCQ = memory.blank(n_groups, n_panels, n_chunks, N_PATTERNS, dtype=torch.int32)
    is_positive = memory.zeros(n_groups, fan_in, n_tiles * ROW_TILE, dtype=torch.bool)
    is_positive[..., :n_rows] = weight.transpose(1, 2) > 0
    signs_GKR = np.packbits(is_positive.numpy(), axis=-1, bitorder="little")
    weights = Weights(
        n_groups=n_groups,
        n_rows=n_rows,
        fan_in=fan_in,
        n_tiles=n_tiles,
        n_panels=n_panels,
        panels=panels.data_ptr(),
        magnitudes_GX=magnitudes_GX.data_ptr(),
        places_GNK=places_GNK.data_ptr(),
        ends_GNCQ=ends_GNCQ.data_ptr(),
        signs_GKR=signs_GKR.ctypes.data,
        row_factors_GR=memory.address(factors_GR, torch.float64),
    )
    numbers = np.array(weights, np.int64)
    cuts = threads.cut_evenly(n_panels, threads.threads_for(weight, PACKING_READS))
    work = memory.blank(len(cuts), fan_in + N_PATTERNS + 2, dtype=torch.int64)  # each thread's patterns, their counts
    of_all = memory.address(weight), numbers.ctypes.data
    places = [(row.data_ptr(), row.data_ptr() + fan_in * LONG_BYTES) for row in work]
    compiling.call_each(loops.pack, [(*of_all, *mine, *cut) for mine, cut in zip(places, cuts)])
    return PackedWeights(numbers, (panels, magnitudes_GX, places_GNK, ends_GNCQ, signs_GKR, factors_GR))


@lru_cache(maxsize=KEPT_GEOMETRIES)
def _panels(n_rows: int) -> Tensor:
    """Where panels of PANEL rows start, and the end; two of two rows end better than one of three and one of one."""
    starts = list(range(0, n_rows, PANEL))
    if n_rows % PANEL == 1 and n_rows > 1:
        starts[-1] -= 1
    return torch.tensor([*starts, n_rows], dtype=torch.int64, device="cpu")
