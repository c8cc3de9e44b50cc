"""Finds out which patches belong to which point, by an experiment on a few points.

Shapes are ambiguous: frames folded into the batch may be ordered point by point or step by step, and a time dimension
may be as long as the batch. So two points are run, one of them at two places of the batch, where its patches must be
the same. Or a whole batch is run, and again permuted: the patches of a point must move with it. If no order fits, the
patches of the batch stay together, which is enough for a maximum.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sipp.inputs.output_check import KEPT_PLACES, tolerance_of
from sipp.inputs.patches import all_sums, steps, values_at
from sipp.records.batches import WeightUse
from sipp.records.numerics import integers
from sipp.records.ranking import Weight

# reported: as the adapter says, in dimension 0; interleaved: the patches of all points at step 0, then at step 1, ...;
# crossed: the same with as many steps as points, and several patches of a point in each; together: none of these fits
Order = Literal["reported", "interleaved", "crossed", "together"]
FLOAT32_EPS = 2.0**-23
AS_WELL = 8  # an order fits as well as the best if its distance is at most this many times the best, or the rounding
_PADDED = 64  # values of a sample that are reduced together, before samples of all lengths are
UseKey = tuple[str, int]  # name of the weight, and which use of it in a pass, counted from 1


@dataclass(frozen=True)
class PatchOrder:
    """The order of one use's patches, and the layout in which its adapter reported them."""

    order: Order
    steps_first: bool
    n_steps: int
    n_points: int
    is_tied: bool  # another order fits these points as well

    def for_use(self, use: WeightUse) -> Order:
        """The order for a use with another number of points, whose adapter may have read the same layout differently.

        Adapters recognise a tensor of steps x points by its shape, unless there are as many points as steps.
        """
        if use.windows.shape[0] == 1 and use.attributed:  # a single point owns all patches
            return "reported"
        has_lengths = use.counts_B is not None or use.real_BP is not None
        if self.n_steps != _n_steps(use) and not has_lengths:
            return "together"
        if self.steps_first == use.steps_first:
            return self.order if self.order != "crossed" or use.windows.shape[0] == self.n_points else "together"
        if self.steps_first and self.order == "reported":
            return "crossed"
        was_crossed = self.order == "crossed" or (self.order == "interleaved" and self.n_steps == self.n_points)
        return "reported" if was_crossed and not self.steps_first else "together"


Orders = dict[UseKey, PatchOrder]


@dataclass(frozen=True)
class _Sample:
    """Some patches of each point of one use, in each candidate order. A copy, so that inputs are not kept alive."""

    orders: tuple[Order, ...]
    values_BN: Tensor  # of the first order, then of the second, ..., each padded to whole blocks (`_PADDED`)
    steps_first: bool
    n_steps: int
    n_points: int
    tolerance: float
    rounding: float


class Recorder:
    """Keeps samples of all uses of a pass: call it with each use, in order."""

    def __init__(self) -> None:
        self.samples: dict[UseKey, _Sample] = {}
        self._seen: Counter[str] = Counter()

    def __call__(self, weight: Weight, use: WeightUse) -> WeightUse:
        orders, windows = _candidates(use), use.windows
        self.samples[_next_key(self._seen, weight)] = _Sample(
            orders=orders,
            values_BN=_sampled(use, orders),
            steps_first=use.steps_first,
            n_steps=_n_steps(use),
            n_points=windows.shape[0],
            tolerance=tolerance_of(windows),
            rounding=min(torch.finfo(windows.dtype).eps, FLOAT32_EPS),
        )
        return use

    @property
    def n_uses(self) -> dict[str, int]:
        """How often each weight was used in the pass."""
        return dict(self._seen)


class Grouper:
    """Groups the patches of each use of a pass by point: call it with each use, in order.

    The patches of a use that the experiment did not meet (an expert that had no tokens) stay together.
    """

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self._seen: Counter[str] = Counter()

    def __call__(self, weight: Weight, use: WeightUse) -> WeightUse:
        known = self.orders.get(_next_key(self._seen, weight))
        return grouped(use, "together" if known is None else known.for_use(use))


