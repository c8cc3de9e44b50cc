"""Kept weights as the loops read them: values, and 16-bit steps from one place in x to the next.

A row of weights becomes  start, (value, step), (value, step) ..: the place of its first kept weight (64 bits), and
after each value how far on the next one looks, in units of `unit` floats. A distance beyond 16 bits is bridged by
weights of zero at places in between, which are places of the same input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sipp.runtime.code import FLOAT
from sipp.scoring.kernels.cpu.host import WIDE

LONGEST = 2**16 - 1
LANES = 16 if WIDE else 8  # rows side by side, and columns of a window, in the product with one vector


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
    counts = np.bincount(rows, weights=1 + n_bridges, minlength=n_rows).astype(np.int64)
    table[2::2] = np.cumsum(counts)
    first = np.searchsorted(rows, np.arange(n_rows))
    has_any = np.bincount(rows, minlength=n_rows) > 0
    table[1::2][has_any] = places[first[has_any]] * unit * FLOAT
    return Packed(table, packed_values, steps, n_rows, unit)


@dataclass(frozen=True)
class Windows:
    """Kept weights for the product with one vector: LANES rows side by side, LANES columns (a window) at a time.

    A step has one weight of each row of a group, and where in the window it looks; a row that has no more weights there
    takes part with a zero. Groups have an even number of steps.
    """

    ends: np.ndarray  # int64, 1 + groups: where the steps of each group end
    values: np.ndarray  # float32, steps x LANES
    places: np.ndarray  # uint8, steps x LANES
    windows: np.ndarray  # uint16, steps

    @property
    def n_bytes(self) -> int:
        return int(sum(part.nbytes for part in (self.ends, self.values, self.places, self.windows)))


def pack_windows(weight: np.ndarray) -> Windows:
    """Packs a matrix of at most LANES x 2**16 columns."""
    rows, columns = weight.nonzero()
    n_groups, n_windows = -(-weight.shape[0] // LANES), -(-weight.shape[1] // LANES)
    cell = rows * n_windows + columns // LANES  # of one row and one window; in order
    first = np.searchsorted(cell, cell)
    rank = np.arange(len(cell)) - first
    block = rows // LANES * n_windows + columns // LANES
    n_steps = np.zeros(n_groups * n_windows, np.int64)
    np.maximum.at(n_steps, block, rank + 1)
    per_group = n_steps.reshape(n_groups, n_windows)
    per_group[:, -1:] += per_group.sum(1, keepdims=True) % 2
    starts = np.cumsum(n_steps) - n_steps
    n_all = int(n_steps.sum())
    values, places = np.zeros((n_all, LANES), np.float32), np.zeros((n_all, LANES), np.uint8)
    at = starts[block] + rank
    values[at, rows % LANES] = weight[rows, columns]
    places[at, rows % LANES] = columns % LANES
    windows = np.repeat(np.tile(np.arange(n_windows, dtype=np.uint16), n_groups), n_steps)
    ends = np.concatenate(([0], np.cumsum(per_group.sum(1)))).astype(np.int64)
    return Windows(ends, values, places, windows)
