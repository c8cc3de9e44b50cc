"""Runs batches through `capture.py`, after an experiment on a few points of each form of batch.

The experiment finds what hooks on layers cannot see: a layer whose output does not follow from its uses, a weight that
is read elsewhere, control flow that depends on values, and which patches belong to which point. Shapes do not tell
that: frames folded into the batch may be ordered point by point or step by step, and a time dimension may be as long as
the batch. So two points are run, one of them at two places of the batch, where its patches must be the same. Or a whole
batch is run, and again permuted: the patches of a point must move with it. If no order fits, the patches of the batch
stay together, which is enough for a maximum.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.capture import OnUse, Pass, recorded_parameters, run_pass
from sipp.inputs.data import points_at, tensors_of_inputs
from sipp.inputs.layer_checks import OperationRecorder, ReadGuard, tolerance_of
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.outputs import Alone
from sipp.results.batches import Batch, WeightUse
from sipp.results.numerics import integers
from sipp.results.options import NormStats
from sipp.results.ranking import Weight

_log = logging.getLogger("sipp")


@dataclass(frozen=True)
class Probe:
    """What running some points of a batch showed, for all batches of the same form unless it names a `batch`."""

    orders: Orders  # of the patches of each use
    n_uses: dict[str, int]  # of each weight in one pass
    alone: Alone | None  # the outputs of the few points by themselves
    checked: set[str]  # modules whose output is known to follow from what was captured
    batch: Batch | None  # the one batch it holds for; None: it holds for all batches of this form

    @property
    def is_representative(self) -> bool:
        """Whether it holds for every batch of the same form."""
        return self.batch is None


Probes = dict[tuple[Any, ...], Probe]  # by shapes and dtypes of the inputs
Run = Callable[[Batch, OnUse], Any]  # returns the output of a batch, and calls OnUse for its uses on the way


def runner(
    model: nn.Module,
    layers: Iterable[PrunableLayer],
    norm_stats: NormStats = "running",
    checked: Probes | None = None,
    orders: Orders | None = None,
) -> Run:
    """A function that runs a batch and hands over every use of a weight, in the order of execution.

    A use is handed over before the layer runs and must be consumed at once: later operations may overwrite its
    input in place. The model is left exactly as it was, also when something raises.
    With `checked`, the probes so far by form of batch, a batch of a new form is probed first (see `probe`).
    Without it, uses are grouped by point in the given `orders`, or else as their shapes suggest.
    """
    layers = tuple(layers)
    catches = any(map(recorded_parameters, layers))
    watched: set[int] = set()  # ids of the probes of which a whole batch was run

    def run(batch: Batch, on_use: OnUse) -> Any:
        known = None if checked is None else probe(model, layers, batch, norm_stats, checked)
        order = orders if known is None else known.orders
        # the probe may have missed a branch that whole batches take
        is_new = known is not None and not (known.is_representative and id(known) in watched)
        one_pass = Pass(
            batch,
            _as_reported if order is None else Grouper(order),
            on_use,
            checked=None if known is None else known.checked,
            guard=ReadGuard(layers, batch.where) if is_new else None,
            operations=_operations(layers, follows=False) if catches else None,
        )
        output = run_pass(model, layers, one_pass, norm_stats)
        watched.add(id(known))
        return output

    return run


def probe(
    model: nn.Module, layers: Iterable[PrunableLayer], batch: Batch, norm_stats: NormStats, known: Probes
) -> Probe:
    """What is known of batches of this form; if nothing is, a few of its points are run to find out.

    If a few points are not representative (control flow depends on values, or several orders fit), every batch is
    probed in full.
    """
    form = signature_of(batch)
    found = known.get(form)
    if found is None or not (found.is_representative or found.batch is batch):
        new = _probed(model, tuple(layers), batch, norm_stats, few=found is None)
        _warn_of_unassigned(new, found, batch)
        found = known[form] = new
    return found


def signature_of(batch: Batch) -> tuple[Any, ...]:
    """The shapes and dtypes of its inputs, except for the number of points."""
    inputs = tensors_of_inputs(batch)
    return (batch.n_points > 1, *((name, t.dtype, t.shape[1:]) for name, t in inputs.items()))


def is_new_form(batch: Batch, known: Probes) -> bool:
    """Whether no batch of this form was probed."""
    return signature_of(batch) not in known


def goes_by_form(batch: Batch, known: Probes) -> bool:
    """Whether all batches of this form, which was probed, use the weights alike: no control flow depends on values."""
    return known[signature_of(batch)].is_representative


# A batch of two points, one of them twice, and the order in which its copies are exchanged: the same batch again.
# The second one keeps points sorted, for models that want sequences sorted by length.
ARRANGEMENTS = (([0, 1, 0], [2, 1, 0]), ([0, 0, 1], [1, 0, 2]))


def _probed(
    model: nn.Module, layers: tuple[PrunableLayer, ...], batch: Batch, norm_stats: NormStats, *, few: bool
) -> Probe:
    """The probe of a few points; of the whole batch if they are not representative or the model rejects them."""
    for points, exchanged in ARRANGEMENTS if few and batch.n_points > 1 else ():
        chosen = first_and_last(batch.n_points)[points]
        one_pass, recorder = _checking_pass(points_at(batch, chosen), layers)
        try:
            output = run_pass(model, layers, one_pass, norm_stats)
        except (DataError, ModelError):
            continue
        orders = find_orders(recorder, recorder, torch.tensor(exchanged, dtype=torch.int64, device="cpu"))
        found = _probe_of(one_pass, orders, recorder, (chosen, output), batch)
        if found.is_representative:
            return found
        break
    return _probe_all(model, layers, batch, norm_stats)


def _probe_all(model: nn.Module, layers: tuple[PrunableLayer, ...], batch: Batch, norm_stats: NormStats) -> Probe:
    """The probe of a whole batch: runs it, then again with its points permuted.

    The reversed batch keeps its statistics. If a model refuses it, or it is ambiguous (a batch may equal its own
    reversal), half of the points are run, each twice: that keeps sequences sorted by length.
    """
    n_points, alone = batch.n_points, None
    one_pass, first = _checking_pass(batch, layers)
    run_pass(model, layers, one_pass, norm_stats)
    orders = find_orders(first, Recorder(), integers(0, n_points))
    permutations = integers(n_points - 1, -1, -1), integers(0, n_points) // 2
    for placed in permutations if n_points > 1 else ():
        moved = Recorder()
        permuted = Pass(points_at(batch, placed), moved, operations=_operations(layers, follows=False))
        try:
            alone = placed, run_pass(model, layers, permuted, norm_stats)
        except (DataError, ModelError):  # the permutation's fault: the first run had the same points
            continue
        orders = find_orders(first, moved, placed)
        if not any(one.is_tied and one.order == "together" for one in orders.values()):
            break
    return _probe_of(one_pass, orders, first, alone, batch)


def first_and_last(n_points: int) -> Tensor:
    """The first and the last point of a batch, which stand for all of it."""
    return integers(0, n_points)[:: max(1, n_points - 1)]


def _checking_pass(batch: Batch, layers: tuple[PrunableLayer, ...]) -> tuple[Pass, Recorder]:
    """A pass that compares every layer's output, watches what the model reads and goes by, and records its uses."""
    recorder, guard = Recorder(), ReadGuard(layers, batch.where)
    return Pass(batch, recorder, checked=set(), guard=guard, operations=_operations(layers, follows=True)), recorder


