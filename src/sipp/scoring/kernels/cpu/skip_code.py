"""Vector code for the maxima over patches: which patches can raise a maximum of a column, and raising it by those.

A band is a run of ranks of RANK rows. For a column k and a band, patch p can only matter where its activation times its
reach (the largest of the band's reciprocals at p, each divided by its own line's mean) is above the column's bar (the
smallest of the band's maxima of that column, divided the same way). One number per patch and one per column replace
the band's rows in that test; how the lines are scaled changes how much is skipped, never what is found.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from sipp.scoring.kernels.cpu.layout import BLOCK, FLOAT, LINE, PATCH_BYTES, RANK, RANK_BYTES, RANK_VECTOR, SIGN_BYTES
from sipp.scoring.kernels.cpu.llvm import (
    F32,
    I1,
    I64,
    across,
    larger,
    load,
    primitive,
    smaller,
    splat,
    store,
    transposed,
    tree,
)

# A test whose numbers are not normal proves nothing: it is made between these bounds only.
LEAST_BAR, LARGEST_BAR = 2.0**-100, 2.0**126
LEAST_REACH = 2.0**-60
# Rounding of the five operations of a test, 2^-24 each, with room: a patch that only ties is not left out by it.
BAR_SLACK = 1.0 - 2.0**-20

_bits, _flags, _rank = ir.IntType(RANK), ir.VectorType(I1, RANK), ir.VectorType(F32, RANK)


def _all(value: float) -> Any:
    return ir.Constant(_rank, [value] * RANK)


@primitive(types.none, *[types.int64] * 4)
def turn(b: Any, lines: Any, step: Any, turned: Any, sums: Any) -> None:
    """turned[p, 0, r] = lines[r, p] for RANK lines `step` bytes apart; adds each line's values to sums[r]."""
    with cgutils.for_range(b, I64(BLOCK // RANK)) as loop:
        at = b.add(lines, b.mul(loop.index, I64(RANK_VECTOR)))
        target = b.add(turned, b.mul(loop.index, I64(RANK * PATCH_BYTES)))
        vectors = transposed(b, [load(b, b.add(at, b.mul(step, I64(r))), 0, _rank) for r in range(RANK)])
        for p, vector in enumerate(vectors):
            store(b, vector, target, p * PATCH_BYTES)
        total = tree(b, lambda b, x, y: b.fadd(x, y), vectors)
        store(b, b.fadd(load(b, sums, 0, _rank), total), sums)


@primitive(types.none, *[types.int64] * 4)
def reaches(b: Any, turned: Any, scales: Any, n_ranks: Any, reach: Any) -> None:
    """reach[p] = the largest of turned[rank, p, s, r] * scales[rank, s, r] over n_ranks ranks, at least LEAST_REACH."""
    with cgutils.for_range(b, I64(BLOCK // RANK)) as piece:
        cells = [cgutils.alloca_once(b, _rank) for _ in range(RANK)]
        for cell in cells:
            b.store(_all(LEAST_REACH), cell)
        with cgutils.for_range(b, n_ranks) as rank:
            scale = b.add(scales, b.mul(rank.index, I64(PATCH_BYTES)))
            at = b.add(turned, b.mul(rank.index, I64(RANK_BYTES)))
            at = b.add(at, b.mul(piece.index, I64(RANK * PATCH_BYTES)))
            for sign in (0, RANK_VECTOR):
                factor = load(b, scale, sign, _rank)
                for p, cell in enumerate(cells):
                    value = b.fmul(load(b, at, p * PATCH_BYTES + sign, _rank), factor)
                    b.store(larger(b, value, b.load(cell)), cell)
        found = tree(b, larger, transposed(b, [b.load(cell) for cell in cells]))
        store(b, found, b.add(reach, b.mul(piece.index, I64(RANK_VECTOR))))


def sign_flags(b: Any, signs: Any) -> Any:
    """The RANK bits at an address as flags: where weights are positive."""
    return b.bitcast(b.load(b.inttoptr(signs, _bits.as_pointer()), align=SIGN_BYTES, typ=_bits), _flags)


def _signs(b: Any, signs: Any, n_ranks: int) -> list[Any]:
    return [sign_flags(b, b.add(signs, I64(i * SIGN_BYTES))) for i in range(n_ranks)]


def _of_sign(b: Any, positive: Any, address: Any, offset: int) -> Any:
    """For each row the value of its weight's own sign: the first of two vectors where it is positive."""
    return b.select(positive, load(b, address, offset, _rank), load(b, address, offset + RANK_VECTOR, _rank))


def _bar(n_ranks: int) -> Any:
    """A function: the bar of a column: the least of best[r] * scales[r], at least floors[r], over the band's rows."""

    @primitive(types.float32, *[types.int64] * 4)
    def bar(b: Any, best: Any, scales: Any, floors: Any, signs: Any) -> Any:
        least = _all(LARGEST_BAR)
        for rank, positive in enumerate(_signs(b, signs, n_ranks)):
            scale, floor = (_of_sign(b, positive, address, rank * PATCH_BYTES) for address in (scales, floors))
            least = smaller(b, larger(b, b.fmul(load(b, best, rank * RANK_VECTOR, _rank), scale), floor), least)
        return b.fmul(across(b, smaller, least), ir.Constant(F32, BAR_SLACK))

    return bar


def _mask(b: Any, flags: list[Any]) -> Any:
    """The flags of BLOCK patches, RANK in a vector, as the bits of one integer."""
    return tree(
        b,
        lambda b, x, y: b.or_(x, y),
        [b.shl(b.zext(b.bitcast(flag, _bits), I64), I64(i * RANK)) for i, flag in enumerate(flags)],
    )


@primitive(types.int64, types.int64, types.int64, types.float32)
def above(b: Any, line: Any, reach: Any, bar: Any) -> Any:
    """Bit p: line[p] * reach[p] is above the bar."""
    limit = splat(b, bar, _rank)
    pieces = range(0, LINE, RANK_VECTOR)
    products = [b.fmul(load(b, line, offset, _rank), load(b, reach, offset, _rank)) for offset in pieces]
    return _mask(b, [b.fcmp_ordered(">", product, limit) for product in products])


@primitive(types.float32, types.int64, types.int64)
def highest(b: Any, line: Any, reach: Any) -> Any:
    """The largest of line[p] * reach[p]."""
    pieces = range(0, LINE, RANK_VECTOR)
    products = [b.fmul(load(b, line, offset, _rank), load(b, reach, offset, _rank)) for offset in pieces]
    return across(b, larger, tree(b, larger, products))


@primitive(types.int64, types.int64)
def above_zero(b: Any, line: Any) -> Any:
    """Bit p: line[p] is above 0."""
    pieces = range(0, LINE, RANK_VECTOR)
    return _mask(b, [b.fcmp_ordered(">", load(b, line, offset, _rank), _all(0.0)) for offset in pieces])


def _raise(n_ranks: int, n_at_once: int) -> Any:
    """A function: best[r] = the largest of best[r] and of line[p] * turned[r, p] over the patches p in `mask`, not 0.

    Patches go `n_at_once` together; where fewer are left, the last one counts again, which changes no maximum and
    spares a branch that nothing could predict.
    """

    @primitive(types.none, *[types.int64] * 5)
    def raise_column(b: Any, mask: Any, line: Any, turned: Any, best: Any, signs: Any) -> None:
        positive = _signs(b, signs, n_ranks)
        cells = [cgutils.alloca_once(b, _rank) for _ in range(n_ranks)]
        for rank, cell in enumerate(cells):
            b.store(load(b, best, rank * RANK_VECTOR, _rank), cell)
        left = cgutils.alloca_once(b, I64)
        b.store(mask, left)
        again, done = b.append_basic_block("again"), b.append_basic_block("done")
        b.branch(again)
        b.position_at_end(again)
        rest, patches = b.load(left), list[Any]()
        for _ in range(n_at_once):
            patch = b.cttz(rest, I1(0))
            patches.append(b.select(b.icmp_unsigned("==", rest, I64(0)), patches[-1], patch) if patches else patch)
            rest = b.and_(rest, b.sub(rest, I64(1)))
        b.store(rest, left)
        values = [splat(b, load(b, b.add(line, b.mul(patch, I64(FLOAT))), 0, F32), _rank) for patch in patches]
        rows = [b.add(turned, b.mul(patch, I64(PATCH_BYTES))) for patch in patches]
        for rank, cell in enumerate(cells):
            inverse = [_of_sign(b, positive[rank], row, rank * RANK_BYTES) for row in rows]
            found = tree(b, larger, [b.fmul(x, y) for x, y in zip(values, inverse)])
            b.store(larger(b, found, b.load(cell)), cell)
        b.cbranch(b.icmp_unsigned("!=", rest, I64(0)), again, done)
        b.position_at_end(done)
        for rank, cell in enumerate(cells):
            store(b, b.load(cell), best, rank * RANK_VECTOR)

    return raise_column


bar_1, bar_2, bar_4 = (_bar(n) for n in (1, 2, 4))
raise_1, raise_2, raise_4 = _raise(1, 8), _raise(2, 4), _raise(4, 4)


@primitive(types.int64, types.int64)
def bit_count(b: Any, bits: Any) -> Any:
    return b.ctpop(bits)