@dataclass(frozen=True)
class Arrangement:
    """A batch of two points, one of them twice; with its copies exchanged it is the same batch again."""

    points: list[int]
    exchanged: list[int]


# The second one keeps points sorted, for models that want sequences sorted by length.
ARRANGEMENTS = (Arrangement([0, 1, 0], [2, 1, 0]), Arrangement([0, 0, 1], [1, 0, 2]))


def placements(n_points: int) -> tuple[Tensor, ...]:
    """The permutations for the second run of a whole batch, the best first.

    The reversed batch keeps its statistics. Half of the points, each twice, keep points sorted, for models that want
    sequences sorted by length.
    """
    return integers(n_points - 1, -1, -1), integers(0, n_points) // 2


def orders_of(first: Recorder, moved: Recorder, placed_B: Tensor) -> Orders:
    """For each use, the order in which the patches of every point moved with the point; the best if several fit."""
    known = {key: sample for key, sample in first.samples.items() if sample.orders and key in moved.samples}
    both = {key: (one, moved.samples[key]) for key, one in known.items() if _are_of_one_form(one, moved.samples[key])}
    distances = iter(_distances(list(both.values()), placed_B))
    orders = {}
    for key, sample in first.samples.items():
        measured = [(next(distances), i) for i in range(len(sample.orders))] if key in both else []
        fits = sorted(one for one in measured if one[0] <= sample.tolerance)  # no NaN; the adapter's own order first
        limit = AS_WELL * max(fits[0][0], sample.rounding) if fits else 0.0
        equal = [i for distance, i in fits if distance <= limit]
        is_clear = bool(equal) and (len(equal) == 1 or _are_alike(sample, equal))
        order: Order = sample.orders[equal[0]] if is_clear else "together"
        orders[key] = PatchOrder(order, sample.steps_first, sample.n_steps, sample.n_points, len(equal) > 1)
    return orders


def _are_of_one_form(a: _Sample, b: _Sample) -> bool:
    return a.orders == b.orders and a.values_BN.shape == b.values_BN.shape


def _are_alike(sample: _Sample, which: list[int]) -> bool:
    """Whether these orders give each point the same patches, so that any of them is right."""
    readings = sample.values_BN.unflatten(1, (len(sample.orders), -1)).unbind(1)
    return all(torch.equal(readings[which[0]], readings[i]) for i in which[1:])


