"""The kernels on the CPU: float32, compiled loops over vector code, on as many threads as torch uses (README.md).

`max_ratios` goes over the windows of a layer block by block: a block of patches is unfolded in the cache, its
denominators, their reciprocals, the norms and the maxima follow at once, and nothing of the unfolded size ever
reaches memory. A patch's ratios do not change when the patch is scaled (T2), so each is divided by its sum. Few
products of an activation and a reciprocal can raise a maximum, and most are never computed (`maxima.py`).

Threads are torch's own (`native/threads.py`) over compiled code that holds no lock, each with a fixed stretch of
patches and maxima of its own, so results are the same bits in every run. Numba's own thread pool, not safe to share, is
not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from sipp.native import (
    INT64_BYTES,
    CompiledLoop,
    as_numbers,
    call_each,
    float_at,
    int_at,
    memory,
    processor,
    put_int,
    put_short,
    short_at,
    threads,
    vector,
)
from sipp.results import numerics
from sipp.scoring.kernels import checks, reference
from sipp.scoring.kernels.cpu import blocks, denominators, every_product, maxima, means, plain_loops
from sipp.scoring.kernels.cpu.blocks import DOUBLE_BYTES
from sipp.scoring.kernels.cpu.denominators import N_PATTERNS
from sipp.scoring.kernels.cpu.layout import (
    BLOCK,
    LINE,
    MOST_WEIGHTS,
    PANEL,
    PATCH_BYTES,
    ROW_TILE,
    SUM_BLOCK,
    TILE_BYTES,
    Calls,
    Layer,
    PackedWeights,
    Scratch,
)
from sipp.scoring.kernels.protocol import N_SQUARES, FusedFunctions, KernelFunctions, sum_chunk

ALIGNED = 64  # bytes: a line of the cache, and the widest vector
KEPT_GEOMETRIES = 64  # where each position and column lies: a network has many layers of few shapes
PACKING_READS = 4  # to sort a weight into its panel takes some 2 ns, as long as to read a few
Way = Literal["every product", "skipping", "means", "parts of means"]  # what is done with a block of patches
_SIGN_BIT, _INFINITY_BITS = 1 << 31, 0x7F800000  # of float32


def extremes(values_BN: Tensor) -> Tensor:
    """3 x B: lowest up to 0, highest from 0, smallest magnitude above 0 or infinity of each line, in one reading.

    A NaN makes the highest (or, with its sign bit set, the lowest) NaN. Other dtypes than float32 go the slow way.
    """
    checks.check_lines("extremes", values_BN, device="cpu")
    if values_BN.dtype != torch.float32 or values_BN.stride(1) != 1:
        return reference.extremes(values_BN)
    (n_lines, n_values), n_threads = values_BN.shape, threads.threads_for(values_BN)
    found = memory.blank(3, n_lines)
    given = memory.strided_address(values_BN), values_BN.stride(0), n_values, memory.address(found), n_lines
    call_each(_find_extremes, [(*given, *cut) for cut in threads.cut_evenly(n_lines, n_threads)])
    return found


@CompiledLoop
def _find_extremes(bits_BN: int, step: int, n: int, found_XB: int, n_lines: int, first: int, last: int) -> None:
    """Fills found[:, b] with three float32 bit patterns of each line of n such patterns (int32), lines `step` apart.

    They are found as the largest int32, the largest uint32, and the smallest magnitude above 0 less one (uint32), so
    that 0 wraps around to the largest. Integers, because NaN has an order too.
    """
    for b in range(first, last):
        highest, wrapped, smallest = np.int32(-(2**31)), np.uint32(0), np.uint32(2**32 - 1)
        for i in range(n):
            value = int_at(bits_BN, b * step + i)
            bits = np.uint32(value)
            below = np.uint32((bits & np.uint32(0x7FFFFFFF)) - np.uint32(1))
            highest = value if value > highest else highest  # Numba compiles a function for each `max`
            wrapped = bits if bits > wrapped else wrapped
            smallest = below if below < smallest else smallest
        put_int(found_XB, b, np.int32(wrapped) if wrapped > np.uint32(_SIGN_BIT) else np.int32(0))
        put_int(found_XB, n_lines + b, highest if highest > 0 else np.int32(0))
        put_int(found_XB, 2 * n_lines + b, min(np.int64(smallest) + 1, np.int64(_INFINITY_BITS)))


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights.

    Each is summed in the same order whatever stands beside it: the same bits for any chunk and any batch.
    """
    checks.check_sums("quadrant_sums", weight_GRK, patches_GKP, device="cpu")
    n_groups, n_rows, fan_in = weight_GRK.shape
    n_patches = patches_GKP.shape[-1]
    weights, patches = pack_weights(weight_GRK), patches_GKP.detach().to(torch.float32).contiguous()
    weights_at, result = as_numbers(weights), memory.blank(2, n_groups, n_rows, n_patches)
    stretches = _stretches(n_patches)
    scratches = [(memory.zeros(fan_in, BLOCK), memory.zeros(2 * n_rows, BLOCK)) for _ in stretches]
    of_all = memory.address(patches), weights_at.ctypes.data, denominators.denominators.address, n_patches
    out = memory.address(result)
    rows = [(*of_all, *cut, *map(memory.address, scratch), out) for cut, scratch in zip(stretches, scratches)]
    call_each(denominators.sums, rows)
    return result


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of a_k / D: B x G x R x K (T3), in the same order in any batch."""
    return plain_loops.sum_in_order(patches_GKBN, inverse_SGRBN, positive_GRK, torch.float32)


@dataclass
class Ratios:
    """The largest ratios of some rows so far, as compiled loops keep them, and their weights, laid out once."""

    shape: tuple[int, int, int]  # groups, rows of each, fan-in
    computes_every_product: bool  # looking for what can be skipped would cost more (`every_product.py`)
    weights: PackedWeights
    weights_at: np.ndarray  # as compiled loops read them
    signs_GKR: Tensor
    row_factors_GR: Tensor
    numbers: tuple[int, int, int]  # the last ones of `Layer`
    maxima: Tensor | None = None  # of single patches
    means: Tensor | None = None  # of points


def new_ratios(weight_GRK: Tensor, row_factors_GR: Tensor) -> Ratios:
    """What rows that have met nothing start with; row_factors_GR take the scale of the weights out of norms again."""
    checks.check_rows("new_ratios", weight_GRK, row_factors_GR)
    n_groups, n_rows, fan_in = weight_GRK.shape
    weights, signs_GKR, factors_GR = pack_weights(weight_GRK), _signs(weight_GRK), row_factors_GR.detach().contiguous()
    addresses = memory.address(factors_GR, torch.float64), memory.address(signs_GKR, torch.int16)
    return Ratios(
        shape=(n_groups, n_rows, fan_in),
        computes_every_product=_computes_every_product(weight_GRK),
        weights=weights,
        weights_at=as_numbers(weights),
        signs_GKR=signs_GKR,
        row_factors_GR=factors_GR,
        numbers=(signs_GKR.shape[-1], *addresses),
    )


def largest_ratios(ratios: Ratios) -> Tensor:
    """The largest of them so far, G x R x K."""
    n_groups, n_rows, fan_in = ratios.shape
    found = []
    if ratios.maxima is not None:
        lanes = (
            ratios.maxima.unflatten(2, (n_rows, processor.LANES)).amax(-1)
            if ratios.computes_every_product
            else ratios.maxima
        )
        found.append(lanes[..., :n_rows])
    if ratios.means is not None:
        found.append(ratios.means[..., :n_rows])
    largest = reduce(torch.maximum, found) if found else memory.zeros(n_groups, fan_in, n_rows)
    return largest.transpose(1, 2)


def max_ratios(ratios: Ratios, windows: Tensor, n_position_dims: int, factors_TB: Tensor) -> Tensor:
    """Takes a_kp / D_rp of all patches into the largest, and gives ||Z^{st}(x)||^2, ||Z(x)||^2 of each point.

    These are Q x B, float64, of the points as they are scaled. `windows` is a float32 view (B, G, *positions, *fan_in);
    factors_TB[t, b] is the scale that brings point b to a peak near 1, with the sign of t, or 0 where the point has no
    activation of that sign. The larger the ratios already are, the more is skipped.
    """
    layer = _layer("max_ratios", ratios, windows, n_position_dims, factors_TB)
    form, every_product = layer.form, ratios.computes_every_product
    if ratios.maxima is None:
        n_groups, n_rows, fan_in = ratios.shape
        ratios.maxima = memory.zeros(n_groups, fan_in, n_rows * processor.LANES if every_product else _padded(n_rows))
    stretches = _stretches(form.n_points * form.n_positions)
    bests, best_step = _one_per_thread(ratios.maxima, len(stretches)), ratios.maxima.stride(0) * vector.FLOAT_BYTES
    rest = [(*cut, memory.address(best), best_step) for cut, best in zip(stretches, bests)]
    return _run(ratios, layer, "every product" if every_product else "skipping", maxima.scan, rest, bests)


def mean_ratios(ratios: Ratios, windows: Tensor, n_position_dims: int, factors_TB: Tensor, counts_B: Tensor) -> Tensor:
    """The same for `mean` (T3): takes the means of a_kp / D_rp over a point's patches, of each sign, into the largest.

    Point b has counts_B[b] of them; others that its windows show are 0. They are summed in the same order whatever
    stands beside them.
    """
    others = [checks.Operand("counts_B", counts_B, tuple(windows.shape[:1]), checks.INTEGERS)]
    layer = _layer("mean_ratios", ratios, windows, n_position_dims, factors_TB, others)
    n_groups, n_rows, fan_in = ratios.shape
    shape = n_groups, fan_in, _padded(n_rows)
    if ratios.means is None:
        ratios.means = memory.zeros(*shape)
    n_points, n_positions, is_whole = layer.form.n_points, layer.form.n_positions, layer.form.n_positions <= BLOCK
    shares_B = counts_B.clamp(min=1).to(torch.float32).reciprocal()  # 1 / integers would be of torch's default dtype
    stretches = [
        _starts(first, last, n_positions) for first, last in threads.cut_evenly(n_points, torch.get_num_threads())
    ]
    bests = _one_per_thread(ratios.means, len(stretches))
    n_totals = 0 if is_whole else 1 + layer.has_negative  # one or two signs, where points have several blocks
    totals, shares = [memory.zeros(n_totals, *shape) for _ in stretches], memory.address(shares_B)
    rest = [
        (memory.address(starts, torch.int64), len(starts) - 1, shares, memory.address(total), memory.address(best))
        for starts, total, best in zip(stretches, totals, bests)
    ]
    return _run(ratios, layer, "means" if is_whole else "parts of means", means.scan_means, rest, bests)


KERNEL = KernelFunctions(
    extremes,
    partial(sum_chunk, quadrant_sums, sum_times),
    fused=FusedFunctions(new_ratios, max_ratios, mean_ratios, largest_ratios),
    in_float64=plain_loops.KERNEL,
)


def _one_per_thread(best: Tensor, n_threads: int) -> list[Tensor]:
    """The ratios so far for each thread to raise: the first one's are our own."""
    return [best, *(best.clone() for _ in range(n_threads - 1))]


