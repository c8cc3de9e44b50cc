"""Looks at the dense network once: which weights are used, in which order, how often, and with how many patches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sipp.inputs.data import points_at
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.patches import n_patches_of, n_rows_of
from sipp.inputs.probing import Orders, Probes, first_and_last, goes_by_form, is_new_form, probe, runner, signature_of
from sipp.records.batches import Batch, WeightUse
from sipp.records.numerics import SCORE_DTYPE, for_device, same_tensor
from sipp.records.ranking import Weight

TARGET_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}  # of dense outputs that are kept: one pass serves many layers
PATCHES_PER_FEATURE = 256  # neighbouring windows of an image are similar: beyond this number they are subsampled
FEWEST_POSITIONS = 4  # left along an axis that is subsampled

Targets = dict[str, list[Tensor]]  # by weight: the dense outputs of its chunks of patches, G x R x P


@dataclass(frozen=True)
class LayerUsage:
    """Which weights are used, in the order of execution, and how often in each batch."""

    order: tuple[tuple[str, ...], ...]  # weights with the same input (query, key, value) are grouped
    n_uses: list[Counter[str]]  # by batch
    orders: list[Orders | None]  # by batch: of the patches of each use; None: as the layers report them
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
    forms: Probes,
) -> LayerUsage:
    """Runs the dense network on all batches, and checks each batch of a new form (see `runner`).

    Unless control flow depends on values, a few points stand for all batches of their form.
    """
    order: list[list[str]] = []
    windows: dict[str, list[Tensor]] = {}  # of the current group of weights
    positions: dict[str, tuple[int, ...]] = {}
    n_uses: list[Counter[str]] = []
    orders: list[Orders | None] = []
    is_static: list[bool] = []
    n_bytes: Counter[str] = Counter()
    n_patches: Counter[str] = Counter()
    fan_in = {weight.name: weight.fan_in for layer in layers for weight in layer.weights.values()}
    alike: dict[tuple[Any, ...], tuple[int, Counter[str], Counter[str], Counter[str]]] = {}

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        name = weight.name
        uses[name] += 1
        n_here = n_patches_of(use)
        n_bytes_each = max(SCORE_DTYPE.itemsize, use.windows.element_size())
        bytes_here[name] += n_bytes_each * n_rows_of(use, weight) * n_here
        patches_here[name] += n_here
        if name in windows:
            windows[name].append(use.windows)
        elif name not in positions:
            if not any(len(shown) == 1 and same_tensor(shown[0], use.windows) for shown in windows.values()):
                order.append([])
                windows.clear()
            order[-1].append(name)
            windows[name] = [use.windows]
            positions[name] = tuple(use.windows.shape[2 : 2 + use.n_position_dims])

    for batch in batches:
        is_padded = batch.real_BT is not None  # only padding makes it necessary to assign patches to points
        known = None
        if is_padded or is_new_form(batch, forms):
            known = replace(probe(model, layers, batch, "running", forms), alone=None)  # logits may be larger than all
            forms[signature_of(batch)] = known
        orders.append(known.orders if known is not None and is_padded else None)
        is_static.append(goes_by_form(batch, forms))
        stands_for_all = not is_padded and is_static[-1]
        few = points_at(batch, first_and_last(batch.n_points)) if stands_for_all else batch
        form = signature_of(batch)
        n_run, uses, bytes_here, patches_here = alike.get(form, (few.n_points, Counter(), Counter(), Counter()))
        if not uses:
            runner(model, layers, orders=orders[-1])(few, on_use)
            windows.clear()
            if stands_for_all:
                alike[form] = n_run, uses, bytes_here, patches_here
        n_uses.append(uses)
        n_bytes.update({name: n * batch.n_points // n_run for name, n in bytes_here.items()})
        n_patches.update({name: n * batch.n_points // n_run for name, n in patches_here.items()})
    strides = {
        name: _strides(sizes, n_patches[name] // (PATCHES_PER_FEATURE * fan_in[name]))
        for name, sizes in positions.items()
    }
    target_bytes = {name: n_bytes[name] // math.prod(strides[name]) for name in positions}
    return LayerUsage(tuple(map(tuple, order)), n_uses, orders, target_bytes, strides, is_static)


def _strides(sizes: tuple[int, ...], too_many: int) -> tuple[int, ...]:
    """Strides, powers of two, that subsample positions by a factor of at most `too_many`; 1 for sequences."""
    strides = [1] * len(sizes)
    while len(sizes) > 1 and 2 * math.prod(strides) <= too_many:
        axis = max(range(len(sizes)), key=lambda a: sizes[a] // strides[a])
        if sizes[axis] // strides[axis] < 2 * FEWEST_POSITIONS:
            break
        strides[axis] *= 2
    return tuple(strides)


def target_bytes(device: torch.device) -> int:
    """The number of bytes of dense outputs that may be kept."""
    return for_device(TARGET_BYTES, device)


def stretches(usage: LayerUsage, device: torch.device) -> Iterator[tuple[tuple[tuple[str, ...], ...], bool]]:
    """Runs of groups whose dense outputs are gathered in one pass, and whether those of all batches fit in memory.

    A group that is too large by itself is a run of its own; its dense outputs are recomputed batch by batch.
    """
    most = target_bytes(device)
    waiting: list[tuple[str, ...]] = []
    n_bytes = 0
    for group in usage.order:
        size = sum(usage.target_bytes[name] for name in group)
        if waiting and n_bytes + size > most:
            yield tuple(waiting), n_bytes <= most
            waiting, n_bytes = [], 0
        waiting.append(group)
        n_bytes += size
    if waiting:
        yield tuple(waiting), n_bytes <= most