def _operations(layers: Iterable[PrunableLayer], *, follows: bool) -> OperationRecorder:
    """The mode that records what weights meet; if it `follows` the data, also whether control flow goes by values."""
    by_layer = (recorded_parameters(layer).values() for layer in layers)
    return OperationRecorder(list(chain.from_iterable(by_layer)), follows)


def _probe_of(checking: Pass, orders: Orders, recorder: Recorder, alone: Alone | None, batch: Batch) -> Probe:
    """The probe after a checking pass; it holds for this batch only if control flow depends on values or orders tie."""
    assert checking.guard is not None and checking.operations is not None and checking.checked is not None
    depends_on_values = checking.operations.depends_on_values or checking.guard.takes_values
    holds_for_all = not depends_on_values and not any(order.is_tied for order in orders.values())
    return Probe(orders, recorder.n_uses, alone, checking.checked, None if holds_for_all else batch)


def _warn_of_unassigned(probe: Probe, earlier: Probe | None, batch: Batch) -> None:
    """Warns about weights whose patches cannot be assigned to points, once per form of batch."""
    padding = "" if batch.real_BT is None else ", and padding is not left out"
    warned = set() if earlier is None else set(_unassigned_uses(earlier))
    new = (name for name, i in _unassigned_uses(probe) if (name, i) not in warned)
    for name in dict.fromkeys(new) if batch.n_points > 1 else ():
        _log.warning(
            "%s: sipp cannot tell which values in %s belong to which input, so statements about single inputs are "
            "unknown for it%s",
            batch.where,
            name,
            padding,
        )