class _Form(NamedTuple):
    """What all windows of some sizes and strides have in common."""

    n_points: int
    n_positions: int
    n_summed: int  # as in `Layer`
    in_runs: bool  # whether most patches lie one or two apart
    numbers: tuple[int, ...]  # the first ones of `Layer`
    held: tuple[Tensor, Tensor]  # what these numbers are addresses of


class _Layer(NamedTuple):
    """The windows of one call."""

    form: _Form
    has_negative: bool
    numbers: np.ndarray  # `Layer`
    held: Tensor  # what these numbers are addresses of, beside the windows and the ratios, which the caller holds


def _layer(
    where: str,
    ratios: Ratios,
    windows: Tensor,
    n_position_dims: int,
    factors_TB: Tensor,
    others: Sequence[checks.Operand] = (),
) -> _Layer:
    """What compiled loops read of the windows, once they and the `others` are checked."""
    checks.check_ratios(where, windows, n_position_dims, ratios.shape, factors_TB=factors_TB, others=others)
    form, factors_TB = _form(tuple(windows.shape), windows.stride(), n_position_dims), factors_TB.contiguous()
    has_positive, has_negative = np.logical_or.reduce(factors_TB.numpy() != 0, axis=1).tolist()
    of_this_call = windows.data_ptr(), memory.address(factors_TB), has_positive, has_negative
    numbers = np.array(Layer._make((*form.numbers, *of_this_call, *ratios.numbers)), np.int64)
    return _Layer(form, has_negative, numbers, factors_TB)


