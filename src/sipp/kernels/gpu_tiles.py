"""The (max, x) product on NVIDIA GPUs with every register placed by hand (Gluon, the lower level of Triton).

A program owns a tile of rows x columns and a stretch of patches. Tiles of operands stream through shared memory; each
thread keeps its part of the tile's maxima in registers, for either sign of the weights, so that the inner loop is
multiplications and maxima only and nothing is chosen per pair. Non-negative floats order as their bits do, so maxima
are taken of integers: Hopper finds the largest of three in one instruction, which pays for the second sign, and the
partial maxima of stretches meet in an atomic maximum, exact in any order.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # renamed after Triton 3.6


@dataclass(frozen=True)
class Tile:
    """How a tile is spread: rows x columns of a thread, of a warp's threads, of the warps; patches of one stage."""

    thread_rows: int
    thread_columns: int
    lane_rows: int
    lane_columns: int
    warp_rows: int
    warp_columns: int
    n_patches: int = 32
    n_stages: int = 3

    @property
    def n_rows(self) -> int:
        return self.thread_rows * self.lane_rows * self.warp_rows

    @property
    def n_columns(self) -> int:
        return self.thread_columns * self.lane_columns * self.warp_columns

    @property
    def n_warps(self) -> int:
        return self.warp_rows * self.warp_columns


