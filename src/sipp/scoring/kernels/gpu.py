"""The kernels on the GPU: float32, ordinary products in torch without TF32, the (max, x) product in Triton.

The (max, x) product looks at few products: those that can raise a maximum, the likeliest first. The test is that of the
CPU (`cpu/maxima.py`): in column k, patch p can only matter to a band of rows where its activation times its reach is
above the column's bar. A program owns a column and a band and goes through the patches in chunks; of each chunk it
takes the patch with the highest product of both, raises the band's maxima and with them the bar, until no other patch
of the chunk is above it. Half-precision operands are widened before anything is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sipp.records.numerics import exact_matmul
from sipp.scoring.kernels import checks
from sipp.scoring.kernels.reference import extremes as extremes

FUSED = False  # no `max_ratios` or `mean_ratios`: the caller goes chunk by chunk through the functions below
LEAST_ROWS, MOST_ROWS = 32, 128  # of a band: whole warps; more would leave fewer programs
CHUNK = 128  # patches looked at together, a power of two
MOST_SINGLE = 32  # patches of a chunk that are taken one by one; where more are above the bar, all of them are
TRANSPOSED = 32  # patches of one program that lays the reciprocals out
PROGRAMS_WANTED = 132 * 64  # as many warps as an H200 can hold
SHORTEST_STRETCH = 4096  # patches of a program: its first chunk costs the most

LARGEST_SCALE = 2.0**100
# A test whose numbers are not normal proves nothing: between these bounds it is made, below all patches above 0 count.
LEAST_BAR: tl.constexpr = tl.constexpr(2.0**-100)
LARGEST_BAR: tl.constexpr = tl.constexpr(2.0**126)
LEAST_REACH: tl.constexpr = tl.constexpr(2.0**-60)
BAR_SLACK: tl.constexpr = tl.constexpr(1.0 - 2.0**-20)  # rounding of the five operations of a test, with room


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights."""
    checks.check_sums("quadrant_sums", weight_GRK, patches_GKP)
    n_groups, n_rows, _ = weight_GRK.shape
    weight = weight_GRK.to(torch.float32)
    both = torch.cat((weight.clamp(min=0), (-weight).clamp(min=0)), dim=1)
    with exact_matmul():
        return torch.bmm(both, patches_GKP.to(torch.float32)).view(n_groups, 2, n_rows, -1).transpose(0, 1)


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """max over p of  a_kp * (1/D)_rp  with D of the weight's own sign: the (max, x) product of T2. Shape G x R x K."""
    checks.check_products("max_times", patches_GKP, inverse_SGRP, positive_GRK)
    n_groups, n_rows, fan_in = positive_GRK.shape
    n_patches = patches_GKP.shape[-1]
    patches = patches_GKP.to(torch.float32).contiguous()
    inverse = inverse_SGRP.to(torch.float32).contiguous()
    mean_SGR = inverse.mean(-1)
    scales = torch.where(mean_SGR > 0, mean_SGR.reciprocal().clamp(max=LARGEST_SCALE), 0.0)
    rows = max(LEAST_ROWS, min(MOST_ROWS, triton.next_power_of_2(n_rows)))
    n_bands = triton.cdiv(n_rows, rows)
    transposed = torch.empty(n_groups, n_patches, 2, n_rows, dtype=torch.float32, device=patches.device)
    reach = torch.empty(n_groups, n_bands, n_patches, dtype=torch.float32, device=patches.device)
    _transpose[(triton.cdiv(n_patches, TRANSPOSED), n_groups * n_bands)](
        inverse, scales, transposed, reach, n_groups, n_rows, n_patches, ROWS=rows, PATCHES=TRANSPOSED
    )
    best = torch.zeros(positive_GRK.shape, dtype=torch.float32, device=patches.device)
    n_wanted = triton.cdiv(PROGRAMS_WANTED, fan_in * n_groups * n_bands)
    shortest = max(SHORTEST_STRETCH, triton.cdiv(n_patches, n_wanted))
    stretch = max(CHUNK, triton.next_power_of_2(min(shortest, n_patches)))  # few values: each is compiled by itself
    _raise_best[(fan_in, n_groups * n_bands, triton.cdiv(n_patches, stretch))](
        patches,
        transposed,
        scales,
        reach,
        positive_GRK.contiguous().view(torch.int8),
        best.view(torch.int32),
        n_groups,
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


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of the same products: B x G x R x K. An ordinary matrix product (T3)."""
    checks.check_products("sum_times", patches_GKBN, inverse_SGRBN, positive_GRK, n_dims=2)
    with exact_matmul():
        total = torch.einsum("gkbn,sgrbn->sbgrk", patches_GKBN.to(torch.float32), inverse_SGRBN.to(torch.float32))
    return torch.where(positive_GRK, total[0], total[1])


@triton.jit
def _transpose(  # type: ignore[no-untyped-def]
    inverse, scales, transposed, reach, n_groups, n_rows, n_patches, ROWS: tl.constexpr, PATCHES: tl.constexpr
):
    """transposed[g, p, s, r] = inverse[s, g, r, p]; reach[g, band, p]: the largest of these times scales[s, g, r]."""
    n_bands = tl.cdiv(n_rows, ROWS)
    group = tl.program_id(1) // n_bands
    band = tl.program_id(1) % n_bands
    r = band * ROWS + tl.arange(0, ROWS)
    p = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    inside = (r < n_rows)[:, None] & (p < n_patches)[None, :]
    highest = tl.full((PATCHES,), LEAST_REACH, tl.float32)
    for s in tl.static_range(2):
        line = (s * n_groups + group) * n_rows + r
        value = tl.load(inverse + line.to(tl.int64)[:, None] * n_patches + p[None, :], inside, other=0.0)
        scale = tl.load(scales + line, r < n_rows, other=0.0)
        highest = tl.maximum(highest, tl.max(value * scale[:, None], axis=0))
        to = ((group * n_patches + p).to(tl.int64) * 2 + s) * n_rows
        tl.store(transposed + to[:, None] + r[None, :], tl.trans(value), tl.trans(inside))
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
    scales,
    reach,
    positive,
    best,
    n_groups,
    n_rows,
    fan_in,
    n_patches,
    STRETCH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_SINGLE: tl.constexpr,
):
    n_bands = tl.cdiv(n_rows, ROWS)
    k = tl.program_id(0)
    group = tl.program_id(1) // n_bands
    band = tl.program_id(1) % n_bands
    first = tl.program_id(2) * STRETCH
    r = band * ROWS + tl.arange(0, ROWS)
    is_row = r < n_rows
    at = (group * n_rows + r) * fan_in + k
    s = tl.where(tl.load(positive + at, is_row, other=0) != 0, 0, 1)
    scale = tl.load(scales + (s * n_groups + group) * n_rows + r, is_row, other=0.0)
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