def grouped(use: WeightUse, order: Order) -> WeightUse:
    """The use as its adapter reports it, with its patches brought into this order."""
    if order == "reported" or not use.attributed:
        return use
    windows = use.windows if use.n_position_dims else use.windows.unsqueeze(2)
    n_points, n_steps = len(windows), windows.shape[2]
    blocks = {
        "interleaved": (n_steps, n_points, 1),
        "crossed": (n_points, n_points, n_steps // n_points),
        "together": (n_points * n_steps, 1, 1),
    }[order]

    def turned(tensor: Tensor) -> Tensor:  # points x steps x ... -> points x steps x ... in the other order
        return tensor.flatten(0, 1).unflatten(0, blocks).transpose(0, 1).flatten(1, 2)

    return replace(
        use,
        windows=turned(windows.movedim(2, 1)).movedim(1, 2),
        n_position_dims=max(1, use.n_position_dims),
        counts_B=None if use.counts_B is None else use.counts_B.sum()[None],
        attributed=order != "together",
        real_BP=None if use.real_BP is None else turned(use.real_BP),
    )


def _next_key(seen: Counter[str], weight: Weight) -> UseKey:
    seen[weight.name] += 1
    return weight.name, seen[weight.name]


def _n_steps(use: WeightUse) -> int:
    """The size of the first position axis, which is the one that another order would exchange with the points."""
    return use.windows.shape[2] if use.n_position_dims else 1


def _candidates(use: WeightUse) -> tuple[Order, ...]:
    """The orders that are possible for a use of this shape."""
    if not use.attributed:
        return ()
    n_steps, n_points = _n_steps(use), use.windows.shape[0]
    if n_steps == 1 or use.counts_B is not None:
        return ("reported",)
    can_cross = n_steps % n_points == 0 and n_steps > n_points > 1
    return ("reported", "interleaved", "crossed") if can_cross else ("reported", "interleaved")


def _distances(pairs: list[tuple[_Sample, _Sample]], placed_B: Tensor) -> list[float]:
    """For each order of each use, the largest change of a patch that moved with its point, relative to its size.

    All uses are compared at once in a few operations: a network has many, and each is small.
    """
    if not pairs:
        return []
    first_BN = torch.cat([first.values_BN for first, _ in pairs], 1)
    is_same = all(first is moved for first, moved in pairs)
    moved_BN = first_BN if is_same else torch.cat([moved.values_BN for _, moved in pairs], 1)
    off_BN = (first_BN[placed_B.to(first_BN.device)] - moved_BN).abs_()
    size_N = first_BN.abs().amax(0)
    size_N = size_N if is_same else torch.maximum(size_N, moved_BN.abs().amax(0))
    blocks_2X = torch.stack((off_BN.amax(0), size_N)).unflatten(1, (-1, _PADDED)).amax(2)
    found_2X = blocks_2X.double().cpu().numpy()  # the only GPU sync
    lengths = [first.values_BN.shape[1] // _PADDED // len(first.orders) for first, _ in pairs for _ in first.orders]
    off, size = np.maximum.reduceat(found_2X, np.cumsum([0, *lengths[:-1]]), axis=1)  # NaN, where there is one
    with np.errstate(invalid="ignore"):
        found: list[float] = np.divide(off, size, out=off, where=size > 0).tolist()
    return found


def _sampled(use: WeightUse, orders: tuple[Order, ...]) -> Tensor:
    """Some patches of each point in each order (B x N): at the first, second, middle and last place of every axis.

    The second is there because in a wrong order evenly spaced positions may all belong to the same point.
    """
    windows = use.windows
    if not orders:
        return windows.new_empty(0)
    starts, of_each = _places(tuple(windows.shape), windows.stride(), use.n_position_dims, orders, windows.device)
    return values_at(windows, (starts + of_each).view(-1)).view(windows.shape[0], -1)


@lru_cache(maxsize=KEPT_PLACES)
def _places(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    n_position_dims: int,
    orders: tuple[Order, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Memory offsets of the sampled values: of the steps of all points and orders, and of each value from there.

    An order exchanges points and steps, which are the first axis of positions. The last value is repeated to fill a
    whole block, which changes no maximum.
    """
    n_points, has_steps = shape[0], n_position_dims > 0
    n_steps, stride = (shape[2], strides[2]) if has_steps else (1, 0)
    found = [
        reported_at(order, b, i, n_points, n_steps) for b in range(n_points) for order in orders for i in _some(n_steps)
    ]
    starts = torch.tensor([[b * strides[0] + i * stride] for b, i in found], dtype=torch.int64, device=device)
    parts = []
    for axis in (1, *range(3 if has_steps else 2, len(shape))):
        if 2 <= axis < 2 + n_position_dims:
            parts.append(torch.tensor(_some(shape[axis]), dtype=torch.int64, device=device) * strides[axis])
        else:  # groups and fan-in: all of them
            parts.append(steps(shape[axis], strides[axis], device))
    of_each = all_sums(parts)
    return starts, torch.cat((of_each, of_each[-1:].expand(-len(of_each) % _PADDED)))


def reported_at(order: Order, point: int, step: int, n_points: int, n_steps: int) -> tuple[int, int]:
    """The (point, step) at which the adapter reports what is this step of this point in an order (see `grouped`)."""
    if order == "reported":
        return point, step
    if order == "interleaved":
        return divmod(step * n_points + point, n_steps)
    n_each = n_steps // n_points
    return step // n_each, point * n_each + step % n_each


def _some(size: int) -> list[int]:
    """The first, second, middle and last index."""
    return sorted({0, min(1, size - 1), (size - 1) // 2, size - 1})
