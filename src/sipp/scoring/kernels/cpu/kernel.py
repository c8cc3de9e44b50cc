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

from functools import reduce

import numpy as np
import torch
from torch import Tensor

from sipp.native import memory
from sipp.native.compiling import Native, as_numbers, byte_at, put_short, short_at
from sipp.native.instructions import FLOAT
from sipp.native.processor import LANES
from sipp.native.threads import cut_evenly, run_parallel, threads_for
from sipp.records.numerics import integers
from sipp.scoring.kernels import checks
from sipp.scoring.kernels.cpu import blocks, denominators, every_product, maxima, means, plain_loops
from sipp.scoring.kernels.cpu.denominators import pack_weights
from sipp.scoring.kernels.cpu.extremes import extremes as extremes
from sipp.scoring.kernels.cpu.layout import BLOCK, MOST_WEIGHTS, NOTHING, RANK, Calls, Layer, Scratch

FUSED = True  # has `max_ratios` and `mean_ratios`
IN_FLOAT64 = plain_loops
N_SQUARES = 5  # the four quadrants 2 t + s, then the whole output (T11)


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights.

    Each is summed in the same order whatever stands beside it: the same bits for any chunk and any batch.
    """
    checks.check_sums("quadrant_sums", weight_GRK, patches_GKP, device="cpu")
    n_groups, n_rows, fan_in = weight_GRK.shape
    n_patches = patches_GKP.shape[-1]
    weights, patches = pack_weights(weight_GRK), _array(patches_GKP)
    weights_at, result = as_numbers(weights), memory.blank(2, n_groups, n_rows, n_patches)

    stretches = _stretches(n_patches)
    scratches = [(memory.zeros(fan_in, BLOCK), memory.zeros(2 * n_rows, BLOCK)) for _ in stretches]

    def work(i: int) -> None:
        a, d = (memory.address(x) for x in scratches[i])
        given = patches.ctypes.data, weights_at.ctypes.data, denominators.denominators.address, n_patches
        denominators.sums(*given, *stretches[i], a, d, memory.address(result))

    run_parallel(work, len(stretches))
    return result


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of a_k / D: B x G x R x K (T3), in the same order in any batch."""
    return plain_loops.sum_in_order(patches_GKBN, inverse_SGRBN, positive_GRK, torch.float32)


def max_ratios(
    windows: Tensor,
    n_position_dims: int,
    weight_GRK: Tensor,
    *,
    factors_TB: Tensor,
    row_factors_GR: Tensor,
    best_GRK: Tensor,
) -> tuple[Tensor, Tensor]:
    """(max over patches of a_kp / D_rp and best, G x R x K;  ||Z^{st}(x)||^2, ||Z(x)||^2 of each point, Q x B float64).

    `windows` is a float32 view (B, G, *positions, *fan_in); factors_TB[t, b] is the scale that brings point b to a
    peak near 1, with the sign of t, or 0 where the point has no activation of that sign; row_factors_GR take the
    scale of the weights out of the norms again; best_GRK holds the maxima so far: the better, the more is skipped.
    """
    best = checks.Given("best_GRK", best_GRK, tuple(weight_GRK.shape))
    layer, squares_QP = _layer("max_ratios", windows, n_position_dims, weight_GRK, factors_TB, row_factors_GR, best)
    weights, n_patches = pack_weights(weight_GRK), squares_QP.shape[1]
    layer_at, weights_at = as_numbers(layer), as_numbers(weights)
    calls = as_numbers(_raising(weight_GRK, _calls(layer)))

    stretches = _stretches(n_patches)
    bests = [_maxima(best_GRK) for _ in stretches]
    scratches = [_scratch(weight_GRK) for _ in stretches]

    def work(i: int) -> None:
        scratch_at, best_at = as_numbers(scratches[i]), memory.address(bests[i])
        given = (x.ctypes.data for x in (calls, layer_at, weights_at, scratch_at))
        squares = memory.address(squares_QP, torch.float64)
        best_step = bests[i][0].numel() * FLOAT
        maxima.scan(*given, squares, n_patches, *stretches[i], best_at, best_step)

    run_parallel(work, len(stretches))
    return _joined(bests, weight_GRK), _by_point(squares_QP, factors_TB)


