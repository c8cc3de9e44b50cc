"""The kernels on the GPU: float32, ordinary products in torch without TF32, the (max, x) product in Triton.

On NVIDIA GPUs `gpu_tiles.py` does the (max, x) product; the plain Triton kernel here is its portable form, and what
Triton's interpreter runs on the CPU in the tests. Half-precision operands are widened before anything is computed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from sipp.kernels.reference import extremes as extremes
from sipp.numerics import exact_matmul

FUSED = False  # no `max_ratios` of its own: the caller goes chunk by chunk through the functions below
ROWS, COLUMNS, PATCHES = 16, 32, 32  # one step of the plain kernel: a cube of products
STRETCH = 2048  # patches of one program, a power of two
AMPERE = 8  # first compute capability with asynchronous copies to shared memory

_log = logging.getLogger("sipp")


def quadrant_sums(weight_GRK: Tensor, patches_GKP: Tensor) -> Tensor:
    """D_SGRP of T2: the sums of w_k^s a_k over the fan-in, for both signs s of the weights."""
    n_groups, n_rows, _ = weight_GRK.shape
    weight = weight_GRK.to(torch.float32)
    both = torch.cat((weight.clamp(min=0), (-weight).clamp(min=0)), dim=1)
    with exact_matmul():
        return torch.bmm(both, patches_GKP.to(torch.float32)).view(n_groups, 2, n_rows, -1).transpose(0, 1)


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """max over p of  a_kp * (1/D)_rp  with D of the weight's own sign: the (max, x) product of T2. Shape G x R x K."""
    tiles = _tiles(patches_GKP.device)
    if tiles is not None:
        return tiles(patches_GKP, inverse_SGRP, positive_GRK)
    return plain_max_times(patches_GKP, inverse_SGRP, positive_GRK)


def sum_times(patches_GKBN: Tensor, inverse_SGRBN: Tensor, positive_GRK: Tensor) -> Tensor:
    """sum over the N patches of each point of the same products: B x G x R x K. An ordinary matrix product (T3)."""
    with exact_matmul():
        total = torch.einsum("gkbn,sgrbn->sbgrk", patches_GKBN.to(torch.float32), inverse_SGRBN.to(torch.float32))
    return torch.where(positive_GRK, total[0], total[1])


def plain_max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """The same product by the portable kernel."""
    n_groups, n_rows, fan_in = positive_GRK.shape
    n_patches = patches_GKP.shape[-1]
    patches, inverse = patches_GKP.contiguous(), inverse_SGRP.contiguous()
    best = torch.zeros(positive_GRK.shape, dtype=torch.float32, device=patches.device)
    row_tiles = triton.cdiv(n_rows, ROWS)
    stretch = max(PATCHES, min(STRETCH, triton.next_power_of_2(n_patches)))
    grid = (triton.cdiv(fan_in, COLUMNS), n_groups * row_tiles, triton.cdiv(n_patches, stretch))
    _plain_max_times[grid](
        patches,
        inverse,
        positive_GRK.contiguous().view(torch.int8),
        best.view(torch.int32),
        fan_in,
        n_rows,
        row_tiles,
        n_patches,
        n_groups * n_rows * n_patches,
        STRETCH=stretch,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        PATCHES=PATCHES,
    )
    return best


@functools.cache
def _tiles(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """The hand-placed kernel where the GPU and the installed Triton have what it needs, else None; said once."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] < AMPERE:
        return None
    try:
        from sipp.kernels import gpu_tiles
    except ImportError as error:
        _log.warning("this Triton has no usable Gluon (%s): the portable kernel runs instead, slower", error)
        return None
    return gpu_tiles.max_times


@triton.jit
def _plain_max_times(  # type: ignore[no-untyped-def]
    patches,
    inverse,
    positive,
    best,
    fan_in,
    n_rows,
    row_tiles,
    n_patches,
    sign_stride,
    STRETCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PATCHES: tl.constexpr,
):
    group = tl.program_id(1) // row_tiles
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    r = (tl.program_id(1) % row_tiles) * ROWS + tl.arange(0, ROWS)
    p = tl.program_id(2) * STRETCH + tl.arange(0, PATCHES)
    row, column = group * n_rows + r, group * fan_in + k
    a_from = patches + column.to(tl.int64)[:, None] * n_patches + p[None, :]
    u_from = inverse + row.to(tl.int64)[:, None] * n_patches + p[None, :]
    for_positive = tl.zeros((ROWS, COLUMNS), tl.float32)
    for_negative = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, STRETCH, PATCHES):
        is_patch = (p + start < n_patches)[None, :]
        a = tl.load(a_from + start, is_patch & (k < fan_in)[:, None], other=0).to(tl.float32)[None, :, :]
        is_row = is_patch & (r < n_rows)[:, None]
        u = tl.load(u_from + start, is_row, other=0).to(tl.float32)[:, None, :]
        v = tl.load(u_from + sign_stride + start, is_row, other=0).to(tl.float32)[:, None, :]
        for_positive = tl.maximum(for_positive, tl.max(a * u, axis=2))
        for_negative = tl.maximum(for_negative, tl.max(a * v, axis=2))
    inside = (r < n_rows)[:, None] & (k < fan_in)[None, :]
    at = row[:, None] * fan_in + k[None, :]
    found = tl.where(tl.load(positive + at, inside, other=0) != 0, for_positive, for_negative)
    # Non-negative floats order as their bits do: stretches of patches meet in an integer maximum, exact in any order.
    tl.atomic_max(best + at, found.to(tl.int32, bitcast=True), inside)
