"""A sparse matrix times one vector: LANES rows at a time, each reading its own position in a window of the vector.

out[row] = act(bias[row] + sum over kept weights:  value * x[column]  + addend[row])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sipp.native import machine_code, processor, vector
from sipp.runtime.activations import activate
from sipp.runtime.kernel import tasks

MOST_COLUMNS = processor.LANES * 2**16
KIND, KIND_BYTES = vector.of(processor.LANES), processor.LANES * vector.FLOAT_BYTES  # a vector of numbers
LOOKUP = "llvm.x86.avx512.permvar.sf.512" if processor.WIDE else "llvm.x86.avx2.permps" if processor.HAS_AVX2 else None


@dataclass(frozen=True)
class Windows:
    """Kept weights for a product with one vector: groups of LANES rows, windows of LANES columns.

    A step holds one weight of each row of a group and its position in the window; rows without further weights in the
    window are padded with zeros. Each group has an even number of steps.
    """

    ends: np.ndarray  # int64, 1 + groups: end of each group's steps
    values: np.ndarray  # float32, steps x LANES
    places: np.ndarray  # uint8, steps x LANES
    windows: np.ndarray  # uint16, steps

    @property
    def arguments(self) -> dict[str, np.ndarray | int]:
        """What `group_sums` reads, by argument name."""
        return {**vars(self), "n_groups": len(self.ends) - 1}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(part) for part in vars(self).values())


def pack_windows(weight: np.ndarray) -> Windows:
    """Packs a matrix of at most LANES x 2**16 columns."""
    rows, columns = weight.nonzero()
    n_groups, n_windows = -(-weight.shape[0] // processor.LANES), -(-weight.shape[1] // processor.LANES)
    cell = rows * n_windows + columns // processor.LANES  # of one row and one window; in order
    first = np.searchsorted(cell, cell)
    rank = np.arange(len(cell)) - first
    block = rows // processor.LANES * n_windows + columns // processor.LANES
    n_steps = np.zeros(n_groups * n_windows, np.int64)
    np.maximum.at(n_steps, block, rank + 1)
    per_group = n_steps.reshape(n_groups, n_windows)
    per_group[:, -1:] += per_group.sum(1, keepdims=True) % 2
    starts = np.cumsum(n_steps) - n_steps
    n_all = int(n_steps.sum())
    values, places = np.zeros((n_all, processor.LANES), np.float32), np.zeros((n_all, processor.LANES), np.uint8)
    at = starts[block] + rank
    values[at, rows % processor.LANES] = weight[rows, columns]
    places[at, rows % processor.LANES] = columns % processor.LANES
    windows = np.repeat(np.tile(np.arange(n_windows, dtype=np.uint16), n_groups), n_steps)
    ends = np.concatenate(([0], np.cumsum(per_group.sum(1)))).astype(np.int64)
    return Windows(ends, values, places, windows)


def emit_vector(b: Any, args: machine_code.Arguments, act: str, has_addend: bool, is_shrunk: bool) -> None:
    with tasks(b, processor.LANES, args, args.number("n_groups")) as (group, watch):
        value = group_sums(b, args, group, args.number("x"))
        row = b.mul(group, vector.I64(processor.LANES))
        if is_shrunk:
            watch(b.fmul(value, vector.splat(b, args.real("shrunk"), processor.LANES)))
        if has_addend:
            value = b.fadd(value, vector.load(b, vector.address_of(b, args.number("addend"), row), KIND))
        watch(value)
        vector.store(b, activate(b, act, value), vector.address_of(b, args.number("out"), row))


def group_sums(b: Any, args: machine_code.Arguments, group: Any, x: Any) -> Any:
    """Emits bias + W x for one group of rows, with two alternating sums per row; W is the `Windows` in `args`."""
    lanes = processor.LANES
    bias, ends, values, places, windows = map(args.number, ("bias", "ends", "values", "places", "windows"))
    end_at = vector.address_of(b, ends, group, vector.LONG_BYTES)
    first_step, last_step = (vector.load(b, end_at, vector.I64, i * vector.LONG_BYTES) for i in range(2))
    start = vector.load(b, vector.address_of(b, bias, b.mul(group, vector.I64(lanes))), KIND)
    sums = vector.variables(b, [start, vector.constant(0.0, lanes)])
    with vector.each(b, first_step, last_step, len(sums)) as first:
        for i, cell in enumerate(sums):
            step = b.add(first, vector.I64(i))
            window = vector.item(b, windows, step, vector.I16)
            place = vector.load(b, vector.address_of(b, places, step, lanes), vector.of(lanes, vector.I8))
            place = b.zext(place, vector.of(lanes, vector.I32))
            term = _look_up(b, vector.address_of(b, x, window, KIND_BYTES), place)
            value = vector.load(b, vector.address_of(b, values, step, KIND_BYTES), KIND)
            b.store(vector.fused(b, value, term, b.load(cell)), cell)
    return b.fadd(*(b.load(cell) for cell in sums))


def _look_up(b: Any, window: Any, place: Any) -> Any:
    """The elements of a window at these positions: one instruction if the processor has it."""
    if LOOKUP is not None:
        return vector.call(b, LOOKUP, KIND, [vector.load(b, window, KIND), place])
    elements = vector.constant(0.0, processor.LANES)
    for lane in range(processor.LANES):
        i = b.zext(b.extract_element(place, vector.I32(lane)), vector.I64)
        elements = b.insert_element(elements, vector.load(b, vector.address_of(b, window, i)), vector.I32(lane))
    return elements
