"""The kernels on the GPU: float32, ordinary products in torch, the (max, x) product in Triton.

The (max, x) product computes few products: those that can raise a maximum, the likeliest first. The test is that of the
CPU (`loops.py`): in column k, patch p can only matter to a band of rows if its activation times its reach is above
the column's bar. A program handles one column and one band, and goes through the patches in chunks. In each chunk it
takes the patch with the highest product of the two, raises the band's maxima and with them the bar, until no other
patch of the chunk is above the bar. Where inputs and weights are of half precision, the caller lets products run in
TF32, which holds every bit of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from sipp.results import numerics
from sipp.scoring.kernels import protocol, reference
from sipp.scoring.kernels.protocol import N_SQUARES, Chunk, ChunkRatios, KernelFunctions

LEAST_ROWS, MOST_ROWS = 32, 128  # of a band: whole warps; more would leave fewer programs
CHUNK = 128  # patches looked at together, a power of two
MOST_SINGLE = 32  # patches of a chunk that are taken one by one; where more are above the bar, all of them are
PATCHES = 32  # of one program that turns sums into reciprocals, or looks for the largest of these
# four times as many warps as an H200 can hold: later ones start with the maxima of earlier ones, and none is waited for
PROGRAMS_WANTED = 4 * 132 * 64
SHORTEST_STRETCH = 1024  # patches of a program: its first chunk costs the most

# of a line, whose reciprocals may add up to infinity: without a scale it would count as one that has none
LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-126)
LARGEST_SCALE: tl.constexpr = tl.constexpr(protocol.LARGEST_SCALE)
LEAST_BAR: tl.constexpr = tl.constexpr(protocol.LEAST_BAR)  # below it all patches above 0 count
LARGEST_BAR: tl.constexpr = tl.constexpr(protocol.LARGEST_BAR)
LEAST_REACH: tl.constexpr = tl.constexpr(protocol.LEAST_REACH)
BAR_SLACK: tl.constexpr = tl.constexpr(protocol.BAR_SLACK)


def max_chunk(chunk: Chunk, best_GRK: Tensor) -> tuple[Tensor, Tensor]:
    """`protocol.max_chunk` in few launches: sums, then all that is made of them in one reading, then maxima.

    best_GRK is raised in place unless it has gaps.
    """
    squares_QGP, signed_GRK = _no_squares(chunk.patches_GKP), chunk.weight_GRK.contiguous()
    for part_GKP, inverse_GPSR, totals in _inverted(chunk, squares_QGP, rows_last=True):
        best_GRK = _raised(part_GKP, inverse_GPSR, totals.sum(0), signed_GRK, best_GRK)
    return best_GRK, _by_point(squares_QGP, chunk.n_points)


def sum_chunk(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """`protocol.sum_chunk` in few launches."""
    n_points, weight_GRK, squares_QGP = chunk.n_points, chunk.weight_GRK, _no_squares(chunk.patches_GKP)
    sums_TBGRK = torch.zeros(2, n_points, *weight_GRK.shape, dtype=torch.float32, device=weight_GRK.device)
    signs = [t for t in range(2) if chunk.occurs[t]]
    found = _inverted(chunk, squares_QGP, rows_last=False)
    for t, (part_GKP, inverse_GLP, _) in zip(signs, found):
        positives_BGRK, negatives_BGRK = _sums_by_point(part_GKP, inverse_GLP, n_points).chunk(2, dim=2)
        sums_TBGRK[t] = torch.where(weight_GRK > 0, positives_BGRK, negatives_BGRK)
    return sums_TBGRK, _by_point(squares_QGP, n_points)


KERNEL = KernelFunctions(
    reference.extremes, partial(ChunkRatios, max_chunk, sum_chunk), dtype=torch.float32, in_float64=reference.KERNEL
)

# Lines L are the rows by both signs of their weights: S x R.


def _both_signs(weight_GRK: Tensor) -> Tensor:
    signed = weight_GRK[:, None] * _plus_and_minus(weight_GRK.device)
    return signed.clamp_(min=0).flatten(1, 2)


@lru_cache(maxsize=8)
def _plus_and_minus(device: torch.device) -> Tensor:
    return torch.tensor([1.0, -1.0], dtype=torch.float32, device=device)[:, None, None]


def _sums_by_point(patches_GKP: Tensor, inverse_GLP: Tensor, n_points: int) -> Tensor:
    """B x G x L x K: the sums over a point's patches of a_k / D, of both signs of the weights."""
    patches_GKBN, inverse_GLBN = (each.unflatten(-1, (n_points, -1)) for each in (patches_GKP, inverse_GLP))
    with numerics.exact_matmul():  # of each point a product of lines x patches and patches x columns, without a copy
        return inverse_GLBN.permute(2, 0, 1, 3) @ patches_GKBN.permute(2, 0, 3, 1)


