"""Packs a weight without its zeros, in the layout that the threads of `kernels.py` read.

Each thread walks along a row from kept weight to kept weight: 16 bits give the column of its first one, 8 bits the
distance to each next one. Distances beyond 255 columns are bridged by zeros. Neighbouring threads hold neighbouring
weights of the row as far as 8 bits reach, so they read nearby inputs.

Rows are sorted by length and grouped into slices of a few rows. A slice consists of blocks, in which each thread has
four weights (eight for int8), whose values and distances it loads at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MOST_COLUMNS = 1 << 16  # addressable with 16 bits
FURTHEST = 255  # largest distance in 8 bits
LIKELY = 170  # average distance at which few are beyond 255
LEVELS = 5  # if slices differ by at most this many blocks, their offsets are computed, not loaded
MOST_INT8 = 127


@dataclass(frozen=True)
class Walks:
    """A packed weight: values and distances. Walks shorter than their slice end in zero weights at distance 0."""

    shape: tuple[int, int]
    n_lanes: int  # threads per row
    n_rows: int  # per slice
    n_least: int  # blocks of the shortest slice
    n_longer: tuple[int, ...]  # how many slices have more than 0, 1, .. further blocks; empty if more than LEVELS
    slices: Tensor  # int32: first block of each slice, and the end
    order: Tensor  # int32: the row of the weight for each row of the slices; -1 for padding
    starts: Tensor  # uint16: the first column of each thread of each slice
    values: Tensor
    distances: Tensor  # uint8: columns from the previous weight
    scales: Tensor  # float32: factor for the values of each row of the slices; empty: 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.slices, self.order, self.starts, self.values, self.distances, self.scales

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def on(self, tensors: tuple[Tensor, ...]) -> Walks:
        """The same weight in other tensors."""
        slices, order, starts, values, distances, scales = tensors
        return replace(
            self, slices=slices, order=order, starts=starts, values=values, distances=distances, scales=scales
        )


def depth_of(dtype: torch.dtype) -> int:
    """Weights per thread and block."""
    return 8 if dtype == torch.int8 else 4


def as_walks(weight: Tensor, *, n_lanes: int, n_rows: int, scales: Tensor | None = None) -> Walks:
    """Packs a weight (rows x columns, at most 65,536 columns); as int8 if each row has a scale."""
    device, n_all = weight.device, len(weight)
    kept = weight != 0
    row, column = kept.nonzero(as_tuple=True)
    values = weight[kept] if scales is None else (weight[kept] / scales[row]).round().to(torch.int8)
    n_slices, depth = -(-n_all // n_rows), depth_of(values.dtype)

    lane = _lanes(row, kept.sum(-1), n_lanes, float(kept.double().mean()))
    by_lane = (row * n_lanes + lane).argsort(stable=True)
    row, column, lane, values = row[by_lane], column[by_lane], lane[by_lane], values[by_lane]
    walk = row * n_lanes + lane
    is_first = torch.ones_like(walk, dtype=torch.bool)
    is_first[1:] = walk[1:] != walk[:-1]
    distance = torch.zeros_like(column)
    distance[1:] = column.diff()
    distance[is_first] = 0
    n_between = (distance - 1).clamp(min=0) // FURTHEST  # zeros that bridge large distances
    number = (1 + n_between).cumsum(0) - 1
    begin = torch.zeros(n_all * n_lanes, dtype=torch.int64, device=device)
    begin[walk[is_first]] = number[is_first]
    number -= begin[walk]  # index of each weight in its walk
    lengths = torch.zeros(n_all * n_lanes, dtype=torch.int64, device=device)
    lengths = lengths.scatter_reduce_(0, walk, number + 1, "amax").view(n_all, n_lanes).amax(-1)

    order = lengths.argsort(descending=True, stable=True)
    n_blocks = torch.zeros(n_slices * n_rows, dtype=torch.int64, device=device)
    n_blocks[:n_all] = -(-lengths[order] // depth)
    per_slice = n_blocks.view(n_slices, n_rows)[:, 0]  # the longest row comes first
    slices = torch.zeros(n_slices + 1, dtype=torch.int64, device=device)
    slices[1:] = per_slice.cumsum(0)
    place = torch.empty_like(order)
    place[order] = torch.arange(n_all, dtype=torch.int64, device=device)
    place = place[row]  # the slice row of each kept weight
    thread = place % n_rows * n_lanes + lane

    def positions(number: Tensor, of: Tensor) -> Tensor:
        """The index of weight `number` of a walk in an array of blocks x threads x weights."""
        block = slices[place[of] // n_rows] + number // depth
        return (block * n_rows * n_lanes + thread[of]) * depth + number % depth

    everyone = torch.arange(len(row), dtype=torch.int64, device=device)
    n_places = int(slices[-1]) * n_rows * n_lanes * depth
    laid = torch.zeros(n_places, dtype=values.dtype, device=device)
    laid[positions(number, everyone)] = values
    distances = torch.zeros(n_places, dtype=torch.uint8, device=device)
    distances[positions(number, everyone)] = (distance - FURTHEST * n_between).to(torch.uint8)
    after = everyone.repeat_interleave(n_between)
    back = torch.arange(len(after), dtype=torch.int64, device=device) - (n_between.cumsum(0) - n_between)[after]
    distances[positions(number[after] - 1 - back, after)] = FURTHEST
    starts = torch.zeros(n_slices * n_rows * n_lanes, dtype=torch.int16, device=device)
    starts[(place * n_lanes + lane)[is_first]] = column[is_first].to(torch.int16)
    rows = torch.full((n_slices * n_rows,), -1, dtype=torch.int32, device=device)
    rows[:n_all] = order.to(torch.int32)
    own_scales = torch.ones(0 if scales is None else len(rows), dtype=torch.float32, device=device)
    if scales is not None:
        own_scales[:n_all] = scales[order].float()
    least, most = int(per_slice[-1]), int(per_slice[0])
    longer = tuple(int((per_slice > least + i).sum()) for i in range(LEVELS)) if most - least <= LEVELS else ()
    return Walks(
        (n_all, weight.shape[1]), n_lanes, n_rows, least, longer, slices.to(torch.int32), rows,
        starts.view(torch.uint16), laid, distances, own_scales,
    )  # fmt: skip


def _lanes(row: Tensor, counts: Tensor, n_lanes: int, keep: float) -> Tensor:
    """The thread of each kept weight: neighbours go to neighbouring threads, as far as 8 bits reach."""
    n_neighbours = n_lanes
    while n_neighbours > 1 and n_neighbours > LIKELY * keep:
        n_neighbours //= 2
    number = torch.arange(len(row), dtype=torch.int64, device=row.device) - (counts.cumsum(0) - counts)[row]
    part = (-(-counts // n_lanes) * n_neighbours)[row]  # weights of a row shared by these threads
    return number // part * n_neighbours + number % part % n_neighbours


def int8_scales(weight: Tensor) -> Tensor | None:
    """A scale for each row such that its weights are int8 times the scale, up to rounding; None if not all rows fit."""
    scales = weight.abs().amax(-1).double() / MOST_INT8
    scales = torch.where(scales > 0, scales, 1.0)
    back = (weight.double() / scales[:, None]).round() * scales[:, None]
    rounding = torch.finfo(weight.dtype).eps
    is_exact = ((back - weight.double()).abs() <= rounding * weight.double().abs()).all()
    return scales.float() if bool(is_exact) else None
