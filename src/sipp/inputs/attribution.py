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
    """Some patches of each point of one use (B x N), in each order that is worth a try."""

    patches: dict[Order, Tensor]
    use: WeightUse  # without its windows
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
        patches = {order: _sampled(use, order) for order in _candidates(use)}
        bare = replace(use, windows=use.windows[:0].clone())  # a view would keep the inputs of all layers alive
        sizes, dtype = (_n_steps(use), len(use.windows)), use.windows.dtype
        sample = _Sample(patches, bare, *sizes, tolerance_of(use.windows), min(torch.finfo(dtype).eps, FLOAT32_EPS))
        self.samples[_next_key(self._seen, weight)] = sample
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
    tried = [
        (key, order, _distance(sample.patches[order], moved.samples[key].patches[order], placed_B))
        for key, sample in first.samples.items()
        for order in sample.patches
        if key in moved.samples and order in moved.samples[key].patches
    ]
    # a GPU is waited for only here, and once
    found = [distance for *_, distance in tried]
    distances = torch.stack([distance.to(found[-1].device) for distance in found]).tolist() if found else []
    fitting: dict[UseKey, list[tuple[float, Order]]] = {key: [] for key in first.samples}
    for (key, order, _), distance in zip(tried, distances):
        if distance <= first.samples[key].tolerance:  # no NaN
            fitting[key].append((distance, order))
    orders = {}
    for key, sample in first.samples.items():
        fits = sorted(fitting[key], key=lambda one: one[0])  # the adapter's own order first where they are equal
        limit = AS_WELL * max(fits[0][0], sample.rounding) if fits else 0.0
        equal = [order for distance, order in fits if distance <= limit]
        order = equal[0] if equal and _are_alike([sample.patches[one] for one in equal]) else "together"
        orders[key] = Found(order, sample.use.steps_first, sample.n_steps, sample.n_points, len(equal) > 1)
    return orders


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


def _distance(first_BN: Tensor, moved_BN: Tensor, placed_B: Tensor) -> Tensor:
    """How far the patches lie from those of the points that moved, as a part of their size; infinite if unknown."""
    if first_BN.shape != moved_BN.shape:
        return torch.full((), torch.inf, dtype=torch.float64, device="cpu")
    off = (first_BN[placed_B.to(first_BN.device)] - moved_BN).abs().amax().double()
    size = torch.maximum(first_BN.abs().amax(), moved_BN.abs().amax())
    return torch.where(size > 0, off / size, off)


def _sampled(use: WeightUse, order: Order) -> Tensor:
    """Some patches of each point (B x N): of the first, the last and a middle position along every axis.

    Beside the first its neighbour: evenly spaced positions alone may all be the same point's in a wrong order.
    """
    turned = grouped(use, order)
    windows = turned.windows
    shape, strides, device = tuple(windows.shape), windows.stride(), windows.device
    of_each = _places_of_each(shape[1:], strides[1:], turned.n_position_dims, device)
    return values_at(windows, all_sums([steps(shape[0], strides[0], device), of_each])).view(shape[0], -1)


@lru_cache(maxsize=KEPT_PLACES)
def _places_of_each(
    shape: tuple[int, ...], strides: tuple[int, ...], n_position_dims: int, device: torch.device
) -> Tensor:
    """Where the sampled values of a point lie in memory, from its first on; its windows have this shape."""
    parts = []
    for axis, (size, stride) in enumerate(zip(shape, strides)):
        if 1 <= axis <= n_position_dims:
            chosen = sorted({0, min(1, size - 1), (size - 1) // 2, size - 1})
            parts.append(torch.tensor(chosen, dtype=torch.int64, device=device) * stride)
        else:  # groups and fan-in: all of them
            parts.append(steps(size, stride, device))
    return all_sums(parts)
