"""A weight with zeros in, the same weight without them out, laid out for the kernels of `kernels.py`.

    bitmap    one bit a weight, and the values of those that are set, row after row
    index     values in groups of 16; a group has its first column in 16 bits, a value how far on it stands in 8 bits
              (or each value its column in 16 bits), stored as the threads read them
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = 32  # of a word of the bitmap
GROUP = {4: 8, 8: 16, 16: 16}  # values that share a first column, by the bits that say how far on each stands
MOST_COLUMNS = 1 << 16  # that 16 bits can say


@dataclass(frozen=True)
class Bitmap:
    """Bit c % 32 of word c // 32 of a row says whether weight c is there; `starts` counts those of the row before it."""

    shape: tuple[int, int]
    words: Tensor  # int32, rows x words
    starts: Tensor  # the same, 16 bits
    rows: Tensor  # int32: where the values of each row begin
    values: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.words, self.starts, self.rows, self.values


@dataclass(frozen=True)
class Index:
    """Slices of `n_rows` rows of similar length; each is some blocks of n_rows x lanes x depth values.

    A thread reads the `depth` values of its lane side by side, while neighbouring lanes hold neighbouring weights of a
    row: what they read of the input lies close together. Rows are sorted by length, so that a slice has few gaps.
    """

    shape: tuple[int, int]
    bits: int
    n_rows: int
    lanes: int
    depth: int
    n_even: int  # blocks of a slice, where all have the same number, else 0
    slices: Tensor  # int32: the block with which each slice begins, and the end
    order: Tensor  # int32: the row of the weight that each row of the slices is; -1 for none
    values: Tensor
    steps: Tensor  # 8 bits from the group's first column; 16 bits: the column
    firsts: Tensor  # 16 bits a group; empty where steps are columns

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.slices, self.order, self.values, self.steps, self.firsts


Layout = Bitmap | Index


def n_bytes(layout: Layout) -> int:
    """What a layout takes in memory."""
    return sum(tensor.nbytes for tensor in layout.tensors)


def as_bitmap(weight: Tensor) -> Bitmap:
    """The weight (rows x columns) as a bitmap and values."""
    n_rows, n_columns = weight.shape
    n_words = -(-n_columns // BITS)
    kept = torch.zeros(n_rows, n_words * BITS, dtype=torch.bool, device=weight.device)
    kept[:, :n_columns] = weight != 0
    by_word = kept.view(n_rows, n_words, BITS)
    places = torch.arange(BITS, dtype=torch.int32, device=weight.device)
    words = (by_word.to(torch.int32) << places).sum(-1, dtype=torch.int32)
    counts = by_word.sum(-1, dtype=torch.int32)
    starts = (counts.cumsum(-1) - counts).to(torch.int16).view(torch.uint16)
    per_row = counts.sum(-1, dtype=torch.int64)
    rows = (per_row.cumsum(0) - per_row).to(torch.int32)
    return Bitmap((n_rows, n_columns), words, starts, rows, weight[weight != 0])


def as_index(weight: Tensor, *, bits: int, n_rows: int, lanes: int, depth: int) -> Index:
    """The weight (rows x columns) as values with places of so many bits, for slices of so many rows and threads."""
    device, n_all, size = weight.device, len(weight), GROUP[bits]
    kept = weight != 0
    row, column = kept.nonzero(as_tuple=True)
    group, within, n_groups = _groups(row, column, kept.sum(-1), bits)

    n_slices, a_block = -(-n_all // n_rows), lanes // size * depth  # groups of one row in a block
    order = n_groups.argsort(descending=True, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(n_all, device=device)  # of each row of the weight
    n_blocks = torch.zeros(n_slices * n_rows, dtype=torch.int64, device=device)
    n_blocks[:n_all] = -(-n_groups[order] // a_block)
    per_slice = n_blocks.view(n_slices, n_rows).amax(-1)
    if bits == 4:
        per_slice = (per_slice + 1) // 2 * 2  # two blocks share the bytes of their steps
    slices = torch.zeros(n_slices + 1, dtype=torch.int64, device=device)
    slices[1:] = per_slice.cumsum(0)
    total = int(slices[-1]) * n_rows * lanes * depth
    least, most = per_slice.aminmax()

    at = place[row]  # row of the slices that each kept weight goes to
    block = slices[at // n_rows] + group // a_block
    of_block = group % a_block
    deep, part = of_block // (lanes // size), of_block % (lanes // size)
    in_block = ((at % n_rows) * lanes + part * size + within) * depth + deep
    to, numbers = block * (n_rows * lanes * depth) + in_block, torch.arange(len(row), device=device)
    values = torch.zeros(total, dtype=weight.dtype, device=device)
    values[to] = weight[kept]
    is_first = within == 0
    leader = torch.cummax(torch.where(is_first, numbers, 0), 0).values
    lead = column[leader]
    if bits == 4:  # also the places of a group that hold nothing look at a column that is there
        lead = lead.clamp(max=weight.shape[1] - size)
    firsts = torch.zeros(0 if bits == 16 else total // size, dtype=torch.int16, device=device)
    if bits == 16:
        steps = torch.zeros(total, dtype=torch.int16, device=device)
        steps[to] = column.to(torch.int16)
        steps = steps.view(torch.uint16)
    else:
        of_group = ((at % n_rows) * (lanes // size) + part) * depth + deep + block * (n_rows * lanes * depth // size)
        firsts[of_group[is_first]] = lead[is_first].to(torch.int16)
        steps = torch.zeros(total // (8 // bits), dtype=torch.int32, device=device)
        if bits == 8:
            steps[to] = (column - lead).to(torch.int32)
        else:
            skipped = (column - lead - within).to(torch.int32) << (block % 2 * 4).to(torch.int32)
            steps.index_add_(0, block // 2 * (n_rows * lanes * depth) + in_block, skipped)
        steps = steps.to(torch.uint8)
    padded = torch.full((n_slices * n_rows,), -1, dtype=torch.int32, device=device)
    padded[:n_all] = order.to(torch.int32)
    return Index(
        (n_all, weight.shape[1]), bits, n_rows, lanes, depth, int(most) if least == most else 0,
        slices.to(torch.int32), padded, values, steps, firsts.view(torch.uint16),
    )  # fmt: skip


def _groups(row: Tensor, column: Tensor, counts: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each kept weight its group in the row and its place in the group; of each row its number of groups.

    A group ends where it is full, or where the bits no longer reach. All rows go on together, a group at a time.
    """
    device, size = row.device, GROUP[bits]
    number = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]  # of each kept weight in its row
    if bits == 16:
        return number // size, number % size, -(-counts // size)
    most = int(counts.max())
    far = torch.full((len(counts), most + 1), 2 * MOST_COLUMNS, dtype=torch.int32, device=device)
    far[row, number] = (column - number if bits == 4 else column).to(torch.int32)  # zeros skipped, or columns
    starts = torch.zeros(len(counts), most + 1, dtype=torch.bool, device=device)
    at = torch.zeros(len(counts), 1, dtype=torch.int64, device=device)
    while bool((at < counts[:, None]).any()):
        starts.scatter_(1, at, True)
        end = torch.searchsorted(far, far.gather(1, at) + (1 << bits))
        at = torch.minimum(torch.minimum(at + size, end), counts[:, None])
    starts.scatter_(1, counts[:, None], False)
    group = starts.cumsum(1) - 1
    first = torch.cummax(torch.where(starts, torch.arange(most + 1, device=device), 0), 1).values
    return group[row, number], number - first[row, number], starts.sum(1)
