"""Whether the patches of a use are grouped by the points they come from, found by an experiment and not from shapes.

A shape cannot tell: frames folded into the batch lie point by point or step by step, and a dimension of time may be as
long as the batch. So a batch is run once more with its points at other places: the patches of a point move with it.
What moves otherwise is no point's, and then the patches stay together: a maximum needs no more.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sipp.inputs.output_check import tolerance_of
from sipp.numerics import integers, places_of
from sipp.records import Batch, Use, Weight

MOST_VALUES = 1 << 16  # of the windows of one use that a comparison looks at, of all points alike
N_PROJECTIONS = 3  # numbers that stand for the patches of a point

# reported: as the adapter says, in dimension 0; interleaved: the patches of all points at step 0, then at step 1, ...;
# together: by none of these
Order = Literal["reported", "interleaved", "together"]
UseKey = tuple[str, int]  # name of the weight, and the how manieth use of it in a pass
Orders = dict[UseKey, Order]

_log = logging.getLogger("sipp")


def placements(n_points: int) -> tuple[Tensor, ...]:
    """Which point stands where in a second run, the best first.

    Reversed, a batch keeps its statistics. Half of the points, each twice, keep an order of lengths that a model may
    ask for.
    """
    return integers(n_points - 1, -1, -1), integers(0, n_points) // 2


@dataclass(frozen=True)
class Print:
    """What stands for the patches of each point in one order, and how large they are."""

    projected_BJ: Tensor
    size: float  # the largest Euclidean norm of a point's patches


class Recorder:
    """Takes the prints of all uses of a pass over points placed otherwise: call it with each use, in order."""

    def __init__(self, placed_B: Tensor) -> None:
        self.placed_B = placed_B  # which point stands where
        self.prints: dict[UseKey, dict[Order, Print]] = {}
        self._seen: Counter[str] = Counter()

    def __call__(self, weight: Weight, use: Use) -> Use:
        self.prints[_next_key(self._seen, weight)] = {order: _print(use, order) for order in _candidates(use)}
        return use


class Grouper:
    """Gives each use of a pass with its patches grouped by point: call it with each use, in order.

    With `moved`, a pass over the same points at other places, the orders are found and noted in `orders`; without, they
    are taken from there. A use that is not there, an expert without tokens until now, stays together.
    """

    def __init__(self, orders: Orders, moved: Recorder | None, batch: Batch) -> None:
        self.orders, self.moved, self.batch = orders, moved, batch
        self._seen: Counter[str] = Counter()

    def __call__(self, weight: Weight, use: Use) -> Use:
        key = _next_key(self._seen, weight)
        if self.moved is not None:
            self.orders[key] = _order_of(use, self.moved.prints.get(key, {}), self.moved.placed_B)
            if self.orders[key] == "together":
                self._tell(weight)
        return grouped(use, self.orders.get(key, "together"))

    def _tell(self, weight: Weight) -> None:
        padding = "" if self.batch.real_BT is None else ", and padding is not taken out of them"
        _log.warning(
            "%s: the inputs of %s do not show which of them belong to which point; what is said of single points is "
            "unknown for it%s",
            self.batch.where,
            weight.name,
            padding,
        )


def grouped(use: Use, order: Order) -> Use:
    """The use with its patches in this order, from the order in which its adapter reports it."""
    if order == "reported" or not use.attributed:
        return use
    windows = use.windows if use.n_position_dims else use.windows.unsqueeze(2)
    n_points, n_steps = len(windows), windows.shape[2]
    blocks = (n_steps, n_points) if order == "interleaved" else (1, n_points * n_steps)

    def turned(tensor: Tensor) -> Tensor:  # points x steps x ... -> points x steps x ... in the other order
        turned = tensor.flatten(0, 1).unflatten(0, blocks)
        return turned.transpose(0, 1) if order == "interleaved" else turned

    return replace(
        use,
        windows=turned(windows.movedim(2, 1)).movedim(1, 2),
        n_position_dims=max(1, use.n_position_dims),
        counts_B=None if use.counts_B is None else use.counts_B.sum()[None],
        attributed=order == "interleaved",
        real_BP=None if use.real_BP is None else turned(use.real_BP),
    )


def _next_key(seen: Counter[str], weight: Weight) -> UseKey:
    seen[weight.name] += 1
    return weight.name, seen[weight.name]


def _candidates(use: Use) -> tuple[Order, ...]:
    """The orders that are worth a try."""
    if not use.attributed:
        return ()
    can_turn = use.n_position_dims > 0 and use.windows.shape[2] > 1 and use.counts_B is None
    return ("reported", "interleaved") if can_turn else ("reported",)


def _order_of(use: Use, moved: dict[Order, Print], placed_B: Tensor) -> Order:
    """The order in which the patches of every point moved with it, the best where several do."""
    if len(use.windows) == 1 and use.attributed:  # of one point all patches are its own
        return "reported"
    distances = {
        order: _distance(_print(use, order), moved[order], placed_B) for order in _candidates(use) if order in moved
    }
    best = min(distances, key=lambda order: distances[order], default=None)
    return best if best is not None and distances[best] <= tolerance_of(use.windows) else "together"


def _distance(here: Print, moved: Print, placed_B: Tensor) -> float:
    """How far the prints lie from those of the points that moved, as a part of their size; infinite if unknown."""
    if here.projected_BJ.shape != moved.projected_BJ.shape:
        return torch.inf
    off = float((here.projected_BJ[placed_B.to(here.projected_BJ.device)] - moved.projected_BJ).abs().amax())
    size = max(here.size, moved.size)
    ratio = off / size if size > 0 else off
    return ratio if ratio >= 0 else torch.inf  # NaN is no number that could be small


def _print(use: Use, order: Order) -> Print:
    """Random projections of evenly spaced patches of each point, the same ones for every point."""
    windows = use.windows if use.n_position_dims else use.windows.unsqueeze(2)
    positions = windows.shape[2 : 2 + max(1, use.n_position_dims)]
    n_points, n_patches, device = len(windows), positions.numel(), windows.device
    per_patch = windows.shape[1] * windows.shape[2 + len(positions) :].numel()
    n_taken = min(n_patches, max(2, MOST_VALUES // (n_points * per_patch)))
    taken = torch.linspace(0, n_patches - 1, n_taken, dtype=torch.float64, device=device).round().long()
    step, *others = places_of(taken, positions)
    point_B1 = torch.arange(n_points, dtype=torch.int64, device=device)[:, None]
    if order == "interleaved":
        lies_at = step * n_points + point_B1
        point_B1, step = lies_at // positions[0], lies_at % positions[0]
    index: tuple[Any, ...] = (point_B1, slice(None), step, *others)
    patches_BN = windows[index].flatten(1).double()
    peak = patches_BN.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)  # squares must not leave the range
    patches_BN = patches_BN / peak
    generator = torch.Generator("cpu").manual_seed(0)
    signs_NJ = torch.randn(
        patches_BN.shape[1], N_PROJECTIONS, generator=generator, dtype=torch.float64, device="cpu"
    ).to(device)
    size = torch.linalg.vector_norm(patches_BN, dim=1).amax() * peak
    return Print(patches_BN @ signs_NJ * peak, float(size))
