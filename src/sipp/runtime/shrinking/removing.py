"""Decides which channels stay, and how constant channels that other layers read are replaced.

A channel is needed if a needed row reads it through a nonzero weight. Constant channels can be replaced: their
contribution to a row, weight times constant, is added to the row's bias; or, with zero padding or without a bias, to
the weight of one other constant channel of the same layer, the `stand_in`. Everything else is removed, except channels
that keep a layer from being empty, or groups from having different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from sipp.runtime.shrinking.channels import ALWAYS, Channels, Product
from sipp.runtime.shrinking.rules import reads_of


@dataclass(frozen=True)
class ReadingLayer:
    """A weight with all its uses, and which of its input channels can be replaced."""

    product: Product  # the first use
    reads: Tensor  # O x I
    constant: Tensor  # I, if the same in all uses; NaN: not constant
    stand_in: int | None  # the channel that replaces other constants; None: they go into the bias
    gives_way: Tensor  # I, channels that can be replaced even if they are read


@dataclass(frozen=True)
class ShrinkPlan:
    """Which indices of every parameter and buffer stay, by name and dimension, and how constants are replaced."""

    stays: dict[tuple[str, int], Tensor]  # indices
    layers: tuple[ReadingLayer, ...]
    is_needed: tuple[Tensor, ...]  # for each layer, whether each input channel is needed
    read: tuple[Tensor, ...]  # for each layer, the indices of input channels that stay


def plan_shrinking(channels: Channels, *, only_constant: bool = False) -> ShrinkPlan:
    """Decides which channels stay; with `only_constant`, also those that nothing reads, unless they are constant."""
    class_of = classes_of(channels)
    layers = _layers(channels)
    inside = [class_of[layer.product.ids] for layer in layers]
    outside = [class_of[layer.product.out_ids] for layer in layers]
    needed = torch.zeros(int(class_of.max()) + 1, dtype=torch.bool, device="cpu")
    needed[class_of[ALWAYS]] = True
    if only_constant:
        for axis in channels.values.values():
            if axis is not None:
                needed[class_of[axis.ids[axis.constant.isnan()]]] = True
    _mark_needed(needed, layers, inside, outside)
    kept = needed.clone()
    sides = {key: class_of[ids] for key, ids in channels.sides.items()}
    while _add_fillers(kept, layers, inside, outside, sides):
        pass
    return ShrinkPlan(
        {key: kept[side].nonzero().flatten() for key, side in sides.items()},
        tuple(layers),
        tuple(needed[side] for side in inside),
        tuple(kept[side].nonzero().flatten() for side in inside),
    )


def classes_of(channels: Channels, more: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """The class of each id: the connected components of tied channels; `more` are further ties."""
    pairs = [torch.stack((ids, others)) for ids, others in (*channels.ties, *more)]
    tied = (torch.cat(pairs, 1) if pairs else torch.zeros((2, 0), dtype=torch.int64, device="cpu")).numpy()
    graph = coo_matrix((np.ones(tied.shape[1], dtype=np.int8), (tied[0], tied[1])), (channels.n_ids, channels.n_ids))
    return torch.from_numpy(connected_components(graph, directed=False)[1].astype(np.int64))


def _layers(channels: Channels) -> list[ReadingLayer]:
    """All weights, in order of first use."""
    uses: dict[str, list[Product]] = {}
    for product in channels.products:
        uses.setdefault(product.weight, []).append(product)
    return [_layer(channels, calls) for calls in uses.values()]


def _layer(channels: Channels, calls: list[Product]) -> ReadingLayer:
    first, n_reads = calls[0], channels.n_reads
    constant = first.constant.clone()
    for other in calls[1:]:
        constant[constant != other.constant] = torch.nan
    is_constant = ~constant.isnan()
    biases = {call.bias for call in calls}
    has_bias = len(biases) == 1 and first.bias is not None and n_reads[first.bias] == len(calls)
    stand_in = None
    if any(call.pads for call in calls) or not has_bias:
        others = is_constant & (constant != 0)
        # each group would need a stand-in; or something else reads the weight
        if first.groups > 1 or n_reads[first.weight] > len(calls):
            is_constant &= constant == 0
        elif bool(others.any()):
            stand_in = int(torch.where(others, constant.abs(), 0.0).argmax())
    reads = reads_of(channels.tensors[first.weight], first.groups, first.is_transposed)
    return ReadingLayer(first, reads, constant, stand_in, is_constant)


def _mark_needed(needed: Tensor, layers: list[ReadingLayer], inside: list[Tensor], outside: list[Tensor]) -> None:
    """Marks channels needed by those already marked, until nothing changes."""
    before = -1
    while before < (before := int(needed.sum())):
        for layer, reads, gives in zip(reversed(layers), reversed(inside), reversed(outside)):
            is_read = layer.reads[needed[gives]].any(0)
            wanted = is_read & ~layer.gives_way
            if layer.stand_in is not None:
                wanted[layer.stand_in] |= bool((is_read & layer.gives_way & (layer.constant != 0)).any())
            needed[reads[wanted]] = True


def _add_fillers(
    kept: Tensor,
    layers: list[ReadingLayer],
    inside: list[Tensor],
    outside: list[Tensor],
    sides: dict[tuple[str, int], Tensor],
) -> bool:
    """Keeps extra channels where a layer would be empty or groups unequal; returns whether it added any."""
    before = int(kept.sum())
    for side in sides.values():
        if len(side) and not bool(kept[side].any()):
            kept[side[0]] = True
    for layer, reads, gives in zip(layers, inside, outside):
        if layer.product.groups > 1:
            parts = [side.view(layer.product.groups, -1) for side in (reads, gives)]
            stays = (kept[parts[0]].any(1) | kept[parts[1]].any(1)).nonzero().flatten()
            for part in parts:
                width = max(1, int(kept[part].sum(1).max()))
                for group in stays.tolist() or [0]:
                    more = width - int(kept[part[group]].sum())
                    kept[part[group][~kept[part[group]]][: max(0, more)]] = True
    return int(kept.sum()) > before


def sorted_groups(layer: ReadingLayer, stays: Tensor, out_stays: Tensor) -> tuple[int, Tensor]:
    """For a grouped layer: the number of groups left, and the columns kept by each remaining row (R x C)."""
    groups, n_in, n_out = layer.product.groups, len(layer.product.ids), len(layer.product.out_ids)
    wide, tall = n_in // groups, n_out // groups
    left = (stays // wide).unique()
    columns = torch.stack([stays[stays // wide == group] % wide for group in left])
    place = {int(group): i for i, group in enumerate(left)}
    rows = torch.tensor([place[int(row) // tall] for row in out_stays], dtype=torch.int64, device="cpu")
    return len(left), columns[rows]
