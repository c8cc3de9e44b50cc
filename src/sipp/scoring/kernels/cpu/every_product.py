"""Vector code for the maxima where rows and columns are few: every product, patches side by side.

There, finding out what can be left out (`skip_code.py`) costs more than it spares. Reciprocals stay as they are and no
product is tested: each weight has LANES maxima, one for each lane of a vector, joined when all patches are through.
They have to fit the first cache.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from torch import Tensor

from sipp.scoring.kernels import boundary
from sipp.scoring.kernels.cpu.block_code import VECTOR_TYPE, copy_line, prefetch_line, take_number
from sipp.scoring.kernels.cpu.block_loops import copy_lines, fill
from sipp.scoring.kernels.cpu.host import Native, run_job
from sipp.scoring.kernels.cpu.layout import BLOCK, FLOAT, LANES, LINE, RANK, SIGN_BYTES, VECTOR
from sipp.scoring.kernels.cpu.llvm import I1, I64, across, larger, load, primitive, put_float, reading, store, tree

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


class Job(NamedTuple):
    """What the threads are given: the part to do next, sizes and addresses."""

    following: int
    n_parts: int
    patches_GKP: int
    inverse_SGRP: int
    signs_GKR: int
    n_groups: int
    n_rows: int
    fan_in: int
    n_patches: int
    scratch: int
    best_NGRK: int  # for each part


_read_job = reading(Job)


@Native
def raise_by_all(a: int, d: int, n_rows: int, fan_in: int, signs: int, best: int) -> None:
    """Raises best[k, r * LANES + lane] to the largest product of the lane.

    `a` has the block's patches, d the reciprocals.
    """
    n_ranks = -(-n_rows // RANK)
    for k in range(fan_in):
        bits, maxima = signs + k * n_ranks * SIGN_BYTES, best + k * n_rows * LANES * FLOAT
        _raise_column(a + k * LINE, d, n_rows, bits, maxima)


def _raise_column(line: int, d: int, n_rows: int, signs: int, best: int) -> None:
    for first in range(0, n_rows, RANK):
        lines, maxima, bits = d + first * 2 * LINE, best + first * LANES * FLOAT, signs + first // RANK * SIGN_BYTES
        if n_rows - first >= RANK:
            raise_rank(line, lines, maxima, bits)
        else:
            raise_rows(n_rows - first, line, lines, maxima, bits)


def _copy_reciprocals(job: Job, g: int, start: int, last: int, d: int) -> None:
    """Copies the reciprocals of patches start..last of a group into a block's lines 2 r + s."""
    step = job.n_patches * FLOAT
    for s in range(2):
        source = job.inverse_SGRP + (s * job.n_groups + g) * job.n_rows * step + start * FLOAT
        copy_lines(source, step, job.n_rows, last - start, d + s * LINE, 2 * LINE)


def _do_part(job: Job, first: int, last: int, a: int, d: int, lanes: int, best_GRK: int) -> None:
    """Fills `best` with the maxima of a stretch of patches.

    Each line of the patches is read once, where it is. The reciprocals of a block are read for every column: they are
    copied to d[i % 2], those of the next block while this one is worked on, a few lines for each column.
    """
    n_groups, n_rows, fan_in = job.n_groups, job.n_rows, job.fan_in
    n_ranks, block_bytes = -(-n_rows // RANK), 2 * n_rows * LINE
    line_step = job.n_patches * FLOAT
    sign_step = n_groups * n_rows * line_step
    for g in range(n_groups):
        fill(lanes, fan_in * n_rows * LANES, 0.0)
        patches, inverse = job.patches_GKP + g * fan_in * line_step, job.inverse_SGRP + g * n_rows * line_step
        signs = job.signs_GKR + g * fan_in * n_ranks * SIGN_BYTES
        _copy_reciprocals(job, g, first, last, d)
        for start in range(first, last, BLOCK):
            now, following = (start - first) // BLOCK % 2, start + BLOCK
            here, other = d + now * block_bytes, d + (1 - now) * block_bytes
            is_whole, copies = following <= last, following + BLOCK <= last
            if not is_whole:
                copy_lines(patches + start * FLOAT, line_step, fan_in, last - start, a, LINE)
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
                line = patches + start * FLOAT + k * line_step if is_whole else a + k * LINE
                bits, maxima = signs + k * n_ranks * SIGN_BYTES, lanes + k * n_rows * LANES * FLOAT
                _raise_column(line, here, n_rows, bits, maxima)
            if not copies and following < last:
                _copy_reciprocals(job, g, following, last, other)
        for k in range(fan_in):
            for r in range(n_rows):
                put_float(best_GRK, (g * n_rows + r) * fan_in + k, joined(lanes + (k * n_rows + r) * LANES * FLOAT))


@Native
def _do_parts(job_at: int) -> None:
    """Does parts of a job, beside other threads, until none is left."""
    job = _read_job(job_at)
    n_rows, fan_in, n_blocks = job.n_rows, job.fan_in, -(-job.n_patches // BLOCK)
    n_a, n_d, n_lanes = fan_in * BLOCK, 4 * n_rows * BLOCK, fan_in * n_rows * LANES
    part = take_number(job_at)
    while part < job.n_parts:
        a = job.scratch + part * (n_a + n_d + n_lanes) * FLOAT
        d = a + n_a * FLOAT
        best = job.best_NGRK + part * job.n_groups * n_rows * fan_in * FLOAT
        first, last = n_blocks * part // job.n_parts * BLOCK, n_blocks * (part + 1) // job.n_parts * BLOCK
        _do_part(job, first, min(last, job.n_patches), a, d, d + n_d * FLOAT, best)
        part = take_number(job_at)


def max_times(patches_GKP: Tensor, inverse_SGRP: Tensor, signs_GKR: np.ndarray, n_rows: int) -> Tensor:
    """`cpu.max_times` of float32 without gaps: so little work for a patch that calls from Python would count."""
    n_groups, fan_in, n_patches = patches_GKP.shape
    n_parts = torch.get_num_threads()
    best = boundary.blank(n_parts, n_groups, n_rows, fan_in)
    # of each part: a block of patches, two of reciprocals, the lanes
    scratch = boundary.blank(n_parts * (fan_in * BLOCK + 4 * n_rows * BLOCK + fan_in * n_rows * LANES))
    job = Job(
        following=0,
        n_parts=n_parts,
        patches_GKP=boundary.address(patches_GKP),
        inverse_SGRP=boundary.address(inverse_SGRP),
        signs_GKR=signs_GKR.ctypes.data,
        n_groups=n_groups,
        n_rows=n_rows,
        fan_in=fan_in,
        n_patches=n_patches,
        scratch=boundary.address(scratch),
        best_NGRK=boundary.address(best),
    )
    run_job(_do_parts, list(job), n_parts)
    return reduce(torch.maximum, best.unbind())