def _no_squares(patches_GKP: Tensor) -> Tensor:
    """Room for the squares of every patch."""
    n_groups, _, n_patches = patches_GKP.shape
    return torch.zeros(N_SQUARES, n_groups, n_patches, dtype=torch.float64, device=patches_GKP.device)


def _by_point(squares_QGP: Tensor, n_points: int) -> Tensor:
    return squares_QGP.unflatten(-1, (n_points, -1)).sum((1, 3))


def _inverted(chunk: Chunk, squares_QGP: Tensor, *, rows_last: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each sign t that occurs: the patches a^t, 1/D^{st} (G x P x S x R, or as lines G x L x P), and their sums.

    The sums are of blocks of patches (blocks x G x S x R). On the way it notes the squared norms of the quadrants, and
    of the output: the last one is of all signs.
    """
    patches_GKP, _, weight_GRK, row_factors_GR, occurs = chunk
    n_groups, n_rows, _ = weight_GRK.shape
    n_patches = patches_GKP.shape[-1]
    both_GLK, first_GLP = _both_signs(weight_GRK), None
    n_blocks = triton.cdiv(n_patches, PATCHES)
    rows = min(MOST_ROWS // 2, max(16, triton.next_power_of_2(n_rows)))
    is_pure = not all(occurs)
    for t in range(2):
        if not occurs[t]:
            continue
        part_GKP = patches_GKP if t == 0 else -patches_GKP
        if not is_pure:
            part_GKP = part_GKP.clamp(min=0)
        sums_GLP = torch.bmm(both_GLK, part_GKP)  # in the precision that the caller has set
        shape = (n_groups, n_patches, 2, n_rows) if rows_last else sums_GLP.shape
        inverse = torch.empty(shape, dtype=torch.float32, device=sums_GLP.device)
        totals = torch.empty(n_blocks, n_groups, 2, n_rows, dtype=torch.float32, device=sums_GLP.device)
        _invert[(n_blocks, n_groups)](
            sums_GLP,
            sums_GLP if first_GLP is None else first_GLP,
            row_factors_GR.contiguous(),
            inverse,
            totals,
            squares_QGP,
            n_groups,
            n_rows,
            n_patches,
            SIGN=t,
            IS_SECOND=first_GLP is not None,
            ROWS_LAST=rows_last,
            ROWS=rows,
            PATCHES=PATCHES,
        )
        first_GLP = sums_GLP
        yield part_GKP, inverse, totals


def _raised(
    patches_GKP: Tensor, inverse_GPSR: Tensor, totals_GSR: Tensor, signed_GRK: Tensor, best_GRK: Tensor
) -> Tensor:
    """Raises best_GRK to the largest of all products, in place or, if it has gaps, in a copy; returns it.

    totals_GSR are the reciprocals, summed over patches; signed_GRK the weights, or int8 that is above 0 where a weight
    is.
    """
    n_groups, n_rows, fan_in = signed_GRK.shape
    patches_GKP = patches_GKP.contiguous()  # as they are laid out already: the kernel counts on it
    n_patches = patches_GKP.shape[-1]
    rows = max(LEAST_ROWS, min(MOST_ROWS, triton.next_power_of_2(n_rows)))
    n_bands = triton.cdiv(n_rows, rows)
    reach = torch.empty(n_groups, n_bands, n_patches, dtype=torch.float32, device=patches_GKP.device)
    _reaches[(triton.cdiv(n_patches, PATCHES), n_groups * n_bands)](
        inverse_GPSR, totals_GSR, reach, n_rows, n_patches, ROWS=rows, PATCHES=PATCHES
    )
    best = best_GRK.contiguous()
    n_wanted = triton.cdiv(PROGRAMS_WANTED, fan_in * n_groups * n_bands)
    shortest = max(SHORTEST_STRETCH, triton.cdiv(n_patches, n_wanted))
    stretch = max(CHUNK, triton.next_power_of_2(min(shortest, n_patches)))  # few values: each is compiled by itself
    _raise_best[(fan_in, n_groups * n_bands, triton.cdiv(n_patches, stretch))](
        patches_GKP,
        inverse_GPSR,
        totals_GSR,
        reach,
        signed_GRK,
        best.view(torch.int32),
        n_rows,
        fan_in,
        n_patches,
        STRETCH=stretch,
        ROWS=rows,
        CHUNK=CHUNK,
        MOST_SINGLE=MOST_SINGLE,
        num_warps=1,
    )
    return best


@triton.jit
def _invert(  # type: ignore[no-untyped-def]
    sums,
    first,
    factors,
    inverse,
    totals,
    squares,
    n_groups,
    n_rows,
    n_patches,
    SIGN: tl.constexpr,
    IS_SECOND: tl.constexpr,
    ROWS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    PATCHES: tl.constexpr,
):
    """inverse = 1 / sums[g, s, r, p], 0 for 0; totals[block, g, s, r], its sums; squares[q, g, p] over the rows.

    q: the lines of both signs s, of the sign t of the activations, 2 t + s; and the outputs, less those of `first` if
    this is the second sign.
    """
    group = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    is_patch = p < n_patches
    positives = tl.zeros((PATCHES,), tl.float64)
    negatives = tl.zeros((PATCHES,), tl.float64)
    outputs = tl.zeros((PATCHES,), tl.float64)
    for start in range(0, n_rows, ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < n_rows)[:, None] & is_patch[None, :]
        factor = tl.load(factors + group * n_rows + r, r < n_rows, other=0.0)[:, None]
        at = (group * 2 * n_rows + r)[:, None] * n_patches + p[None, :]  # of positive weights
        below = ((group * 2 + 1) * n_rows + r)[:, None] * n_patches + p[None, :]
        positive = tl.load(sums + at, inside, other=0.0)
        negative = tl.load(sums + below, inside, other=0.0)
        output = positive.to(tl.float64) - negative.to(tl.float64)
        if IS_SECOND:
            output -= tl.load(first + at, inside, other=0.0).to(tl.float64)
            output += tl.load(first + below, inside, other=0.0).to(tl.float64)
        scaled = positive.to(tl.float64) * factor
        positives += tl.sum(scaled * scaled, axis=0)
        scaled = negative.to(tl.float64) * factor
        negatives += tl.sum(scaled * scaled, axis=0)
        scaled = output * factor
        outputs += tl.sum(scaled * scaled, axis=0)
        total_at = totals + (tl.program_id(0) * n_groups + group) * 2 * n_rows + r
        for s in tl.static_range(2):
            value = positive if s == 0 else negative
            value = tl.where(value > 0, tl.div_rn(1.0, tl.where(value > 0, value, 1.0)), 0.0)
            tl.store(total_at + s * n_rows, tl.sum(value, axis=1), r < n_rows)
            if ROWS_LAST:
                to = ((group * n_patches + p) * 2 + s) * n_rows
                tl.store(inverse + to[:, None] + r[None, :], tl.trans(value), tl.trans(inside))
            else:
                tl.store(inverse + (at if s == 0 else below), value, inside)
    tl.store(squares + (2 * SIGN * n_groups + group) * n_patches + p, positives, is_patch)
    tl.store(squares + ((2 * SIGN + 1) * n_groups + group) * n_patches + p, negatives, is_patch)
    tl.store(squares + (4 * n_groups + group) * n_patches + p, outputs, is_patch)


@triton.jit
def _scale(total, n_patches):  # type: ignore[no-untyped-def]
    """1 / the mean of a line's reciprocals, of which this is the sum; 0 where it has none."""
    mean = total / n_patches
    scale = tl.div_rn(1.0, tl.where(mean > 0, mean, 1.0))
    return tl.where(mean > 0, tl.minimum(tl.maximum(scale, LEAST_SCALE), LARGEST_SCALE), 0.0)


@triton.jit
def _reaches(  # type: ignore[no-untyped-def]
    inverse, totals, reach, n_rows, n_patches, ROWS: tl.constexpr, PATCHES: tl.constexpr
):
    """reach[g, band, p]: the largest of inverse[g, p, s, r] times the scale of its line over the rows of the band."""
    n_bands = tl.cdiv(n_rows, ROWS)
    group = tl.program_id(1) // n_bands
    band = tl.program_id(1) % n_bands
    r = band * ROWS + tl.arange(0, ROWS)
    p = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    inside = (p < n_patches)[:, None] & (r < n_rows)[None, :]
    highest = tl.full((PATCHES,), LEAST_REACH, tl.float32)
    for s in tl.static_range(2):
        start = ((group * n_patches + p).to(tl.int64) * 2 + s) * n_rows
        value = tl.load(inverse + start[:, None] + r[None, :], inside, other=0.0)
        scale = _scale(tl.load(totals + (group * 2 + s) * n_rows + r, r < n_rows, other=0.0), n_patches)
        highest = tl.maximum(highest, tl.max(value * scale[None, :], axis=1))
    tl.store(reach + (group * n_bands + band).to(tl.int64) * n_patches + p, highest, p < n_patches)


@triton.jit
def _bar(best, scale):  # type: ignore[no-untyped-def]
    """The least of best * scale, less rounding, over the rows that have a scale; 0 where the test would prove nothing.

    As the bits of a float, like all that is compared across threads: GPUs have an instruction for integers there.
    """
    scaled = tl.where(scale > 0, tl.minimum(best * scale, LARGEST_BAR), LARGEST_BAR)
    bar = tl.min(scaled.to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True) * BAR_SLACK
    return tl.where(bar < LEAST_BAR, 0.0, bar).to(tl.int32, bitcast=True)


@triton.jit
def _raise_best(  # type: ignore[no-untyped-def]
    patches,
    transposed,
    totals,
    reach,
    signed,
    best,
    n_rows,
    fan_in,
    n_patches,
    STRETCH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_SINGLE: tl.constexpr,
):
    """Raises best[g, r, k] to the largest a[g, k, p] / D[g, r, p] over a stretch of patches, for a column and a band.

    Other programs raise the same maxima meanwhile. A best that is read too early is only lower, so that more patches
    are looked at; and the maximum at the end is atomic.
    """
    n_bands = tl.cdiv(n_rows, ROWS)
    k = tl.program_id(0)
    group = tl.program_id(1) // n_bands
    band = tl.program_id(1) % n_bands
    first = tl.program_id(2) * STRETCH
    r = band * ROWS + tl.arange(0, ROWS)
    is_row = r < n_rows
    at = (group * n_rows + r).to(tl.int64) * fan_in + k
    s = tl.where(tl.load(signed + at, is_row, other=0) > 0, 0, 1)
    scale = _scale(tl.load(totals + (group * 2 + s) * n_rows + r, is_row, other=0.0), n_patches)
    found = tl.load(best + at, is_row, other=0).to(tl.float32, bitcast=True)  # what other programs have so far
    bar = _bar(found, scale)
    lane = tl.arange(0, CHUNK)
    a_from = patches + (group * fan_in + k).to(tl.int64) * n_patches
    reach_from = reach + (group * n_bands + band).to(tl.int64) * n_patches
    u_from = transposed + group.to(tl.int64) * n_patches * 2 * n_rows + s * n_rows + r
    for step in range(0, STRETCH, CHUNK):
        start = first + step
        inside = start + lane < n_patches
        a = tl.load(a_from + start + lane, inside, other=0.0)
        product = a * tl.load(reach_from + start + lane, inside, other=0.0)
        # A product and where it stands in one integer: the place takes the last bits of the fraction. Even a product
        # that is 0 by underflow stands above a bar of 0.
        key = tl.where(a > 0, (product.to(tl.int32, bitcast=True) & -CHUNK) | lane, -1)
        highest = tl.max(key, axis=0)
        n_taken = 0
        while ((highest | (CHUNK - 1)) > bar) & (n_taken < MOST_SINGLE):
            which = start + (highest & (CHUNK - 1))
            u = tl.load(u_from + which.to(tl.int64) * 2 * n_rows, is_row, other=0.0)
            found = tl.maximum(found, tl.load(a_from + which) * u)
            bar = _bar(found, scale)
            key = tl.where(key == highest, -1, key)
            highest = tl.max(key, axis=0)
            n_taken += 1
        if (highest | (CHUNK - 1)) > bar:
            for j in range(CHUNK):
                is_patch = start + j < n_patches
                u = tl.load(u_from + (start + j).to(tl.int64) * 2 * n_rows, is_row & is_patch, other=0.0)
                found = tl.maximum(found, tl.load(a_from + start + j, is_patch, other=0.0) * u)
            bar = _bar(found, scale)
    # Non-negative floats order as their bits do: stretches of patches meet in an integer maximum, exact in any order.
    tl.atomic_max(best + at, found.to(tl.int32, bitcast=True), is_row)
