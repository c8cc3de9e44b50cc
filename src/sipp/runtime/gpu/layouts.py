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
import torch.nn.functional as F
from torch import Tensor

MOST_COLUMNS = 1 << 16  # addressable with 16 bits
FURTHEST = 255  # largest distance in 8 bits
LIKELY = 170  # average distance at which few are beyond 255
LEVELS = 5  # if slices differ by at most this many blocks, where they begin is computed, not loaded
MOST_INT8 = 127
WARP = 32  # threads that run together


@dataclass(frozen=True)
class Walks:
    """A packed weight: values and distances. Walks shorter than their slice end in zero weights at distance 0."""

    shape: tuple[int, int]
    n_lanes: int  # threads per row
    n_rows: int  # per slice
    min_blocks: int  # blocks of the shortest slice, which is the last
    slices_above: tuple[int, ...]  # how many slices have more than min_blocks + 0, 1, .. blocks; empty: see LEVELS
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
    kept = _kept_weights(weight, n_lanes, scales)
    depth, n_all, device = depth_of(kept.values.dtype), len(weight), weight.device
    order, n_blocks = _slices(kept, n_all, n_lanes, n_rows, depth)
    first_blocks = F.pad(n_blocks.cumsum(0), (1, 0))
    place = order.argsort()[kept.row]  # the row among all slices of each kept weight

    def position(number: Tensor, of: Tensor | slice) -> Tensor:
        """The index of weight `number` of a walk in an array of blocks x threads x weights."""
        block = first_blocks[place[of] // n_rows] + number // depth
        thread = place[of] % n_rows * n_lanes + kept.lane[of]
        return (block * n_rows * n_lanes + thread) * depth + number % depth

    n_positions = int(first_blocks[-1]) * n_rows * n_lanes * depth
    values = torch.zeros(n_positions, dtype=kept.values.dtype, device=device)
    distances = torch.zeros(n_positions, dtype=torch.uint8, device=device)
    at = position(kept.number, slice(None))
    values[at] = kept.values
    distances[at] = (kept.distance - FURTHEST * kept.n_bridges).to(torch.uint8)
    bridged, nth = _repeats(kept.n_bridges)
    distances[position(kept.number[bridged] - 1 - nth, bridged)] = FURTHEST
    n_slices = len(n_blocks)
    starts = torch.zeros(n_slices * n_rows * n_lanes, dtype=torch.int16, device=device)
    starts[(place * n_lanes + kept.lane)[kept.is_first]] = kept.column[kept.is_first].to(torch.int16)
    rows = F.pad(order.to(torch.int32), (0, n_slices * n_rows - n_all), value=-1)
    own_scales = torch.ones(0 if scales is None else len(rows), dtype=torch.float32, device=device)
    if scales is not None:
        own_scales[:n_all] = scales[order].float()
    least, most = int(n_blocks[-1]), int(n_blocks[0])
    above = tuple(int((n_blocks > least + i).sum()) for i in range(LEVELS)) if most - least <= LEVELS else ()
    return Walks(
        (n_all, weight.shape[1]), n_lanes, n_rows, least, above, first_blocks.to(torch.int32), rows,
        starts.view(torch.uint16), values, distances, own_scales,
    )  # fmt: skip


@dataclass(frozen=True)
class _Kept:
    """The kept weights in the order of their walks: thread by thread, from left to right."""

    row: Tensor
    column: Tensor
    lane: Tensor  # the thread of its row
    values: Tensor
    is_first: Tensor  # of its walk
    distance: Tensor  # columns from the previous one of its walk
    n_bridges: Tensor  # zeros before it, where that is further than 8 bits reach
    number: Tensor  # its place in its walk, these zeros counted


def _kept_weights(weight: Tensor, n_lanes: int, scales: Tensor | None) -> _Kept:
    """The kept weights, shared out among the threads of their rows."""
    kept = weight != 0
    row, column = kept.nonzero(as_tuple=True)
    values = weight[kept] if scales is None else (weight[kept] / scales[row]).round().to(torch.int8)
    lane = _lanes(row, kept.sum(-1), n_lanes, float(kept.double().mean()))
    by_walk = (row * n_lanes + lane).argsort(stable=True)
    row, column, lane, values = row[by_walk], column[by_walk], lane[by_walk], values[by_walk]
    walk = row * n_lanes + lane
    is_first = torch.ones_like(walk, dtype=torch.bool)
    is_first[1:] = walk[1:] != walk[:-1]
    distance = torch.zeros_like(column)
    distance[1:] = column.diff()
    distance[is_first] = 0
    n_bridges = (distance - 1).clamp(min=0) // FURTHEST
    number = (1 + n_bridges).cumsum(0) - 1
    begin = torch.zeros(len(weight) * n_lanes, dtype=torch.int64, device=weight.device)
    begin[walk[is_first]] = number[is_first]
    return _Kept(row, column, lane, values, is_first, distance, n_bridges, number - begin[walk])


def _slices(kept: _Kept, n_all: int, n_lanes: int, n_rows: int, depth: int) -> tuple[Tensor, Tensor]:
    """The rows sorted by their longest walk, and the blocks of each slice of `n_rows` of them."""
    lengths = torch.zeros(n_all, dtype=torch.int64, device=kept.row.device)
    lengths = lengths.scatter_reduce_(0, kept.row, kept.number + 1, "amax")
    order = lengths.argsort(descending=True, stable=True)
    return order, -(-lengths[order][::n_rows] // depth)  # the longest row of a slice comes first


def _repeats(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Each index as often as it counts, and which time it is."""
    index = torch.arange(len(counts), dtype=torch.int64, device=counts.device).repeat_interleave(counts)
    nth = torch.arange(len(index), dtype=torch.int64, device=counts.device) - (counts.cumsum(0) - counts)[index]
    return index, nth


def _lanes(row: Tensor, counts: Tensor, n_lanes: int, keep: float) -> Tensor:
    """The thread of each kept weight: neighbours go to neighbouring threads, as far as 8 bits reach."""
    n_neighbours = n_lanes
    while n_neighbours > 1 and n_neighbours > LIKELY * keep:
        n_neighbours //= 2
    number = torch.arange(len(row), dtype=torch.int64, device=row.device) - (counts.cumsum(0) - counts)[row]
    part = (-(-counts // n_lanes) * n_neighbours)[row]  # weights of a row shared by these threads
    return number // part * n_neighbours + number % part % n_neighbours


def int8_scales(weight: Tensor) -> Tensor | None:
    """A scale for each row such that its weights are int8 times the scale, up to rounding; None if not all rows fit.

    Also None for bfloat16, whose 8 bits cannot tell such weights from others.
    """
    if weight.dtype == torch.bfloat16:
        return None
    scales = weight.abs().amax(-1).double() / MOST_INT8
    scales = torch.where(scales > 0, scales, 1.0)
    back = (weight.double() / scales[:, None]).round() * scales[:, None]
    rounding = torch.finfo(weight.dtype).eps
    is_exact = ((back - weight.double()).abs() <= rounding * weight.double().abs()).all()
    return scales.float() if bool(is_exact) else None
