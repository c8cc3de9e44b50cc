"""Kept weights as the loops read them: values, and 16-bit steps from one place in x to the next.

A row of weights becomes  start, (value, step), (value, step) ..: the place of its first kept weight (64 bits), and after
each value how far on the next one looks, in units of `unit` floats. A distance beyond 16 bits is bridged by weights of
zero at places in between, which are places of the same input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sipp.runtime.code import FLOAT

LONGEST = 2**16 - 1


@dataclass(frozen=True)
class Packed:
    """The kept weights of a layer. rows: one number, then (start in bytes, end in values) of every row."""

    rows: np.ndarray  # int64, 1 + 2 R
    values: np.ndarray  # float32
    steps: np.ndarray  # uint16
    n_rows: int
    unit: int  # floats

    @property
    def n_bytes(self) -> int:
        return int(self.rows.nbytes + self.values.nbytes + self.steps.nbytes)


def pack(rows: np.ndarray, places: np.ndarray, values: np.ndarray, n_rows: int, unit: int) -> Packed:
    """Packs weights given as row number, place in x (floats, a multiple of `unit`) and value, in any order."""
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
    counts = np.bincount(rows, minlength=n_rows) + np.bincount(rows, weights=n_bridges, minlength=n_rows).astype(np.int64)
    table[2::2] = np.cumsum(counts)
    first = np.searchsorted(rows, np.arange(n_rows))
    has_any = np.bincount(rows, minlength=n_rows) > 0
    table[1::2][has_any] = places[first[has_any]] * unit * FLOAT
    return Packed(table, packed_values, steps, n_rows, unit)


def unpack(packed: Packed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row numbers, places in floats, values) of what was packed, bridges included."""
    ends = packed.rows[2::2]
    counts = np.diff(ends, prepend=0)
    rows = np.repeat(np.arange(packed.n_rows), counts)
    steps = np.zeros(len(rows), np.int64)
    steps[1:] = packed.steps[:-1]
    firsts = (ends - counts)[counts > 0]
    steps[firsts] = 0
    run = np.cumsum(steps)
    run -= np.repeat(run[firsts], counts[counts > 0]) if len(rows) else 0
    starts = np.repeat(packed.rows[1::2], counts) // FLOAT
    return rows, starts + run * packed.unit, packed.values


LANES = 8  # rows side by side


@dataclass(frozen=True)
class Interleaved:
    """Kept weights of LANES rows side by side: step by step one value and one 16-bit column of each row.

    Rows with about as many weights stand together; shorter ones end with zeros at column 0.
    """

    groups: np.ndarray  # int64, 1 + groups: where the steps of each group start
    rows: np.ndarray  # int32, groups x LANES: which row a lane is; -1 for none
    values: np.ndarray  # float32, steps x LANES
    columns: np.ndarray  # uint16, steps x LANES

    @property
    def n_bytes(self) -> int:
        return int(sum(part.nbytes for part in (self.groups, self.rows, self.values, self.columns)))


def interleave(weight: np.ndarray) -> Interleaved:
    """Packs a matrix of at most 2**16 columns."""
    n_rows = len(weight)
    counts = (weight != 0).sum(1)
    order = np.argsort(-counts, kind="stable")
    n_groups = -(-n_rows // LANES)
    rows = np.full(n_groups * LANES, -1, np.int32)
    rows[:n_rows] = order
    lengths = counts[order[::LANES]] if n_rows else np.zeros(0, np.int64)
    groups = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    values = np.zeros((int(groups[-1]), LANES), np.float32)
    columns = np.zeros((int(groups[-1]), LANES), np.uint16)
    for i, row in enumerate(order):
        kept = np.flatnonzero(weight[row])
        start = int(groups[i // LANES])
        values[start : start + len(kept), i % LANES] = weight[row, kept]
        columns[start : start + len(kept), i % LANES] = kept
    return Interleaved(groups, rows.reshape(-1, LANES), values, columns)


def separate(packed: Interleaved, shape: tuple[int, int]) -> np.ndarray:
    """The matrix that was interleaved."""
    weight = np.zeros(shape, np.float32)
    for group, rows in enumerate(packed.rows):
        steps = slice(int(packed.groups[group]), int(packed.groups[group + 1]))
        for lane, row in enumerate(rows):
            kept = packed.values[steps, lane] != 0
            if row >= 0:
                weight[row, packed.columns[steps, lane][kept]] = packed.values[steps, lane][kept]
    return weight
