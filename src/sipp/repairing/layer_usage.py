"""Looks at the dense network once: which weights are used, in which order, how often, and with how many patches."""

from __future__ import annotations

import glob
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sipp.inputs.data import first_and_last, form_of, points_at
from sipp.inputs.layers import PrunableLayer, find_prunable_layers
from sipp.inputs.patches import n_patches_of, n_rows_of
from sipp.inputs.trace import Maps, ModelMap, map_for, read_uses
from sipp.results.batches import Batch, WeightUse
from sipp.results.numerics import SCORE_DTYPE, for_device, same_tensor
from sipp.results.ranking import Weight

TARGET_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}  # of dense outputs that are kept: one pass serves many layers
PATCHES_PER_FEATURE = 256  # neighbouring windows of an image are similar: beyond this number they are subsampled
FEWEST_POSITIONS = 4  # left along an axis that is subsampled

Groups = tuple[tuple[str, ...], ...]  # names of weights; those with the same input (query, key, value) form a group
Targets = dict[str, list[Tensor]]  # by weight: the dense outputs of its chunks of patches, G x R x P


def masked_layers(model: nn.Module, masks: Mapping[str, Tensor]) -> tuple[PrunableLayer, ...]:
    """The modules that hold masked weights, with only those weights."""
    return layers_with(find_prunable_layers(model, include=[glob.escape(name) for name in masks]), masks)


def layers_with(layers: Iterable[PrunableLayer], names: Collection[str]) -> tuple[PrunableLayer, ...]:
    """The layers that hold these weights, with only those weights."""
    chosen = (replace(layer, weights={l: w for l, w in layer.weights.items() if w.name in names}) for layer in layers)
    return tuple(layer for layer in chosen if layer.weights)


@dataclass(frozen=True)
class LayerUsage:
    """Which weights are used, in the order of execution, and how often in each batch."""

    groups: Groups  # in the order of execution
    n_uses: list[Counter[str]]  # by batch
    maps: list[ModelMap | None]  # by batch: says whose patches they are; None: as the layers report them
    target_bytes: dict[str, int]
    strides: dict[str, tuple[int, ...]]  # of the positions of convolutions, if they are subsampled
    is_static: list[bool]  # by batch: no control flow depends on values
    is_far: dict[str, bool | None] = field(default_factory=dict)  # whether inputs lie far from 0; None: not known yet


@dataclass
class DenseOutputs:
    """What the dense network gives on some points, the same for every fit to them; kept as far as memory allows."""

    usages: dict[tuple[str, ...], LayerUsage] = field(default_factory=dict)  # by weights
    targets: dict[tuple[tuple[str, ...], ...], list[Targets]] = field(default_factory=dict)  # by weights, corrected
    n_bytes: int = 0  # of the targets


