"""The sparse product behind convolutions and linear layers: packed weights, and a loop over strips of the output.

    out[r, strip] = act(bias[r] + sum over kept weights j of row r:  value[j] * x[place[j] + strip]  + addend[r, strip])

A strip is a tile of `n` vectors of `lanes` positions, at fixed distances from one another. Their sums stay in registers
while the loop goes through the kept weights of a row: one load and one multiply-add per vector, and nothing for zeros.
All rows are computed for one strip before the next, so the part of x they read stays in cache. If that part exceeds the
first-level cache, the channels are processed in rounds, with partial sums stored in `out`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sipp.native import machine_code, processor, vector
from sipp.runtime.activations import activate
from sipp.runtime.buffers import Operand
from sipp.runtime.kernel import Watch, tasks

LONGEST = 2**16 - 1  # largest step between two weights
MOST_VECTORS = min(16, processor.REGISTERS - 6)  # per tile: their sums must fit in registers, beside weights and inputs

# --- Kept weights -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """The kept weights of a layer: values, and 16-bit steps between the positions in x that they read.

    A row becomes  start, (value, step), (value, step) ..: the position of its first kept weight (64 bits), and after
    each value the distance to the next position, in units of `unit` floats (see `pack`). Distances beyond 16 bits are
    bridged by zero weights. `rows` holds one number, then (start in bytes, end in values) for every row.
    """

    rows: np.ndarray  # int64, 1 + 2 R
    values: np.ndarray  # float32
    steps: np.ndarray  # uint16

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(part) for part in (self.rows, self.values, self.steps))


def pack(rows: np.ndarray, places: np.ndarray, values: np.ndarray, n_rows: int, unit: int) -> Packed:
    """Packs weights given as row number, position in x (floats, a multiple of `unit`) and value, in any order."""
    order = np.lexsort((places, rows))
    rows, places, values = rows[order], places[order] // unit, values[order]
    is_next = np.zeros(len(rows), np.int64)
    if len(rows) > 1:
        is_next[1:] = np.where(rows[1:] == rows[:-1], places[1:] - places[:-1], 0)
    n_bridges = np.maximum(is_next - 1, 0) // LONGEST
    at = np.cumsum(n_bridges) + np.arange(len(rows))  # where each weight goes
    n_all = int(at[-1]) + 1 if len(rows) else 0
    packed_values = np.zeros(n_all, np.float32)
    packed_values[at] = values
    steps = np.full(n_all, LONGEST, np.uint16)  # of bridges
    last = is_next - n_bridges * LONGEST  # the step that ends at a weight
    steps[at[1:] - 1] = last[1:]
    if n_all:
        steps[-1] = 0
    table = np.zeros(1 + 2 * n_rows, np.int64)
    counts = np.bincount(rows, weights=1 + n_bridges, minlength=n_rows).astype(np.int64)
    table[2::2] = np.cumsum(counts)
    first = np.searchsorted(rows, np.arange(n_rows))
    has_any = np.bincount(rows, minlength=n_rows) > 0
    table[1::2][has_any] = places[first[has_any]] * unit * vector.FLOAT_BYTES
    return Packed(table, packed_values, steps)


# --- Strips -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """The shape of a strip: offsets (in bytes) of its vectors in x, in out and in the addend."""

    lanes: int
    in_x: tuple[int, ...]
    in_out: tuple[int, ...]
    in_addend: tuple[int, ...] | None
    unit: int  # bytes of one step between weights
    act: str  # `activations.py`
    has_rounds: bool
    is_shrunk: bool  # whether to check for overflow before a folded norm


@dataclass(frozen=True)
class Tiling:
    """An output divided into strips: their tile, and where each starts (bytes in x, out, addend)."""

    tile: Tile
    strips: np.ndarray
    n_rounds: int


def tilings(
    height: int, width: int, x: Operand, out: Operand, addend: Operand | None, act: str, is_shrunk: bool,
    rounds: Callable[[int, int], list[int]],
) -> list[Tiling]:  # fmt: skip
    """The tilings worth timing. Pixels of `out` and `addend` are adjacent, those of x need not be.

    `rounds(n_rows, n_floats)` returns the numbers of rounds to try for tiles of that size.
    """
    n = x.n
    is_line = x.pixel == n
    lanes = _lanes(n, width * n if is_line else n)
    n_wide, n_high = _shape(width * n // lanes, height, 1 if is_line else n // lanes)
    operands = (x, out, addend or out)
    in_x, in_out, in_addend = (_distances(operand, n_high, n_wide, lanes) for operand in operands)
    strips = [
        [vector.FLOAT_BYTES * (one.origin + row * one.line + _column(one, start)) for one in operands]
        for row in _starts(height, n_high)
        for start in _starts(width * n, n_wide * lanes)
    ]
    overlaps = height % n_high or (width * n) % (n_wide * lanes)
    ways, places = rounds(n_high, n_wide * lanes), np.array(strips, np.int64)
    tile = Tile(lanes, in_x, in_out, in_addend if addend else None, n * vector.FLOAT_BYTES, act, False, is_shrunk)
    if overlaps:  # threads would add to the same sums
        ways = [k for k in ways if k == 1]
    return [Tiling(replace(tile, has_rounds=k > 1), places, k) for k in ways]


def _lanes(n: int, run: int) -> int:
    """The widest vector that fits: across points if their number is rounded up, else along a row of pixels."""
    lanes = processor.LANES
    while lanes > run or (n % 8 == 0 and n % lanes):
        lanes //= 2
    return lanes


def _shape(n_vectors: int, height: int, per_pixel: int) -> tuple[int, int]:
    """(vectors per row, rows) of a tile of about MOST_VECTORS, with strips as equal as possible."""
    if n_vectors >= MOST_VECTORS:
        n_wide = -(-n_vectors // -(-n_vectors // MOST_VECTORS))
        if n_wide > per_pixel:
            return n_wide // per_pixel * per_pixel, 1
        while per_pixel % n_wide:
            n_wide -= 1
        return n_wide, 1
    n_high = max(1, min(height, MOST_VECTORS // n_vectors))
    return n_vectors, -(-height // -(-height // n_high))


def _distances(operand: Operand, n_high: int, n_wide: int, lanes: int) -> tuple[int, ...]:
    """The vectors of a tile, in bytes from its first."""
    places = [i * operand.line + _column(operand, j * lanes) for i in range(n_high) for j in range(n_wide)]
    return tuple(vector.FLOAT_BYTES * place for place in places)


def _column(operand: Operand, position: int) -> int:
    """The offset of a position (pixel x n + point) within a row."""
    n = operand.n
    return position if operand.pixel == n else position // n * operand.pixel + position % n


def _starts(length: int, size: int) -> list[int]:
    """Starts of ranges of `size` that cover `length`; the last may overlap the one before."""
    return [min(start, length - size) for start in range(0, length, size)]


# --- The loop ---------------------------------------------------------------------------------------------------------


STRIP_NUMBERS = 3  # start of a strip in x, out and addend (bytes)
ROW_NUMBERS = 2  # position in x of a row's first weight (bytes), and the row's end in `values`


def emit_strips(b: Any, args: machine_code.Arguments, tile: Tile) -> None:
    """Emits the loop for strips of this shape."""
    n_blocks, n_rows = args.number("n_blocks"), args.number("n_rows")
    with tasks(b, tile.lanes, args, b.mul(args.number("n_strips"), n_blocks)) as (task, watch):
        strip, block = b.sdiv(task, n_blocks), b.srem(task, n_blocks)
        place = vector.address_of(b, args.number("strips"), strip, vector.LONG_BYTES * STRIP_NUMBERS)
        names = ("x", "out", "addend")
        starts = [vector.load(b, place, vector.I64, vector.LONG_BYTES * i) for i in range(STRIP_NUMBERS)]
        x, out, addend = (b.add(args.number(name), start) for name, start in zip(names, starts))
        start = b.sdiv(b.mul(n_rows, block), n_blocks)
        stop = b.sdiv(b.mul(n_rows, b.add(block, vector.I64(1))), n_blocks)
        n_rounds = args.number("n_rounds") if tile.has_rounds else vector.I64(1)
        with vector.each(b, 0, n_rounds) as nth_round, vector.each(b, start, stop) as row:
            out_row = b.add(out, b.mul(row, args.number("out_pitch")))
            sums = _sums(b, args, tile, x, row, nth_round, out_row)
            addend_row = b.add(addend, b.mul(row, args.number("addend_pitch")))
            with b.if_else(b.icmp_signed("==", nth_round, b.sub(n_rounds, vector.I64(1)))) as (then, otherwise):
                with then:
                    _finish(b, args, tile, sums, out_row, addend_row, watch)
                with otherwise:
                    for value, distance in zip(sums, tile.in_out):
                        vector.store(b, value, out_row, distance)


def _sums(b: Any, args: machine_code.Arguments, tile: Tile, x: Any, row: Any, nth_round: Any, out: Any) -> list[Any]:
    """Emits the sums of a row after this round."""
    kind, nth_row = vector.of(tile.lanes), b.add(row, b.mul(nth_round, args.number("n_rows")))
    row_at = vector.address_of(b, args.number("rows"), nth_row, vector.LONG_BYTES * ROW_NUMBERS)
    (place,) = vector.variables(b, [b.add(x, vector.load(b, row_at, vector.I64))])
    first, last = (vector.load(b, row_at, vector.I64, i * vector.LONG_BYTES) for i in (-1, 1))
    cells = vector.variables(b, [vector.splat_item(b, args.number("bias"), row, tile.lanes)] * len(tile.in_x))
    if tile.has_rounds:
        with b.if_then(b.icmp_signed(">", nth_round, vector.I64(0))):
            for cell, distance in zip(cells, tile.in_out):
                b.store(vector.load(b, out, kind, distance), cell)
    values, steps = args.number("values"), args.number("steps")
    with vector.each(b, first, last) as j:
        value, here = vector.splat_item(b, values, j, tile.lanes), b.load(place)
        for cell, distance in zip(cells, tile.in_x):
            b.store(vector.fused(b, value, vector.load(b, here, kind, distance), b.load(cell)), cell)
        step = vector.item(b, steps, j, vector.I16)
        b.store(b.add(here, b.mul(step, vector.I64(tile.unit))), place)
    return [b.load(cell) for cell in cells]


def _finish(
    b: Any, args: machine_code.Arguments, tile: Tile, sums: list[Any], out: Any, addend: Any, watch: Watch
) -> None:
    """Emits the end of a row: sum, activation, and the checks for values that are not finite."""
    for i, value in enumerate(sums):
        if tile.is_shrunk:
            watch(b.fmul(value, vector.splat(b, args.real("shrunk"), tile.lanes)))
        if tile.in_addend is not None:
            value = b.fadd(value, vector.load(b, addend, vector.of(tile.lanes), tile.in_addend[i]))
        watch(value)
        vector.store(b, activate(b, tile.act, value), out, tile.in_out[i])