def mean_ratios(
    windows: Tensor,
    n_position_dims: int,
    weight_GRK: Tensor,
    *,
    factors_TB: Tensor,
    row_factors_GR: Tensor,
    counts_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same for `mean` (T3): the largest, over points and signs, of the mean of a_kp / D_rp over a point's patches.

    Point b has counts_B[b] of them; others that its windows show are 0. They are summed in the same order whatever
    stands beside them.
    """
    counts = checks.Given("counts_B", counts_B, tuple(windows.shape[:1]), checks.INTEGERS)
    layer, squares_QP = _layer("mean_ratios", windows, n_position_dims, weight_GRK, factors_TB, row_factors_GR, counts)
    weights, n_patches = pack_weights(weight_GRK), squares_QP.shape[1]
    layer_at, weights_at = as_numbers(layer), as_numbers(weights)
    n_groups, n_rows, fan_in = weight_GRK.shape
    n_points = len(windows)
    n_positions = n_patches // n_points
    add_means = means.add_means if n_positions <= BLOCK else means.add_part
    calls = as_numbers(_calls(layer)._replace(add_means=add_means.address))
    shares_B = counts_B.clamp(min=1).to(torch.float32).reciprocal()  # 1 / integers would be of torch's default dtype

    stretches = [_starts(first, last, n_positions) for first, last in cut_evenly(n_points, torch.get_num_threads())]
    shape = (n_groups, fan_in, _padded(n_rows))
    bests = [memory.zeros(*shape) for _ in stretches]
    totals = [memory.zeros(2, *(shape if n_positions > BLOCK else (0, 0, 0))) for _ in stretches]
    scratches = [_scratch(weight_GRK) for _ in stretches]

    def work(i: int) -> None:
        scratch_at = as_numbers(scratches[i])
        given = (x.ctypes.data for x in (calls, layer_at, weights_at, scratch_at))
        squares, starts = memory.address(squares_QP, torch.float64), memory.address(stretches[i], torch.int64)
        blocks = starts, len(stretches[i]) - 1, memory.address(shares_B)
        out = memory.address(totals[i]), memory.address(bests[i])
        means.scan_means(*given, squares, n_patches, *blocks, *out)

    run_parallel(work, len(stretches))
    mean_GRK = reduce(torch.maximum, bests)[..., :n_rows].transpose(1, 2).contiguous()
    return mean_GRK, _by_point(squares_QP, factors_TB)


def _layer(
    where: str,
    windows: Tensor,
    n_position_dims: int,
    weight_GRK: Tensor,
    factors_TB: Tensor,
    row_factors_GR: Tensor,
    beside: checks.Given,
) -> tuple[Layer, Tensor]:
    """(What compiled loops read of it, the squares of each patch to add to), once it and `beside` are checked."""
    factors = {"factors_TB": factors_TB, "row_factors_GR": row_factors_GR}
    checks.check_ratios(where, windows, n_position_dims, weight_GRK, **factors, beside=beside)
    occurs = (factors_TB != 0).any(1).tolist()
    positions, signs = _offsets(windows, range(2, 2 + n_position_dims)), _signs(weight_GRK > 0)
    layer = Layer(
        source=_flat(windows),
        n_points=len(windows),
        point_stride=windows.stride(0),
        group_stride=windows.stride(1),
        n_positions=len(positions),
        positions=positions,
        fan=_offsets(windows, range(2 + n_position_dims, windows.ndim)),
        step=_step(positions, windows.stride(0)),
        factors_TB=_array(factors_TB),
        has_positive=occurs[0],
        has_negative=occurs[1],
        n_ranks=signs.shape[-1],
        row_factors_GR=memory.array(row_factors_GR.detach().contiguous(), torch.float64),
        signs_GKR=signs,
    )
    return layer, memory.zeros(N_SQUARES, len(windows) * layer.n_positions, dtype=torch.float64)


def _step(positions: np.ndarray, point_stride: int) -> int:
    """How far most patches lie from the one before."""
    steps = np.diff(positions) if len(positions) > 1 else np.array([point_stride])
    values, counts = np.unique(steps, return_counts=True)
    return int(values[counts.argmax()])


def _calls(layer: Layer) -> Calls:
    """What every way through a layer needs; of the ways to gather patches the one for how most of them lie."""
    gather = blocks.gather_runs if layer.step in (1, 2) else blocks.gather_apart
    return Calls(gather.address, denominators.denominators.address, blocks.reciprocals.address)


def _raising(weight_GRK: Tensor, calls: Calls) -> Calls:
    """With what raises maxima: by every product, or by those that can."""
    if _takes_all(weight_GRK):
        return calls._replace(transpose_lines=NOTHING, raise_lines=every_product.raise_by_all.address)
    return calls._replace(transpose_lines=maxima.transpose_lines.address, raise_lines=maxima.raise_best.address)


def _by_point(squares_QP: Tensor, factors_TB: Tensor) -> Tensor:
    """The squares of each point's patches together, its scale taken out."""
    scale_B = factors_TB.abs().amax(0).double()
    squares_QB = squares_QP.unflatten(1, (len(scale_B), -1)).sum(-1)
    return torch.where(scale_B > 0, squares_QB / scale_B.square(), 0.0)


def _starts(first: int, last: int, n_positions: int) -> Tensor:
    """Where blocks of the patches of points first.. start, and the end: of whole points, or of parts of one."""
    if n_positions <= BLOCK:
        starts = integers(first, last, BLOCK // n_positions) * n_positions
    else:
        starts = (integers(first, last)[:, None] * n_positions + integers(0, n_positions, BLOCK)).flatten()
    return torch.cat((starts, integers(last, last + 1) * n_positions))


def _stretches(n_patches: int) -> list[tuple[int, int]]:
    """The patches cut into one stretch of whole blocks for each of torch's threads."""
    cuts = cut_evenly(-(-n_patches // BLOCK), torch.get_num_threads())
    return [(first * BLOCK, min(last * BLOCK, n_patches)) for first, last in cuts]


def _padded(n_rows: int) -> int:
    """Rows in whole ranks."""
    return -(-n_rows // RANK) * RANK


def _takes_all(weight_GRK: Tensor) -> bool:
    """Whether all products of a group are computed (`every_product.py`): to look for what can be skipped costs more."""
    return weight_GRK.shape[1] * weight_GRK.shape[2] <= MOST_WEIGHTS


def _maxima(best_GRK: Tensor) -> Tensor:
    """The maxima so far as the loops keep them: G x K x rows, in whole ranks or LANES of each."""
    n_groups, n_rows, fan_in = best_GRK.shape
    if _takes_all(best_GRK):
        lanes = memory.zeros(n_groups, fan_in, n_rows, LANES)
        lanes[..., 0] = best_GRK.transpose(1, 2)
        return lanes.flatten(2)
    ranks = memory.zeros(n_groups, fan_in, _padded(n_rows))
    ranks[..., :n_rows] = best_GRK.transpose(1, 2)
    return ranks


def _joined(bests: list[Tensor], weight_GRK: Tensor) -> Tensor:
    """The largest of all threads' maxima, G x R x K."""
    best, n_rows = reduce(torch.maximum, bests), weight_GRK.shape[1]
    best_GKR = best.unflatten(2, (n_rows, LANES)).amax(-1) if _takes_all(weight_GRK) else best[..., :n_rows]
    return best_GKR.transpose(1, 2).contiguous()


def _scratch(weight_GRK: Tensor) -> Scratch:
    """What a thread works in: torch's memory, whose lines are aligned.

    Only what no patch and no row will be written to is set to zero: the lines of padding.
    """
    _, n_rows, fan_in = weight_GRK.shape
    n_ranks = _padded(n_rows) // RANK
    d = memory.blank(2 * RANK * n_ranks, BLOCK)
    d[2 * n_rows :].zero_()
    outputs, squares = memory.blank(n_rows + 4, BLOCK, dtype=torch.float64).split((n_rows, 4))
    scales, floors = memory.blank(2, n_ranks, 2, RANK).unbind()
    return Scratch(
        a_KP=memory.array(memory.blank(fan_in, BLOCK)),
        d_LP=memory.array(d),
        outputs_RP=memory.array(outputs, torch.float64),
        sums_P=memory.array(memory.blank(BLOCK)),
        squares_XP=memory.array(squares, torch.float64),
        offsets_P=memory.array(memory.blank(BLOCK, dtype=torch.int64), torch.int64),
        factors_P=memory.array(memory.blank(BLOCK)),
        transposed=memory.array(memory.blank(n_ranks, BLOCK, 2, RANK)),
        scales=memory.array(scales),
        floors=memory.array(floors),
        reach=memory.array(memory.blank(n_ranks, BLOCK)),
        bars_K=memory.array(memory.zeros(fan_in)),
        masks_K=memory.array(memory.blank(fan_in, dtype=torch.int64), torch.int64),
        n_computed=memory.array(memory.zeros(1, dtype=torch.int64), torch.int64),
    )


def _array(tensor: Tensor) -> np.ndarray:
    return memory.array(tensor.detach().to(torch.float32).contiguous())


def _flat(windows: Tensor) -> np.ndarray:
    """The memory that the windows view, as one line."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(windows.shape, windows.stride()))
    return memory.array(windows.detach().as_strided((span,), (1,)))


def _offsets(windows: Tensor, dims: range) -> np.ndarray:
    """Where the elements along these dimensions lie, in memory, after the first; the last dimension runs fastest."""
    total = memory.zeros(dtype=torch.int64)
    for dim in dims:
        total = total[..., None] + integers(0, windows.shape[dim]) * windows.stride(dim)
    return memory.array(total.flatten(), torch.int64)


def _signs(positive_GRK: Tensor) -> np.ndarray:
    """RANK bits for every column and rank of rows, set where the weight is positive: G x K x ranks."""
    n_groups, n_rows, fan_in = positive_GRK.shape
    signs = memory.array(memory.blank(n_groups, fan_in, _padded(n_rows) // RANK, dtype=torch.int16), torch.int16)
    positive = memory.array(positive_GRK.contiguous().view(torch.uint8), torch.uint8)
    given = positive.ctypes.data, n_groups, n_rows, fan_in, signs.ctypes.data
    cuts = cut_evenly(_padded(n_rows) // RANK, threads_for(positive_GRK))
    run_parallel(lambda i: _pack_signs(*given, cuts[i][0] * RANK, min(cuts[i][1] * RANK, n_rows)), len(cuts))
    return signs


@Native
def _pack_signs(
    positive_GRK: int, n_groups: int, n_rows: int, fan_in: int, signs_GKR: int, first: int, last: int
) -> None:
    """Sets, for a stretch of whole ranks, bit r % RANK of signs[g, k, r / RANK] where a byte is not 0."""
    n_ranks = -(-n_rows // RANK)
    for g in range(n_groups):
        for start in range(first, last, RANK):
            at = g * fan_in * n_ranks + start // RANK
            for k in range(fan_in):
                put_short(signs_GKR, at + k * n_ranks, 0)
            for i in range(RANK if n_rows - start > RANK else n_rows - start):
                row = (g * n_rows + start + i) * fan_in
                for k in range(fan_in):
                    bit = np.int16(byte_at(positive_GRK, row + k)) << np.int16(i)
                    put_short(signs_GKR, at + k * n_ranks, short_at(signs_GKR, at + k * n_ranks) | bit)
