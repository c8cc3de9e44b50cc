"""Finds out which patches belong to which point, by an experiment on a few points.

A shape cannot tell: frames folded into the batch lie point by point or step by step, and a dimension of time may be as
long as the batch. So two points are run, one of them at two places: its patches are the same in both. A whole batch is
run twice, the second time at other places: the patches of a point move with it. What moves otherwise is no point's, and
then the patches stay together: a maximum needs no more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from sipp.inputs.output_check import KEPT_PLACES, tolerance_of
from sipp.inputs.patches import all_sums, steps, values_at
from sipp.records.batches import WeightUse
from sipp.records.numerics import integers
from sipp.records.ranking import Weight

# reported: as the adapter says, in dimension 0; interleaved: the patches of all points at step 0, then at step 1, ...;
# crossed: so too, of as many steps as points, each with several patches of a point; together: by none of these
Order = Literal["reported", "interleaved", "crossed", "together"]
FLOAT32_EPS = 2.0**-23
AS_WELL = 8  # times the distance of the best order, or its rounding: another one that is so near fits as well
UseKey = tuple[str, int]  # name of the weight, and which use of it in a pass, counted from 1


@dataclass(frozen=True)
class Found:
    """How the patches of one use are ordered where its adapter laid them out in a certain way."""

    order: Order
    steps_first: bool
    n_steps: int
    n_points: int
    is_tied: bool  # another order fits these points as well

    def for_use(self, use: WeightUse) -> Order:
        """The order of a use of another number of points, whose adapter may have read the same layout otherwise.

        A tensor of steps x points is told from its shape, unless there are as many points as steps.
        """
        if len(use.windows) == 1 and use.attributed:  # of one point all patches are its own
            return "reported"
        has_lengths = use.counts_B is not None or use.real_BP is not None
        if self.n_steps != _n_steps(use) and not has_lengths:
            return "together"
        if self.steps_first == use.steps_first:
            return self.order if self.order != "crossed" or len(use.windows) == self.n_points else "together"
        if self.steps_first and self.order == "reported":
            return "crossed"
        was_crossed = self.order == "crossed" or (self.order == "interleaved" and self.n_steps == self.n_points)
        return "reported" if was_crossed and not self.steps_first else "together"


Orders = dict[UseKey, Found]


@dataclass(frozen=True)
class _Sample:
    """Some patches of each point of one use, in each order that is worth a try. No view: inputs are not kept alive."""

    orders: tuple[Order, ...]
    patches_OBN: Tensor
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
            patches_OBN=_sampled(use, orders),
            steps_first=use.steps_first,
            n_steps=_n_steps(use),
            n_points=len(windows),
            tolerance=tolerance_of(windows),
            rounding=min(torch.finfo(windows.dtype).eps, FLOAT32_EPS),
        )
        return use

    @property
    def n_uses(self) -> dict[str, int]:
        """How often each weight was used in the pass."""
        return dict(self._seen)


class Grouper:
    """Gives each use of a pass with its patches grouped by point: call it with each use, in order.

    A use that the experiment did not meet, an expert without tokens until now, stays together.
    """

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self._seen: Counter[str] = Counter()

    def __call__(self, weight: Weight, use: WeightUse) -> WeightUse:
        found = self.orders.get(_next_key(self._seen, weight))
        return grouped(use, "together" if found is None else found.for_use(use))


@dataclass(frozen=True)
class Arranged:
    """Two points as they are run, one of them twice, and the places of the copies exchanged: the same batch again."""

    points: list[int]
    exchanged: list[int]


# The second keeps an order of lengths that a model may ask for.
ARRANGED = (Arranged([0, 1, 0], [2, 1, 0]), Arranged([0, 0, 1], [1, 0, 2]))


def placements(n_points: int) -> tuple[Tensor, ...]:
    """Which point stands where in the second run of a whole batch, the best first.

    Reversed, a batch keeps its statistics. Half of the points, each twice, keep an order of lengths that a model may
    ask for.
    """
    return integers(n_points - 1, -1, -1), integers(0, n_points) // 2


def orders_of(first: Recorder, moved: Recorder, placed_B: Tensor) -> Orders:
    """For each use the order in which the patches of every point moved with it, the best where several do."""
    both = {
        key: (sample.patches_OBN, moved.samples[key].patches_OBN)
        for key, sample in first.samples.items()
        if sample.orders and key in moved.samples and _are_of_one_form(sample, moved.samples[key])
    }
    distances = iter(_distances(list(both.values()), placed_B))
    orders = {}
    for key, sample in first.samples.items():
        found = [(next(distances), i) for i in range(len(sample.orders))] if key in both else []
        fits = sorted(one for one in found if one[0] <= sample.tolerance)  # no NaN; the adapter's own order first
        limit = AS_WELL * max(fits[0][0], sample.rounding) if fits else 0.0
        equal = [i for distance, i in fits if distance <= limit]
        is_told = bool(equal) and _are_alike([sample.patches_OBN[i] for i in equal])
        order: Order = sample.orders[equal[0]] if is_told else "together"
        orders[key] = Found(order, sample.steps_first, sample.n_steps, sample.n_points, len(equal) > 1)
    return orders


def _are_of_one_form(a: _Sample, b: _Sample) -> bool:
    return a.orders == b.orders and a.patches_OBN.shape == b.patches_OBN.shape


def _are_alike(readings: list[Tensor]) -> bool:
    """Whether all orders give each point the same patches, so that any of them will do."""
    return all(torch.equal(readings[0], other) for other in readings[1:])


def grouped(use: WeightUse, order: Order) -> WeightUse:
    """The use with its patches in this order, from the order in which its adapter reports it."""
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
    """The patches of a point that a turn of the order would move, as its adapter reports them."""
    return use.windows.shape[2] if use.n_position_dims else 1


def _candidates(use: WeightUse) -> tuple[Order, ...]:
    """The orders that are worth a try."""
    if not use.attributed:
        return ()
    n_steps, n_points = _n_steps(use), len(use.windows)
    if n_steps == 1 or use.counts_B is not None:
        return ("reported",)
    can_cross = n_steps % n_points == 0 and n_steps > n_points > 1
    return ("reported", "interleaved", "crossed") if can_cross else ("reported", "interleaved")


def _distances(pairs: list[tuple[Tensor, Tensor]], placed_B: Tensor) -> list[float]:
    """How far patches (O x B x N) lie from those of the points that moved, as a part of their size: of each order."""
    if not pairs:
        return []
    placed_B = placed_B.to(pairs[0][0].device)
    offs, sizes = [], []
    for first_OBN, moved_OBN in pairs:
        offs.append((first_OBN[:, placed_B] - moved_OBN).abs_().amax((1, 2)))
        size_O = first_OBN.abs().amax((1, 2))
        is_same = moved_OBN is first_OBN
        sizes.append(size_O if is_same else torch.maximum(size_O, moved_OBN.abs().amax((1, 2))))
    off, size = torch.cat(offs).double(), torch.cat(sizes).double()
    found: list[float] = torch.where(size > 0, off / size, off).tolist()  # a GPU is waited for only here, and once
    return found


def _sampled(use: WeightUse, orders: tuple[Order, ...]) -> Tensor:
    """Some patches of each point (O x B x N): of the first, the last and a middle position along every axis.

    Beside the first its neighbour: evenly spaced positions alone may all be the same point's in a wrong order.
    """
    windows = use.windows
    if not orders:
        return windows.new_empty(0)
    starts, of_each = _places(tuple(windows.shape), windows.stride(), use.n_position_dims, orders, windows.device)
    return values_at(windows, (starts[:, None] + of_each).view(-1)).view(len(orders), len(windows), -1)


@lru_cache(maxsize=KEPT_PLACES)
def _places(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    n_position_dims: int,
    orders: tuple[Order, ...],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Where sampled values lie in memory: where the steps of all orders and points begin, and each value from there.

    An order exchanges points and steps, which are the first axis of positions.
    """
    n_points, has_steps = shape[0], n_position_dims > 0
    n_steps, stride = (shape[2], strides[2]) if has_steps else (1, 0)
    found = [
        reported_at(order, b, i, n_points, n_steps) for order in orders for b in range(n_points) for i in _some(n_steps)
    ]
    starts = torch.tensor([b * strides[0] + i * stride for b, i in found], dtype=torch.int64, device=device)
    parts = []
    for axis in (1, *range(3 if has_steps else 2, len(shape))):
        if 2 <= axis < 2 + n_position_dims:
            parts.append(torch.tensor(_some(shape[axis]), dtype=torch.int64, device=device) * strides[axis])
        else:  # groups and fan-in: all of them
            parts.append(steps(shape[axis], strides[axis], device))
    return starts, all_sums(parts)


def reported_at(order: Order, point: int, step: int, n_points: int, n_steps: int) -> tuple[int, int]:
    """At which point and step its adapter reports what an order (see `grouped`) calls this step of this point."""
    if order == "reported":
        return point, step
    if order == "interleaved":
        return divmod(step * n_points + point, n_steps)
    n_each = n_steps // n_points
    return step // n_each, point * n_each + step % n_each


def _some(size: int) -> list[int]:
    """The first place, its neighbour, a middle one and the last."""
    return sorted({0, min(1, size - 1), (size - 1) // 2, size - 1})