# Tiles and their speed on an H200, relative to the first, when they are full (docs/performance.md). Larger tiles of a
# thread read fewer operands but leave room for fewer warps, and were slower.
TILES: dict[Tile, float] = {
    Tile(4, 4, 8, 4, 2, 4): 1.0,  # 64 x 64
    Tile(4, 4, 4, 8, 2, 2): 1.0,  # 32 x 64
    Tile(4, 4, 4, 8, 1, 4): 0.98,  # 16 x 128
    Tile(2, 2, 4, 8, 2, 2): 0.85,  # 16 x 32
    Tile(1, 1, 2, 16, 2, 1): 0.43,  # 4 x 16: depthwise convolutions
}
PROGRAMS_WANTED = 132 * 8  # several programs for each multiprocessor of an H200
SHORTEST_STRETCH = 256  # patches: below this a program is mostly start and end
COPY_BYTES = 16
WHOLE_STAGES = 32  # patches are padded to a multiple of this: no stage of any tile is ragged, copies are 16 bytes wide


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor, *, tile: Tile | None = None) -> Tensor:
    """max over p of  a_kp * (1/D)_rp  with D of the weight's own sign: the (max, x) product of T2. Shape G x R x K."""
    n_groups, n_rows, fan_in = positive_GRK.shape
    tile = tile or tile_for(n_rows, fan_in)
    patches, inverse = _aligned(patches_GKP), _aligned(inverse_SGRP)
    n_patches = patches.shape[-1]
    row_tiles, column_tiles = triton.cdiv(n_rows, tile.n_rows), triton.cdiv(fan_in, tile.n_columns)
    n_wanted = triton.cdiv(PROGRAMS_WANTED, n_groups * row_tiles * column_tiles)
    n_stretches = max(1, min(n_wanted, n_patches // SHORTEST_STRETCH))
    stages = triton.cdiv(triton.cdiv(n_patches, n_stretches), tile.n_patches)  # of one program
    best = torch.zeros(positive_GRK.shape, dtype=torch.float32, device=patches.device)
    _max_times[(column_tiles, n_groups * row_tiles, triton.cdiv(n_patches, stages * tile.n_patches))](
        patches,
        inverse,
        positive_GRK.contiguous().view(torch.int8),
        best.view(torch.int32),
        fan_in,
        n_rows,
        row_tiles,
        n_patches,
        n_groups * n_rows,
        stages,
        *astuple(tile),
        num_warps=tile.n_warps,
    )
    return best


def tile_for(n_rows: int, fan_in: int) -> Tile:
    """The tile that covers n_rows x fan_in at the least cost: the area computed, edges included, over the speed."""

    def cost(tile: Tile) -> float:
        covered_rows = triton.cdiv(n_rows, tile.n_rows) * tile.n_rows
        return covered_rows * triton.cdiv(fan_in, tile.n_columns) * tile.n_columns / TILES[tile]

    return min(TILES, key=cost)


def _aligned(operand: Tensor) -> Tensor:
    """The operand in float32, contiguous, its patches padded with zeros (which raise no maximum) to whole stages."""
    missing = -operand.shape[-1] % WHOLE_STAGES
    operand = operand.to(torch.float32)
    operand = torch.nn.functional.pad(operand, (0, missing)) if missing else operand.contiguous()
    return operand if operand.data_ptr() % COPY_BYTES == 0 else operand.clone()


@gluon.jit
def _raise_best(best, products):  # type: ignore[no-untyped-def]
    """The larger of best and of two patches' products, as integers. The two maxima stand side by side in one piece of
    assembly because only then does the assembler make them one instruction."""
    first, second = gl.split(products.to(gl.int32, bitcast=True))
    return gl.inline_asm_elementwise(
        "{.reg .s32 t; max.s32 t, $1, $2; max.s32 $0, t, $3;}",
        "=r,r,r,r",
        [best, first, second],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _fetch(shared, at, a_from, u_from, v_from, offset):  # type: ignore[no-untyped-def]
    a_shared, u_shared, v_shared = shared
    async_copy.async_copy_global_to_shared(a_shared.index(at), a_from + offset)
    async_copy.async_copy_global_to_shared(u_shared.index(at), u_from + offset)
    async_copy.async_copy_global_to_shared(v_shared.index(at), v_from + offset)


@gluon.jit(do_not_specialize=["fan_in", "n_rows", "row_tiles", "n_all_rows", "stages"])
def _max_times(  # type: ignore[no-untyped-def]
    patches,
    inverse,
    positive,
    best,
    fan_in,
    n_rows,
    row_tiles,
    n_patches,
    n_all_rows,
    stages,
    TR: gl.constexpr,
    TK: gl.constexpr,
    LR: gl.constexpr,
    LK: gl.constexpr,
    WR: gl.constexpr,
    WK: gl.constexpr,
    BP: gl.constexpr,
    STAGES: gl.constexpr,
):
    BR: gl.constexpr = TR * LR * WR
    BK: gl.constexpr = TK * LK * WK
    STEP: gl.constexpr = 2  # patches of one step: what _raise_best takes
    LINE: gl.constexpr = 4  # patches of one 16-byte copy
    # A thread's rows and columns lie a whole warp tile apart: neighbours read neighbouring lines, without conflicts.
    cube: gl.constexpr = gl.BlockedLayout([1, 1, STEP], [LR, LK, 1], [WR, WK, 1], [2, 1, 0])
    tile: gl.constexpr = gl.SliceLayout(2, cube)
    copy: gl.constexpr = gl.BlockedLayout([1, LINE], [32 * LINE // BP, BP // LINE], [WR * WK, 1], [1, 0])
    lines: gl.constexpr = gl.SwizzledSharedLayout(LINE, 1, BP // LINE, order=[1, 0])
    group = gl.program_id(1) // row_tiles
    k0 = gl.program_id(0) * BK
    r0 = (gl.program_id(1) % row_tiles) * BR
    p0 = gl.program_id(2) * stages * BP
    a_shared = gl.allocate_shared_memory(gl.float32, [STAGES, BK, BP], lines)
    u_shared = gl.allocate_shared_memory(gl.float32, [STAGES, BR, BP], lines)
    v_shared = gl.allocate_shared_memory(gl.float32, [STAGES, BR, BP], lines)
    patch = p0 + gl.arange(0, BP, gl.SliceLayout(0, copy))
    k = gl.minimum(k0 + gl.arange(0, BK, gl.SliceLayout(1, copy)), fan_in - 1) + group * fan_in
    r = gl.minimum(r0 + gl.arange(0, BR, gl.SliceLayout(1, copy)), n_rows - 1) + group * n_rows
    a_from = patches + k.to(gl.int64)[:, None] * n_patches + patch[None, :]
    u_from = inverse + r.to(gl.int64)[:, None] * n_patches + patch[None, :]
    v_from = u_from + n_all_rows.to(gl.int64) * n_patches
    n_stages = gl.minimum((n_patches - p0) // BP, stages)
    for s in gl.static_range(STAGES - 1):
        if s < n_stages:
            _fetch((a_shared, u_shared, v_shared), s, a_from, u_from, v_from, s * BP)
        async_copy.commit_group()
    for_positive = gl.zeros([BR, BK], gl.int32, tile)
    for_negative = gl.zeros([BR, BK], gl.int32, tile)
    for c in range(n_stages):
        async_copy.wait_group(STAGES - 2)
        _barrier()
        ahead = c + STAGES - 1
        if ahead < n_stages:
            _fetch((a_shared, u_shared, v_shared), ahead % STAGES, a_from, u_from, v_from, ahead * BP)
        async_copy.commit_group()
        a_now = a_shared.index(c % STAGES)
        u_now = u_shared.index(c % STAGES)
        v_now = v_shared.index(c % STAGES)
        for j in gl.static_range(BP // STEP):
            a = gl.expand_dims(a_now.slice(j * STEP, STEP, 1).load(gl.SliceLayout(0, cube)), 0)
            u = gl.expand_dims(u_now.slice(j * STEP, STEP, 1).load(gl.SliceLayout(1, cube)), 1)
            v = gl.expand_dims(v_now.slice(j * STEP, STEP, 1).load(gl.SliceLayout(1, cube)), 1)
            for_positive = _raise_best(for_positive, a * u)
            for_negative = _raise_best(for_negative, a * v)
    row = r0 + gl.arange(0, BR, gl.SliceLayout(1, tile))
    column = k0 + gl.arange(0, BK, gl.SliceLayout(0, tile))
    inside = (row < n_rows)[:, None] & (column < fan_in)[None, :]
    at = (row + group * n_rows)[:, None] * fan_in + column[None, :]
    is_positive = gl.load(positive + at, inside, other=0) != 0
    gl.atomic_max(best + at, gl.where(is_positive, for_positive, for_negative), inside)
