"""Packs a weight without its zeros, in the layout that the threads of `kernels.py` read.

Each thread walks along a row from kept weight to kept weight: 16 bits give the column of its first one, 8 bits the
distance to each next one. Distances beyond 255 columns are bridged by zeros. Neighbouring threads hold neighbouring
weights of the row as far as 8 bits reach, so they read nearby inputs.

Rows are sorted by length and grouped into slices of a few rows. A slice consists of blocks, in which each thread has
four weights (eight for int8), whose values and distances it loads at once. Each slice has room for the blocks of the
longest one: a thread knows where it begins, and starts to load before it knows where it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_COLUMNS = 1 << 16  # addressable with 16 bits
FURTHEST = 255  # largest distance in 8 bits
LIKELY = 170  # average distance at which few are beyond 255
MOST_INT8 = 127
WARP = 32  # threads that run together


@dataclass(frozen=True)
class Walks:
    """A packed weight: values and distances. Walks shorter than their slice end in zero weights at distance 0."""

    shape: tuple[int, int]
    n_lanes: int  # threads per row
    n_rows: int  # per slice
    most_blocks: int  # of the longest slice: what every slice has room for
    n_blocks: Tensor  # int32: the blocks of each slice
    order: Tensor  # int32: the row of the weight for each row of the slices; -1 for padding
    starts: Tensor  # uint16: the first column of each thread of each slice
    values: Tensor
    distances: Tensor  # uint8: columns from the previous weight
    scales: Tensor  # float32: factor for the values of each row of the slices; empty: 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.n_blocks, self.order, self.starts, self.values, self.distances, self.scales

    @property
    def n_bytes(self) -> int:
        """Bytes that a kernel reads: without the room behind shorter slices."""
        room = len(self.n_blocks) * self.most_blocks
        n_behind = (self.values.nbytes + self.distances.nbytes) * (room - int(self.n_blocks.sum())) // max(1, room)
        return sum(tensor.nbytes for tensor in self.tensors) - n_behind

    def on(self, tensors: tuple[Tensor, ...]) -> Walks:
        """The same weight in other tensors."""
        n_blocks, order, starts, values, distances, scales = tensors
        return replace(
            self, n_blocks=n_blocks, order=order, starts=starts, values=values, distances=distances, scales=scales
        )


def depth_of(dtype: torch.dtype) -> int:
    """Weights per thread and block."""
    return 8 if dtype == torch.int8 else 4


def as_walks(weight: Tensor, *, n_lanes: int, n_rows: int, scales: Tensor | None = None) -> Walks:
    """Packs a weight (rows x columns, at most 65,536 columns); as int8 if each row has a scale."""
    n_all, device, is_kept = len(weight), weight.device, weight != 0
    row, column = is_kept.nonzero(as_tuple=True)
    lane = _lanes(row, is_kept.sum(-1), n_lanes, float(is_kept.double().mean()))
    order = (row * n_lanes + lane).argsort(stable=True)  # thread by thread, from left to right
    row, column, lane = row[order], column[order], lane[order]
    values = weight[row, column]
    if scales is not None:
        values = (values / scales[row]).round().to(torch.int8)
    depth = depth_of(values.dtype)
    is_first, distance, n_bridges, number = _along_walks(row * n_lanes + lane, column)

    # rows by their longest walk; the longest row of a slice comes first
    lengths = torch.zeros(n_all, dtype=torch.int64, device=device).scatter_reduce_(0, row, number + 1, "amax")
    sorted_rows = lengths.argsort(descending=True, stable=True)
    n_blocks = -(-lengths[sorted_rows][::n_rows] // depth)  # of each slice
    most_blocks = int(n_blocks[0])
    place = sorted_rows.argsort()[row]  # the row among all slices of each kept weight

    def position(number: Tensor, of: Tensor | slice) -> Tensor:
        """The index of weight `number` of a walk in an array of blocks x threads x weights."""
        block = place[of] // n_rows * most_blocks + number // depth
        thread = place[of] % n_rows * n_lanes + lane[of]
        return (block * n_rows * n_lanes + thread) * depth + number % depth

    n_positions = len(n_blocks) * most_blocks * n_rows * n_lanes * depth
    laid_values = torch.zeros(n_positions, dtype=values.dtype, device=device)
    laid_distances = torch.zeros(n_positions, dtype=torch.uint8, device=device)
    at = position(number, slice(None))
    laid_values[at] = values
    laid_distances[at] = (distance - FURTHEST * n_bridges).to(torch.uint8)
    bridged, nth = _repeats(n_bridges)
    laid_distances[position(number[bridged] - 1 - nth, bridged)] = FURTHEST
    n_slices = len(n_blocks)
    starts = torch.zeros(n_slices * n_rows * n_lanes, dtype=torch.int16, device=device)
    starts[(place * n_lanes + lane)[is_first]] = column[is_first].to(torch.int16)
    rows = F.pad(sorted_rows.to(torch.int32), (0, n_slices * n_rows - n_all), value=-1)
    own_scales = torch.ones(0 if scales is None else len(rows), dtype=torch.float32, device=device)
    if scales is not None:
        own_scales[:n_all] = scales[sorted_rows].float()
    return Walks(
        (n_all, weight.shape[1]), n_lanes, n_rows, most_blocks, n_blocks.to(torch.int32), rows,
        starts.view(torch.uint16), laid_values, laid_distances, own_scales,
    )  # fmt: skip


def _along_walks(walk: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each kept weight, given its walk: whether it is the first, how many columns it is from the previous one, how
    many zeros bridge them where 8 bits do not reach, and its place in the walk, these zeros counted."""
    is_first = torch.ones_like(walk, dtype=torch.bool)
    is_first[1:] = walk[1:] != walk[:-1]
    distance = torch.zeros_like(column)
    distance[1:] = column.diff()
    distance[is_first] = 0
    n_bridges = (distance - 1).clamp(min=0) // FURTHEST
    number = (1 + n_bridges).cumsum(0) - 1
    return is_first, distance, n_bridges, number - number[is_first][is_first.cumsum(0) - 1]


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