@lru_cache(maxsize=KEPT_GEOMETRIES)
def _form(sizes: tuple[int, ...], strides: tuple[int, ...], n_position_dims: int) -> _Form:
    ends = 2 + n_position_dims
    positions, fan = _offsets(sizes[2:ends], strides[2:ends]), _offsets(sizes[ends:], strides[ends:])
    steps = np.diff(positions.numpy()) if len(positions) > 1 else np.array([strides[0]])
    values, counts = np.unique(steps, return_counts=True)
    n_points, n_positions, step = sizes[0], len(positions), int(values[counts.argmax()])
    n_summed = BLOCK if n_positions % BLOCK == 0 else 1
    numbers = n_points, *strides[:2], n_positions, positions.data_ptr(), fan.data_ptr(), n_summed, step
    return _Form(n_points, n_positions, n_summed, step in (1, 2), numbers, (positions, fan))


@lru_cache(maxsize=len(get_args(Way)) * 2)
def _calls(way: Way, in_runs: bool) -> np.ndarray:
    """The functions that take a block in (`Calls`); of those that gather patches the one for how most of them lie."""
    gather = blocks.gather_runs if in_runs else blocks.gather_apart
    calls = Calls(gather.address, denominators.denominators.address, blocks.lay_out.address)
    if way == "every product":
        calls = calls._replace(raise_lines=every_product.raise_by_all.address)
    elif way == "skipping":
        calls = calls._replace(transpose_lines=maxima.transpose_lines.address, raise_lines=maxima.raise_best.address)
    else:
        calls = calls._replace(add_means=(means.add_means if way == "means" else means.add_part).address)
    return np.array(calls, np.int64)


