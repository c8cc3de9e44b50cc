"""Vector code for the maxima where rows and columns are few: every product, patches side by side.

There, finding out what can be left out (`skip_code.py`) costs more than it spares. Reciprocals stay as they are and no
product is tested: each weight has LANES maxima, one for each lane of a vector, joined when all patches are through.
They have to fit the first cache.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.np.numpy_support import carray
from torch import Tensor

from sipp.scoring.kernels import boundary
from sipp.scoring.kernels.cpu.block_code import (
    VECTOR_TYPE,
    bytes_at,
    copy_line,
    floats_at,
    prefetch_line,
    take_number,
)
from sipp.scoring.kernels.cpu.block_loops import copy_lines
from sipp.scoring.kernels.cpu.host import compiled, entry, run_job
from sipp.scoring.kernels.cpu.layout import BLOCK, FLOAT, LANES, LINE, RANK, SIGN_BYTES, VECTOR
from sipp.scoring.kernels.cpu.llvm import I1, I64, across, larger, load, primitive, store, tree
from sipp.scoring.kernels.cpu.packing import pack_signs

AHEAD = 2  # lines asked for before they are read: the maxima leave the first cache little room

_bits = ir.IntType(RANK)


def _line_and_bits(b: Any, line: Any, signs: Any) -> tuple[list[Any], Any]:
    vectors = [load(b, line, offset, VECTOR_TYPE) for offset in range(0, LINE, VECTOR)]
    return vectors, b.zext(b.load(b.inttoptr(signs, _bits.as_pointer()), align=SIGN_BYTES, typ=_bits), I64)


def _raise_row(b: Any, vectors: list[Any], row: Any, is_positive: Any, d: Any, best: Any) -> None:
    at = b.add(d, b.mul(row, I64(2 * LINE)))
    at = b.select(is_positive, at, b.add(at, I64(LINE)))
    out = b.add(best, b.mul(row, I64(LANES * FLOAT)))
    products = [b.fmul(x, load(b, at, i * VECTOR, VECTOR_TYPE)) for i, x in enumerate(vectors)]
    store(b, tree(b, larger, [*products, load(b, out, 0, VECTOR_TYPE)]), out)


@primitive(types.none, *[types.int64] * 5)
def raise_rows(b: Any, n_rows: Any, line: Any, d: Any, best: Any, signs: Any) -> None:
    """best[r, lane] = the largest of best[r, lane] and of line[p] * d[2 r + s, p] over the lane's patches p.

    For up to RANK rows; s is the sign of the weight of row r, bit r of what lies at `signs`.
    """
    vectors, bits = _line_and_bits(b, line, signs)
    with cgutils.for_range(b, n_rows) as row:
        _raise_row(b, vectors, row.index, b.trunc(b.lshr(bits, row.index), I1), d, best)


@primitive(types.none, *[types.int64] * 4)
def raise_rank(b: Any, line: Any, d: Any, best: Any, signs: Any) -> None:
    """The same for RANK rows, without a loop."""
    vectors, bits = _line_and_bits(b, line, signs)
    for row in map(I64, range(RANK)):
        _raise_row(b, vectors, row, b.trunc(b.lshr(bits, row), I1), d, best)


@primitive(types.float32, types.int64)
def joined(b: Any, lanes: Any) -> Any:
    """The largest of LANES maxima."""
    return across(b, larger, load(b, lanes, 0, VECTOR_TYPE))


@compiled
def raise_by_all(a: int, d: np.ndarray, n_rows: int, signs: np.ndarray, best: np.ndarray) -> None:
    """Raises best[k, r * LANES + lane] to the largest product of the lane.

    `a` is the address of the block's patches; d holds the reciprocals.
    """
    fan_in, n_ranks = signs.shape
    for k in range(fan_in):
        bits, maxima = signs.ctypes.data + k * n_ranks * SIGN_BYTES, best.ctypes.data + k * n_rows * LANES * FLOAT
        _raise_column(a + k * LINE, d.ctypes.data, n_rows, bits, maxima)


@compiled
def _raise_column(line: int, d: int, n_rows: int, signs: int, best: int) -> None:
    for first in range(0, n_rows, RANK):
        lines, maxima, bits = d + first * 2 * LINE, best + first * LANES * FLOAT, signs + first // RANK * SIGN_BYTES
        if n_rows - first >= RANK:
            raise_rank(line, lines, maxima, bits)
        else:
            raise_rows(n_rows - first, line, lines, maxima, bits)


@compiled
def product(
    patches_GKP: np.ndarray,
    inverse_SGRP: np.ndarray,
    positive_GRK: np.ndarray,
    stretch: tuple[int, int],
    a: np.ndarray,
    d: np.ndarray,
    lanes: np.ndarray,
    best_GRK: np.ndarray,
) -> None:
    """Fills `best` with the maxima of a stretch of patches.

    Each line of the patches is read once, where it is. The reciprocals of a block are read for every column: they are
    copied to d[i % 2], those of the next block while this one is worked on, a few lines for each column.
    """
    n_groups, n_rows, fan_in = positive_GRK.shape
    first, last = stretch
    n_ranks = -(-n_rows // RANK)
    signs_GKR = np.empty((n_groups, fan_in, n_ranks), np.int16)
    pack_signs(positive_GRK, signs_GKR, (0, n_rows))
    line_step = patches_GKP.shape[2] * FLOAT
    sign_step = n_groups * n_rows * line_step
    for g in range(n_groups):
        lanes[:] = 0.0
        patches, inverse = patches_GKP[g].ctypes.data, inverse_SGRP[0, g].ctypes.data
        signs = signs_GKR.ctypes.data + g * fan_in * n_ranks * SIGN_BYTES
        for s in range(2):
            copy_lines(inverse_SGRP[s, g], first, last, d[0], s, 2)
        for start in range(first, last, BLOCK):
            now, following = (start - first) // BLOCK % 2, start + BLOCK
            here, other = d[now].ctypes.data, d[1 - now].ctypes.data
            is_whole, copies = following <= last, following + BLOCK <= last
            if not is_whole:
                copy_lines(patches_GKP[g], start, last, a, 0, 1)
            n_copied, due = 0, 0
            for k in range(fan_in):
                soon, ahead = (start, k + AHEAD) if k + AHEAD < fan_in else (following, k + AHEAD - fan_in)
                prefetch_line(patches + soon * FLOAT + ahead * line_step)
                due += 2 * n_rows if copies else 0
                while due >= fan_in:  # 2 n_rows lines for fan_in columns, evenly
                    source = inverse + following * FLOAT + (n_copied & 1) * sign_step + (n_copied >> 1) * line_step
                    prefetch_line(source + AHEAD // 2 * line_step)
                    copy_line(source, other + n_copied * LINE)
                    n_copied, due = n_copied + 1, due - fan_in
                line = patches + start * FLOAT + k * line_step if is_whole else a.ctypes.data + k * LINE
                bits, maxima = signs + k * n_ranks * SIGN_BYTES, lanes.ctypes.data + k * n_rows * LANES * FLOAT
                _raise_column(line, here, n_rows, bits, maxima)
            if not copies and following < last:
                for s in range(2):
                    copy_lines(inverse_SGRP[s, g], following, last, d[1 - now], s, 2)
        for k in range(fan_in):
            for r in range(n_rows):
                best_GRK[g, r, k] = joined(lanes.ctypes.data + (k * n_rows + r) * LANES * FLOAT)


# What a thread is given: the part to do next, then numbers and addresses
NEXT, N_PARTS, PATCHES, INVERSE, POSITIVE, GROUPS, ROWS, FAN_IN, N_PATCHES, SCRATCH, BEST, JOB_SIZE = range(12)


@compiled
def _scratch_floats(n_rows: int, fan_in: int) -> tuple[int, int, int]:
    """Of each part: a, two blocks of d, lanes."""
    return fan_in * BLOCK, 4 * n_rows * BLOCK, fan_in * n_rows * LANES


def _do_parts(raw: Any) -> None:
    job = carray(raw, JOB_SIZE, np.int64)
    n_groups, n_rows, fan_in, n_patches = job[GROUPS], job[ROWS], job[FAN_IN], job[N_PATCHES]
    patches = carray(floats_at(job[PATCHES]), (n_groups, fan_in, n_patches))
    inverse = carray(floats_at(job[INVERSE]), (2, n_groups, n_rows, n_patches))
    positive = carray(bytes_at(job[POSITIVE]), (n_groups, n_rows, fan_in))
    n_parts, n_blocks = job[N_PARTS], -(-n_patches // BLOCK)
    best = carray(floats_at(job[BEST]), (n_parts, n_groups, n_rows, fan_in))
    n_a, n_d, n_lanes = _scratch_floats(n_rows, fan_in)
    part = take_number(job[NEXT:].ctypes.data)
    while part < n_parts:
        scratch = job[SCRATCH] + part * (n_a + n_d + n_lanes) * FLOAT
        a = carray(floats_at(scratch), (fan_in, BLOCK))
        d = carray(floats_at(scratch + n_a * FLOAT), (2, 2 * n_rows, BLOCK))
        lanes = carray(floats_at(scratch + (n_a + n_d) * FLOAT), (fan_in, n_rows, LANES))
        stretch = n_blocks * part // n_parts * BLOCK, min(n_blocks * (part + 1) // n_parts * BLOCK, n_patches)
        product(patches, inverse, positive, stretch, a, d, lanes, best[part])
        part = take_number(job[NEXT:].ctypes.data)


@cache
def _entry() -> Any:
    """A compiled function of a job (above): does parts of it, beside other threads, until none is left."""
    return entry(_do_parts)


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, positive_GRK: Tensor) -> Tensor:
    """`cpu.max_times` of float32 without gaps: so little work for a patch that calls from Python would count."""
    n_groups, n_rows, fan_in = positive_GRK.shape
    n_parts = torch.get_num_threads()
    best = boundary.blank(n_parts, n_groups, n_rows, fan_in)
    scratch = boundary.blank(n_parts * sum(_scratch_floats(n_rows, fan_in)))
    given = boundary.address(patches_GKP), boundary.address(inverse_SGRP), boundary.address(positive_GRK, torch.bool)
    sizes = n_groups, n_rows, fan_in, patches_GKP.shape[-1]
    run_job(_entry(), [0, n_parts, *given, *sizes, boundary.address(scratch), boundary.address(best)], n_parts)
    return reduce(torch.maximum, best.unbind())
