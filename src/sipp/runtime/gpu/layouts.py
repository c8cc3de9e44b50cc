"""A weight with zeros in, the same weight without them out, laid out as the threads of `kernels.py` read it.

    places of 8 bits    16 neighbouring weights of a row share their first column in 16 bits, and each says how far on
                        it stands; a group ends early where 8 bits do not reach
    places of 16 bits   each weight says its column

Rows are sorted by length and taken a few at a time, a slice; a slice is some blocks of rows x lanes x depth weights.
A thread reads the `depth` weights of its lane in one load, while neighbouring lanes hold neighbouring weights of a row:
what they pick from the input lies close together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROWS, LANES = 4, 32  # of a slice: one warp a row
DEPTH = 8  # weights that a thread reads in one load
GROUP = 16  # weights that share a first column
MOST_COLUMNS = 1 << 16  # that 16 bits can say


@dataclass(frozen=True)
class Places:
    """Weights with their places. Gaps, where a row is shorter than its slice or a group ends early, hold a 0."""

    shape: tuple[int, int]
    bits: int  # of a place: 8 or 16
    depth: int
    n_even: int  # blocks of a slice, where all have the same number, else 0
    slices: Tensor  # int32: the block with which each slice begins, and the end
    order: Tensor  # int32: the row of the weight that each row of the slices is; -1 for none
    values: Tensor
    steps: Tensor  # uint8: columns from the group's first; uint16: the column
    firsts: Tensor  # uint16: a group's first column; empty for places of 16 bits

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.slices, self.order, self.values, self.steps, self.firsts

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def on(self, tensors: tuple[Tensor, ...]) -> Places:
        """The same weight in other memory."""
        slices, order, values, steps, firsts = tensors
        return replace(self, slices=slices, order=order, values=values, steps=steps, firsts=firsts)


def with_places(weight: Tensor, *, bits: int, depth: int = DEPTH) -> Places:
    """The weight (rows x columns, of at most 65,536) without its zeros."""
    device, n_all = weight.device, len(weight)
    kept = weight != 0
    row, column = kept.nonzero(as_tuple=True)
    group, within, n_groups = _groups(row, column, kept.sum(-1), bits)

    n_slices, a_block = -(-n_all // ROWS), LANES // GROUP * depth  # groups of one row in a block
    order = n_groups.argsort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(n_all, dtype=torch.int64, device=device)  # of each row of the weight
    n_blocks = torch.zeros(n_slices * ROWS, dtype=torch.int64, device=device)
    n_blocks[:n_all] = -(-n_groups[order] // a_block)
    per_slice = n_blocks.view(n_slices, ROWS).amax(-1)
    slices = torch.zeros(n_slices + 1, dtype=torch.int64, device=device)
    slices[1:] = per_slice.cumsum(0)
    least, most = per_slice.aminmax()

    at = place[row]  # row of the slices that each kept weight goes to
    line = (slices[at // ROWS] + group // a_block) * ROWS + at % ROWS  # row of which block
    deep, part = group % a_block // (LANES // GROUP), group % a_block % (LANES // GROUP)
    to = (line * LANES + part * GROUP + within) * depth + deep
    n_places = int(slices[-1]) * ROWS * LANES * depth
    values = torch.zeros(n_places, dtype=weight.dtype, device=device)
    values[to] = weight[kept]
    firsts = torch.zeros(0 if bits == 16 else n_places // GROUP, dtype=torch.int16, device=device)
    if bits == 16:
        steps = torch.zeros(n_places, dtype=torch.int16, device=device)
        steps[to] = column.to(torch.int16)
        steps = steps.view(torch.uint16)
    else:
        numbers = torch.arange(len(row), dtype=torch.int64, device=device)
        is_first = within == 0
        first = column[torch.cummax(torch.where(is_first, numbers, 0), 0).values]
        firsts[((line * (LANES // GROUP) + part) * depth + deep)[is_first]] = column[is_first].to(torch.int16)
        steps = torch.zeros(n_places, dtype=torch.uint8, device=device)
        steps[to] = (column - first).to(torch.uint8)
    rows = torch.full((n_slices * ROWS,), -1, dtype=torch.int32, device=device)
    rows[:n_all] = order.to(torch.int32)
    return Places(
        (n_all, weight.shape[1]), bits, depth, int(most) if least == most else 0, slices.to(torch.int32), rows, values,
        steps, firsts.view(torch.uint16),
    )  # fmt: skip


def _groups(row: Tensor, column: Tensor, counts: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each kept weight its group in the row and its place in the group; of each row its number of groups.

    A group ends where it is full, or where the bits no longer reach. All rows go on together, a group at a time.
    """
    device = row.device
    begin = counts.cumsum(0) - counts
    number = torch.arange(len(row), dtype=torch.int64, device=device) - begin[row]  # of each kept weight in its row
    if bits == 16:
        return number // GROUP, number % GROUP, -(-counts // GROUP)
    most = int(counts.max())
    columns = torch.full((len(counts), most + 1), 2 * MOST_COLUMNS, dtype=torch.int32, device=device)
    columns[row, number] = column.to(torch.int32)
    starts = torch.zeros(len(counts), most + 1, dtype=torch.bool, device=device)
    at = torch.zeros(len(counts), 1, dtype=torch.int64, device=device)
    while bool((at < counts[:, None]).any()):
        starts.scatter_(1, at, True)
        end = torch.searchsorted(columns, columns.gather(1, at) + (1 << bits))
        at = torch.minimum(torch.minimum(at + GROUP, end), counts[:, None])
    starts.scatter_(1, counts[:, None], False)
    group = starts.cumsum(1) - 1
    here = torch.arange(most + 1, dtype=torch.int64, device=device)
    first = torch.cummax(torch.where(starts, here, 0), 1).values
    return group[row, number], number - first[row, number], starts.sum(1)