def layer_usage(
    model: nn.Module,
    layers: Sequence[PrunableLayer],
    batches: Sequence[Batch],
    forms: Maps,
) -> LayerUsage:
    """Runs the dense network on all batches, and checks each batch of a new form (see `runner`).

    Unless control flow depends on values, a few points stand for all batches of their form.
    """
    first_uses, by_form = _FirstUses(), dict[tuple[Any, ...], _Counts]()
    n_uses, maps, is_static = list[Counter[str]](), list[ModelMap | None](), list[bool]()
    n_bytes: Counter[str] = Counter()
    n_patches: Counter[str] = Counter()
    for batch in batches:
        is_padded = batch.real_BT is not None  # only padding makes it necessary to assign patches to points
        known = map_for(model, layers, batch, forms)
        maps.append(known if is_padded else None)
        is_static.append(not known.depends_on_values)
        counts = by_form.get(form_of(batch))
        if counts is None:
            stands_for_all = not is_padded and is_static[-1]
            few = points_at(batch, first_and_last(batch.n_points)) if stands_for_all else batch
            counts = _count_uses(model, layers, few, maps[-1], first_uses)
            if stands_for_all and counts.n_uses:
                by_form[form_of(batch)] = counts
        n_uses.append(counts.n_uses)
        n_bytes.update({name: n * batch.n_points // counts.n_points for name, n in counts.n_bytes.items()})
        n_patches.update({name: n * batch.n_points // counts.n_points for name, n in counts.n_patches.items()})
    fan_in = {weight.name: weight.fan_in for layer in layers for weight in layer.weights.values()}
    strides = {
        name: _strides(sizes, n_patches[name] // (PATCHES_PER_FEATURE * fan_in[name]))
        for name, sizes in first_uses.positions.items()
    }
    target_bytes = {name: n_bytes[name] // math.prod(strides[name]) for name in strides}
    return LayerUsage(tuple(map(tuple, first_uses.groups)), n_uses, maps, target_bytes, strides, is_static)


@dataclass
class _Counts:
    """What a pass over some points shows of each weight: its uses, its patches, and the bytes of its outputs."""

    n_points: int
    n_uses: Counter[str] = field(default_factory=Counter)
    n_patches: Counter[str] = field(default_factory=Counter)
    n_bytes: Counter[str] = field(default_factory=Counter)


@dataclass
class _FirstUses:
    """The weights in the order in which they are first used, grouped by their input, and the sizes of that input."""

    groups: list[list[str]] = field(default_factory=list)
    positions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    windows: dict[str, list[Tensor]] = field(default_factory=dict)  # in this pass, of the current group

    def note(self, name: str, use: WeightUse) -> None:
        """Notes a use of this weight in the current pass."""
        if name in self.windows:
            self.windows[name].append(use.windows)
        elif name not in self.positions:
            if not any(len(met) == 1 and same_tensor(met[0], use.windows) for met in self.windows.values()):
                self.groups.append([])
                self.windows.clear()
            self.groups[-1].append(name)
            self.windows[name] = [use.windows]
            self.positions[name] = tuple(use.windows.shape[2 : 2 + use.n_position_dims])


def _count_uses(
    model: nn.Module, layers: Sequence[PrunableLayer], batch: Batch, found: ModelMap | None, first_uses: _FirstUses
) -> _Counts:
    """Counts the uses of all weights in one pass, and notes the first ones."""
    counts = _Counts(batch.n_points)

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        name, n_patches = weight.name, n_patches_of(use)
        counts.n_uses[name] += 1
        counts.n_patches[name] += n_patches
        n_bytes_each = max(SCORE_DTYPE.itemsize, use.windows.element_size())
        counts.n_bytes[name] += n_bytes_each * n_rows_of(use, weight) * n_patches
        first_uses.note(name, use)

    read_uses(model, layers, batch, on_use, found)
    first_uses.windows.clear()
    return counts


def _strides(sizes: tuple[int, ...], too_many: int) -> tuple[int, ...]:
    """Strides, powers of two, that subsample positions by a factor of at most `too_many`; 1 for sequences."""
    strides = [1] * len(sizes)
    while len(sizes) > 1 and 2 * math.prod(strides) <= too_many:
        axis = max(range(len(sizes)), key=lambda a: sizes[a] // strides[a])
        if sizes[axis] // strides[axis] < 2 * FEWEST_POSITIONS:
            break
        strides[axis] *= 2
    return tuple(strides)


def most_target_bytes(device: torch.device) -> int:
    """The number of bytes of dense outputs that may be kept."""
    return for_device(TARGET_BYTES, device)


def dense_passes(usage: LayerUsage, device: torch.device) -> Iterator[tuple[Groups, bool]]:
    """Groups of weights whose dense outputs are read in one pass, and whether those of all batches fit in memory.

    A group that is too large by itself has a pass of its own; its dense outputs are recomputed batch by batch.
    """
    most = most_target_bytes(device)
    waiting: list[tuple[str, ...]] = []
    n_bytes = 0
    for group in usage.groups:
        size = sum(usage.target_bytes[name] for name in group)
        if waiting and n_bytes + size > most:
            yield tuple(waiting), n_bytes <= most
            waiting, n_bytes = [], 0
        waiting.append(group)
        n_bytes += size
    if waiting:
        yield tuple(waiting), n_bytes <= most