def _unassigned_uses(probe: Probe) -> list[UseKey]:
    """The uses whose patches cannot be assigned to points."""
    return [key for key, one in probe.orders.items() if one.order == "together"]


# --- Which patches belong to which point ------------------------------------------------------------------------------

# reported: as the adapter says, in dimension 0; interleaved: the patches of all points at step 0, then at step 1, ...;
# crossed: the same with as many steps as points, and several patches of a point in each; together: none of these fits
Order = Literal["reported", "interleaved", "crossed", "together"]
FLOAT32_EPS = 2.0**-23
AS_WELL = 8  # an order fits as well as the best if its distance is at most this many times the best, or the rounding
_PADDED = 64  # values of a sample that are reduced together, before samples of all lengths are
KEPT_PLACES = 64  # cached choices of positions: networks have many layers of few sizes

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
            tolerance=tolerance_of(windows.device, windows.dtype),
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
        return group_by_point(use, "together" if known is None else known.for_use(use))


def _as_reported(weight: Weight, use: WeightUse) -> WeightUse:
    return use


def find_orders(first: Recorder, moved: Recorder, placed_B: Tensor) -> Orders:
    """For each use, the order in which the patches of every point moved with the point; the best if several fit."""
    pairs = {key: (one, moved.samples[key]) for key, one in first.samples.items() if key in moved.samples}
    both = {
        key: (a, b)
        for key, (a, b) in pairs.items()
        if a.orders and a.orders == b.orders and a.values_BN.shape == b.values_BN.shape
    }
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


def _are_alike(sample: _Sample, which: list[int]) -> bool:
    """Whether these orders give each point the same patches, so that any of them is right."""
    readings = sample.values_BN.unflatten(1, (len(sample.orders), -1)).unbind(1)
    return all(torch.equal(readings[which[0]], readings[i]) for i in which[1:])


def group_by_point(use: WeightUse, order: Order) -> WeightUse:
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
    span = 1 + sum((size - 1) * stride for size, stride in zip(windows.shape, windows.stride()))
    memory = windows.as_strided((span,), (1,))  # one index into it is faster than one per dimension
    return memory.index_select(0, (starts + of_each).view(-1)).view(windows.shape[0], -1)


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
        reported_at(order, b, i, n_points, n_steps)
        for b in range(n_points)
        for order in orders
        for i in _few_indices(n_steps)
    ]
    starts = torch.tensor([[b * strides[0] + i * stride] for b, i in found], dtype=torch.int64, device=device)
    of_each = torch.zeros(1, dtype=torch.int64, device=device)
    for axis in (1, *range(3 if has_steps else 2, len(shape))):
        is_position = 2 <= axis < 2 + n_position_dims  # of groups and fan-in, all are taken
        taken = torch.tensor(
            _few_indices(shape[axis]) if is_position else range(shape[axis]), dtype=torch.int64, device=device
        )
        of_each = (of_each[:, None] + taken * strides[axis]).flatten()
    return starts, torch.cat((of_each, of_each[-1:].expand(-len(of_each) % _PADDED)))


def reported_at(order: Order, point: int, step: int, n_points: int, n_steps: int) -> tuple[int, int]:
    """The (point, step) at which the adapter reports this step of this point in an order (see `group_by_point`)."""
    if order == "reported":
        return point, step
    if order == "interleaved":
        return divmod(step * n_points + point, n_steps)
    n_each = n_steps // n_points
    return step // n_each, point * n_each + step % n_each


def _few_indices(size: int) -> list[int]:
    """The first, second, middle and last index."""
    return sorted({0, min(1, size - 1), (size - 1) // 2, size - 1})
