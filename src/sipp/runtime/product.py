"""The sparse product, the one loop that convolutions and linear layers share.

    out[r, strip] = act(bias[r] + sum over kept weights j of row r:  value[j] * x[place[j] + strip]  + beside[r, strip])

A strip is a tile of `n` vectors of `lanes` positions, at fixed distances from one another, that stay in registers
while the weights of a row go by: one load and one multiply-add for each vector, and nothing for a zero. All rows
of a strip follow one another, so what they read of x stays in the nearest caches. Where that is more than the first
cache holds, the channels are gone through in rounds: a round leaves its sums in `out`, and the next one starts there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sipp.runtime.code import F32, I16, I64, Code, Loop, constant, generate, vector
from sipp.runtime.tails import emit_tail
from sipp.scoring.kernels.cpu.llvm import fused

# Numbers of the job, after its head
(
    X,
    OUT,
    BESIDE,
    BIAS,
    ROWS,
    VALUES,
    STEPS,
    STRIPS,
    N_STRIPS,
    N_BLOCKS,
    N_ROWS,
    OUT_PITCH,
    BESIDE_PITCH,
    FLAG,
    N_ROUNDS,
    LARGER,
) = range(16)
STRIP_NUMBERS = 3  # where a strip starts in x, out and beside (bytes)
ROW_NUMBERS = 2  # where a row's first weight looks in x (bytes), and its end in `values`


@dataclass(frozen=True)
class Tile:
    """The shape of a strip: distances (in bytes) of its vectors in x, in out and in what is added."""

    lanes: int
    in_x: tuple[int, ...]
    in_out: tuple[int, ...]
    in_beside: tuple[int, ...] | None
    unit: int  # bytes of one step between weights
    act: str  # `tails.py`
    has_rounds: bool
    has_larger: bool  # whether sums are watched as they were before a norm went into the weights


def product(tile: Tile) -> Code:
    """The compiled loop for strips of this shape."""
    return generate(("product", tile), lambda loop: _emit(loop, tile))


def _emit(loop: Loop, tile: Tile) -> None:
    b = loop.b
    n_blocks, n_rows = loop.number(N_BLOCKS), loop.number(N_ROWS)
    bad = loop.cells([constant(0.0, tile.lanes)])[0]
    first, last = loop.share(b.mul(loop.number(N_STRIPS), n_blocks))
    with loop.each(first, last) as task:
        strip, block = b.sdiv(task, n_blocks), b.srem(task, n_blocks)
        at = loop.at(loop.number(STRIPS), strip, 8 * STRIP_NUMBERS)
        x, out, beside = (b.add(loop.number(n), loop.load(at, I64, 8 * i)) for i, n in enumerate((X, OUT, BESIDE)))
        start = b.sdiv(b.mul(n_rows, block), n_blocks)
        stop = b.sdiv(b.mul(n_rows, b.add(block, I64(1))), n_blocks)
        n_rounds = loop.number(N_ROUNDS) if tile.has_rounds else I64(1)
        with loop.each(I64(0), n_rounds) as turn, loop.each(start, stop) as row:
            out_row = b.add(out, b.mul(row, loop.number(OUT_PITCH)))
            sums = _sums(loop, tile, x, row, turn, out_row)
            beside_row = b.add(beside, b.mul(row, loop.number(BESIDE_PITCH)))
            with b.if_else(b.icmp_signed("==", turn, b.sub(n_rounds, I64(1)))) as (then, otherwise):
                with then:
                    larger = loop.load(loop.at(loop.number(LARGER), row)) if tile.has_larger else None
                    _finish(loop, tile, sums, larger, out_row, beside_row, bad)
                with otherwise:
                    for value, distance in zip(sums, tile.in_out):
                        loop.store(value, out_row, distance)
    raise_flag(loop, b.load(bad), tile.lanes, loop.number(FLAG))


def _sums(loop: Loop, tile: Tile, x: Any, row: Any, turn: Any, out_row: Any) -> list[Any]:
    """The sums of a row after this round."""
    b = loop.b
    row_at = loop.at(loop.number(ROWS), b.add(row, b.mul(turn, loop.number(N_ROWS))), 8 * ROW_NUMBERS)
    place = loop.cells([b.add(x, loop.load(row_at, I64))])[0]
    first, last = loop.load(row_at, I64, -8), loop.load(row_at, I64, 8)
    cells = loop.cells([loop.splat(loop.load(loop.at(loop.number(BIAS), row)), tile.lanes)] * len(tile.in_x))
    if tile.has_rounds:
        with b.if_then(b.icmp_signed(">", turn, I64(0))):
            for cell, distance in zip(cells, tile.in_out):
                b.store(loop.load(out_row, vector(tile.lanes), distance), cell)
    values, steps = loop.number(VALUES), loop.number(STEPS)
    with loop.each(first, last) as j:
        value = loop.splat(loop.load(loop.at(values, j)), tile.lanes)
        here = b.load(place)
        for cell, distance in zip(cells, tile.in_x):
            b.store(fused(b, value, loop.load(here, vector(tile.lanes), distance), b.load(cell)), cell)
        step = b.zext(loop.load(loop.at(steps, j, 2), I16), I64)
        b.store(b.add(here, b.mul(step, I64(tile.unit))), place)
    return [b.load(cell) for cell in cells]


def _finish(loop: Loop, tile: Tile, sums: list[Any], larger: Any, out: Any, beside: Any, bad: Any) -> None:
    b = loop.b
    zero = constant(0.0, tile.lanes)
    factor = None if larger is None else loop.splat(larger, tile.lanes)
    for i, value in enumerate(sums):
        if factor is not None:
            b.store(fused(b, b.fmul(value, factor), zero, b.load(bad)), bad)
        if tile.in_beside is not None:
            value = b.fadd(value, loop.load(beside, vector(tile.lanes), tile.in_beside[i]))
        b.store(fused(b, value, zero, b.load(bad)), bad)  # NaN from the first value that is not finite
        loop.store(emit_tail(loop, tile.act, value, tile.lanes), out, tile.in_out[i])


def raise_flag(loop: Loop, bad: Any, lanes: int, flag: Any) -> None:
    """Sets the flag where some value was not finite."""
    b = loop.b
    total = bad if lanes == 1 else b.extract_element(bad, I64(0))
    for lane in range(1, lanes):
        total = b.fadd(total, b.extract_element(bad, I64(lane)))
    with b.if_then(b.fcmp_unordered("uno", total, total)):
        loop.store(F32(1.0), flag)