def _run(
    ratios: Ratios, layer: _Layer, way: Way, scan: CompiledLoop, rest: Sequence[tuple[int, ...]], bests: list[Tensor]
) -> Tensor:
    """Calls `scan` in each thread, with what all read, its own memory and the rest; joins what it found.

    Returns the squared norms of each point's quadrants and output, Q x B.
    """
    form, calls = layer.form, _calls(way, layer.form.in_runs)
    squares_QX = memory.zeros(N_SQUARES, form.n_points * form.n_positions // form.n_summed, dtype=torch.float64)
    of_all = calls.ctypes.data, layer.numbers.ctypes.data, ratios.weights_at.ctypes.data
    squares = memory.address(squares_QX, torch.float64), squares_QX.shape[1]
    scratches = [_scratch(ratios) for _ in bests]  # before the threads start
    call_each(scan, [(*of_all, at.ctypes.data, *squares, *mine) for (_, at), mine in zip(scratches, rest)])
    for other in bests[1:]:
        torch.maximum(bests[0], other, out=bests[0])
    if squares_QX.shape[1] == form.n_points:
        return squares_QX
    return squares_QX.view(N_SQUARES, form.n_points, -1).sum(-1)


def _starts(first: int, last: int, n_positions: int) -> Tensor:
    """Where blocks of the patches of points first.. start, and the end: of whole points, or of parts of one."""
    if n_positions <= BLOCK:
        starts = numerics.integers(first, last, BLOCK // n_positions) * n_positions
    else:
        starts = (
            numerics.integers(first, last)[:, None] * n_positions + numerics.integers(0, n_positions, BLOCK)
        ).flatten()
    return torch.cat((starts, numerics.integers(last, last + 1) * n_positions))


def _stretches(n_patches: int) -> list[tuple[int, int]]:
    """The patches cut into one stretch of whole blocks for each of torch's threads."""
    cuts = threads.cut_evenly(-(-n_patches // BLOCK), torch.get_num_threads())
    return [(first * BLOCK, min(last * BLOCK, n_patches)) for first, last in cuts]


def _padded(n_rows: int) -> int:
    """Rows in whole tiles."""
    return -(-n_rows // ROW_TILE) * ROW_TILE


def _computes_every_product(weight_GRK: Tensor) -> bool:
    """Whether all products of a group are computed: to look for what can be skipped costs more."""
    return weight_GRK.shape[1] * weight_GRK.shape[2] <= MOST_WEIGHTS


def _scratch(ratios: Ratios) -> tuple[Tensor, np.ndarray]:
    """Memory that a thread works in, torch's, whose lines are aligned, and the addresses of its pieces (`Scratch`).

    Only the padding and the count behind it are set to zero; everything else is written before it is read.
    """
    _, n_rows, fan_in = ratios.shape
    starts, n_bytes, numbers = _scratch_pieces(n_rows, fan_in)
    whole = memory.blank(n_bytes, dtype=torch.uint8)
    memory.clear(whole, starts.d_LP + 2 * n_rows * LINE, starts.outputs_RP)
    return whole, whole.data_ptr() + numbers


@lru_cache(maxsize=KEPT_GEOMETRIES)
def _scratch_pieces(n_rows: int, fan_in: int) -> tuple[Scratch, int, np.ndarray]:
    """Where the pieces of a thread's memory begin, and its size, in bytes; the first again as an array."""
    n_tiles = _padded(n_rows) // ROW_TILE
    sizes = Scratch(
        a_KP=fan_in * LINE,
        d_LP=2 * ROW_TILE * n_tiles * LINE,
        n_computed=INT64_BYTES,
        outputs_RP=n_rows * BLOCK * DOUBLE_BYTES,
        sums_P=LINE,
        squares_XP=3 * BLOCK * DOUBLE_BYTES,
        offsets_P=BLOCK * INT64_BYTES,
        factors_P=LINE,
        transposed=n_tiles * TILE_BYTES,
        scales=n_tiles * PATCH_BYTES,
        floors=n_tiles * PATCH_BYTES,
        reach=n_tiles * LINE,
        bars_K=fan_in * vector.FLOAT_BYTES,
        masks_K=fan_in * INT64_BYTES,
    )
    ends = list(accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes))
    starts = Scratch(0, *ends[:-1])
    return starts, ends[-1], np.array(starts, np.int64)


def _offsets(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Where elements of these sizes lie, in memory, after the first; the last dimension runs fastest."""
    total = memory.zeros(1, dtype=torch.int64)
    for size, stride in zip(sizes, strides):
        total = (total[:, None] + numerics.integers(0, size) * stride).flatten()
    return total


def pack_weights(weight_GRK: Tensor) -> PackedWeights:
    """The weights as `denominators` reads them."""
    n_groups, n_rows, fan_in = weight_GRK.shape
    panels = _panels(n_rows)
    n_panels, n_chunks = len(panels) - 1, -(-fan_in // SUM_BLOCK)
    packed = PackedWeights(
        n_groups=n_groups,
        n_rows=n_rows,
        fan_in=fan_in,
        n_panels=n_panels,
        n_chunks=n_chunks,
        panels=panels,
        magnitudes_GX=memory.blank(n_groups, n_rows * fan_in),
        places_GNK=memory.blank(n_groups, n_panels, fan_in, dtype=torch.int32),
        ends_GNCQ=memory.blank(n_groups, n_panels, n_chunks, N_PATTERNS, dtype=torch.int32),
    )
    weight = weight_GRK.detach().to(torch.float32).contiguous()
    cuts = threads.cut_evenly(n_panels, threads.threads_for(weight_GRK, PACKING_READS))
    work = memory.blank(len(cuts), fan_in + N_PATTERNS + 2, dtype=torch.int64)  # each thread's patterns, their counts
    weights_at = as_numbers(packed)
    of_all = memory.address(weight), weights_at.ctypes.data
    at, n_work = memory.address(work, torch.int64), work.shape[1] * INT64_BYTES
    scratches = [(at + i * n_work, at + i * n_work + fan_in * INT64_BYTES) for i in range(len(cuts))]
    call_each(denominators.pack, [(*of_all, *scratch, *cut) for scratch, cut in zip(scratches, cuts)])
    return packed


@lru_cache(maxsize=KEPT_GEOMETRIES)
def _panels(n_rows: int) -> Tensor:
    """Where panels of PANEL rows start, and the end; two of two rows end better than one of three and one of one."""
    starts = list(range(0, n_rows, PANEL))
    if n_rows % PANEL == 1 and n_rows > 1:
        starts[-1] -= 1
    return torch.tensor([*starts, n_rows], dtype=torch.int64, device="cpu")


def _signs(weight_GRK: Tensor) -> Tensor:
    """ROW_TILE bits for every column and tile of rows, set where the weight is positive: G x K x tiles."""
    n_groups, n_rows, fan_in = weight_GRK.shape
    signs = memory.blank(n_groups, fan_in, _padded(n_rows) // ROW_TILE, dtype=torch.int16)
    weight = weight_GRK.detach().to(torch.float32).contiguous()
    given = memory.address(weight), n_groups, n_rows, fan_in, memory.address(signs, torch.int16)
    cuts = threads.cut_evenly(_padded(n_rows) // ROW_TILE, threads.threads_for(weight_GRK))
    call_each(_pack_signs, [(*given, first * ROW_TILE, min(last * ROW_TILE, n_rows)) for first, last in cuts])
    return signs


@CompiledLoop
def _pack_signs(
    weight_GRK: int, n_groups: int, n_rows: int, fan_in: int, signs_GKR: int, first: int, last: int
) -> None:
    """Sets, for a stretch of whole tiles, bit r % ROW_TILE of signs[g, k, r / ROW_TILE] where a weight is above 0."""
    n_tiles = -(-n_rows // ROW_TILE)
    for g in range(n_groups):
        for start in range(first, last, ROW_TILE):
            at = g * fan_in * n_tiles + start // ROW_TILE
            for k in range(fan_in):
                put_short(signs_GKR, at + k * n_tiles, 0)
            for i in range(ROW_TILE if n_rows - start > ROW_TILE else n_rows - start):
                row = (g * n_rows + start + i) * fan_in
                for k in range(fan_in):
                    bit = np.int16(float_at(weight_GRK, row + k) > np.float32(0.0)) << np.int16(i)
                    put_short(signs_GKR, at + k * n_tiles, short_at(signs_GKR, at + k * n_tiles) | bit)
