"""Repairs a pruned network layer by layer, without labels (T21).

    for each part of the network (a block; the whole network, if it has no blocks):          parts.py
        for each group of weights with the same input (query, key and value):
            run both networks on the same points, and sum all that least squares needs       sums.py
            find mask and values of each weight from its sums                                fit.py
        keep what the part gives in each network: there the next one begins

So a layer is fitted on the inputs x that it gets in the network repaired so far, in which layers that are not yet
fitted are dense (in a refit: pruned). What it is to give is W x + a (dense output - W x), where a is the error
feedback: a = 0 repeats the dense layer W on its new inputs, a = 1 compensates the whole error of earlier layers. Where
the output is added to a residual stream, the error of the stream is compensated too.

The search for mask and weights, the refit under fixed masks, and the methods of others walk alike; `FitTask` says what
differs. `prune_on_disk` walks part by part, with the states between two blocks in files.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sipp.inputs import (
    Batch,
    ModelMap,
    PrunableLayer,
    Residual,
    Weight,
    WeightUse,
    copy_of,
    find_prunable_layers,
    outputs,
    read_uses,
    trace_layers,
)
from sipp.native import memory
from sipp.progress import Advance, nothing, progress_bar
from sipp.pruning import (
    best_within,
    even_layers,
    is_large_linear_network,
)
from sipp.repairing.data_split import DataSplit, in_large_batches
from sipp.repairing.fit import PEERS, FitTask, fit_layer, fit_task, leave_unfitted
from sipp.repairing.parts import Part, Side, StatesInMemory, StopForward, groups_in, parts_in
from sipp.repairing.sums import InputSums, UsePair, WeightSums, meeting_streams, stream_as_use, streams_in, thinned
from sipp.results import FittedLayer, OutputChange, Pattern, Repair, RepairMethod, SeenInputs, numerics
from sipp.scoring import chunk_bytes_on

Masks = Mapping[str, Tensor]
UNDONE = "the output was no closer to the dense one on inputs that were not fitted"
NOT_ALIGNED = "the pruned network sends it other inputs (tokens routed differently?)"
SAME_BUDGET = 0.01  # relative: closer budgets count as the same, and the first masks stay


@dataclass(frozen=True)
class Repaired:
    """A repaired copy of a network, the record of the repair, and the points it used."""

    model: nn.Module
    masks: dict[str, Tensor]
    record: Repair
    seen: SeenInputs

    @property
    def moved(self) -> OutputChange | None:
        """How far its output is from the dense one, on test points, or else on validation points."""
        record = self.record
        if record.output_after is not None:
            return OutputChange(record.output_after, record.n_test, is_held_back=True)
        if record.output_validation is not None:
            return OutputChange(record.output_validation, record.n_validation, is_held_back=False)
        return None


def repair_network(
    dense: nn.Module,
    masks: Masks,
    split: DataSplit,
    method: RepairMethod = "joint",
    *,
    pattern: Pattern | None = None,
    keeps_rows: bool = False,
    start: nn.Module | None = None,
    known: ModelMap | None = None,
    progress: bool = False,
) -> Repaired:
    """A copy of the dense network with as many weights as the masks keep, fitted to it on the points of the split.

    A search under a budget takes from the masks only how many weights each layer keeps (`starting_masks`).

    `known` is the map of the dense network, if there is one. `start` is the pruned network; None: the dense values
    under the masks. A refit begins with its values. The result is compared with it on the validation points, and undone
    if it is worse. Weights that are 0 in the dense network and not in the masks stay 0; with `keeps_rows`, no row dies
    that has a weight in the masks.
    """
    is_refit = method == "refit"
    split = in_large_batches(split, max((max(len(mask), mask[0].numel()) for mask in masks.values()), default=1))
    memory.give_back_freed()
    cost = sum(_fit_cost(mask.shape) for mask in masks.values())
    title = "repairing" if is_refit else "finding masks and weights"
    with progress_bar(title, cost, shown=progress, in_percent=True) as advance:
        error_before, test_before = _errors(dense, _unrepaired(dense, masks, start), split)
        model = _unrepaired(dense, masks, start) if is_refit else copy_of(dense)
        ours, theirs = (Side(one, split.batches, StatesInMemory(len(split.batches))) for one in (dense, model))
        traced = dense, split.batches[0]
        walk = walk_of(
            ours, theirs, masks, split.n_fit_batches, traced=traced, known=known, corrects=method not in PEERS
        )
        weights = list(walk.weights.values())
        is_large_linear = is_large_linear_network(weights, masks)
        task = fit_task(method, pattern, is_large_linear=is_large_linear, keeps_rows=keeps_rows)
        has_budget = method == "joint" and pattern is None
        first = starting_masks(dense, weights, masks, keeps_rows=keeps_rows) if has_budget else masks
        fitted, layers = fit_parts(walk, task, parts_in(walk.map, masks), first, advance)
        memory.give_back_freed()
        error_after, test_after = _errors(dense, model, split)
    is_undone = False
    if method not in PEERS and error_before is not None and error_after is not None:
        is_undone = not error_after <= error_before
    if is_undone:
        error_after, test_after = error_before, test_before
        model, fitted = _unrepaired(dense, masks, start), dict(masks)
        layers = [leave_unfitted(model, layer.name, masks[layer.name], "undone") for layer in layers]
    moved = ((fitted[layer.name] & ~masks[layer.name]).sum() for layer in layers)
    n_fit, n_validation, n_test = (sum(b.n_points for b in some) for some in (split.fit, split.validation, split.test))
    record = Repair(
        layers=tuple(replace(layer, n_moved=int(n)) for layer, n in zip(layers, moved)),
        n_fit=n_fit,
        n_validation=n_validation,
        n_test=n_test,
        output_before=test_before,
        output_after=test_after,
        output_validation=error_after,
        polish=None,
        undone=UNDONE if is_undone else "",
        method=method,
    )
    return Repaired(model, fitted, record, split.seen)


def _fit_cost(shape: Sequence[int]) -> int:
    """The cost of fitting a weight of this shape, in units of a progress bar."""
    n_rows, fan_in = shape[0], math.prod(shape[1:])
    return n_rows * fan_in**2 + fan_in**3


def _unrepaired(dense: nn.Module, masks: Masks, start: nn.Module | None) -> nn.Module:
    """A copy of the pruned network: of `start`, or else of the dense one with the weights off the masks set to 0."""
    model = copy_of(dense if start is None else start)
    with torch.no_grad():
        for name, mask in masks.items() if start is None else ():
            parameter = model.get_parameter(name)
            parameter.copy_(torch.where(mask, parameter, 0.0))
    return model


def _errors(dense: nn.Module, model: nn.Module, split: DataSplit) -> tuple[float | None, float | None]:
    """The output errors on validation points and on test points; None if there is nothing to compare."""
    return outputs.output_error(dense, model, split.validation), split.test_error(dense, model)


# --- The walk ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """Both networks, run part by part on the same inputs. The weights of the pruned one change as they are fitted."""

    dense: Side
    pruned: Side
    map: ModelMap  # of the dense network
    layers: tuple[PrunableLayer, ...]  # of the dense network, with masked weights only
    streams: Mapping[str, Residual]  # that are corrected, by weight
    n_fit_batches: int  # they come first; the others validate

    @property
    def weights(self) -> dict[str, Weight]:
        """The masked weights by name."""
        return {weight.name: weight for layer in self.layers for weight in layer.weights.values()}


def walk_of(
    dense: Side,
    pruned: Side,
    masks: Masks,
    n_fit_batches: int,
    *,
    traced: tuple[nn.Module, Batch],
    known: ModelMap | None = None,
    corrects: bool = True,
    inputs_differ: bool = False,
) -> Walk:
    """The walk of both networks past the masked weights, by the map of the dense one or of a part, known or traced.

    `corrects`: the ends of residual blocks compensate the error of the stream. `inputs_differ`: earlier parts have
    made the inputs of this one, so that these streams have an error too.
    """
    model, batch = traced
    layers = find_prunable_layers(model, include=[glob.escape(name) for name in masks])
    chosen = (replace(one, weights={l: w for l, w in one.weights.items() if w.name in masks}) for one in layers)
    masked = tuple(layer for layer in chosen if layer.weights)
    found = known or trace_layers(model, masked, batch)
    streams = streams_in(found, inputs_differ=inputs_differ) if corrects else {}
    return Walk(dense, pruned, found, masked, streams, n_fit_batches)


def fit_parts(
    walk: Walk, task: FitTask, parts: Sequence[Part], first_masks: Masks, advance: Advance = nothing
) -> tuple[dict[str, Tensor], list[FittedLayer]]:
    """Fits the weights of these parts in the pruned network, in place: their masks, and what was done to each.

    `advance` is called with the cost of each weight.
    """
    masks, done, weights, model = dict(first_masks), list[FittedLayer](), walk.weights, walk.pruned.model
    # returning memory costs a small network more than it saves, and on a GPU there is none to return
    n_weights = sum(mask.numel() for mask in masks.values())
    gives_back = n_weights > numerics.MOST_WEIGHTS_OF_SMALL and not any(mask.is_cuda for mask in masks.values())
    n_left = sum(len(part.groups) for part in parts)
    for part in parts:
        for group in part.groups:
            if gives_back:
                memory.give_back_freed()
            sums = sums_of(walk, part, group)
            for name in group:
                place = walk.map.places[name]
                masks[name], layer = fit_layer(task, model, weights[name], first_masks[name], sums.pop(name), place)
                done.append(replace(layer, corrects=name in walk.streams))
                advance(_fit_cost(masks[name].shape))
        n_left -= len(part.groups)
        for side in (walk.dense, walk.pruned) if n_left else ():
            side.pass_on(part)
    reached = {layer.name for layer in done}
    for name in (name for name in masks if name not in reached):
        done.append(leave_unfitted(model, name, masks[name], "no inputs reach it"))
        advance(_fit_cost(masks[name].shape))
    return masks, done


def repair_part(
    part: Part,
    traced: tuple[nn.Module, Batch],
    dense: Side,
    pruned: Side,
    masks: Masks,
    n_fit_batches: int,
    *,
    pattern: Pattern | None,
) -> tuple[dict[str, Tensor], list[FittedLayer]]:
    """Finds masks and weights of one part of a large network, as `fit_parts` does; the pruned one is changed in place.

    `traced` is the part as a model, and its inputs.
    """
    walk = walk_of(dense, pruned, masks, n_fit_batches, traced=traced, inputs_differ=part.number > 0)
    task = fit_task("joint", pattern, is_large_linear=True, keeps_rows=False)
    return fit_parts(walk, task, [replace(part, groups=groups_in(walk.map, masks))], masks)


# --- Sums over what both networks meet --------------------------------------------------------------------------------


def sums_of(walk: Walk, part: Part, names: Sequence[str]) -> dict[str, WeightSums]:
    """The sums of some weights of a part that have the same input, with the pruned network as it is now."""
    shares, weights = len(names) > 1, walk.weights
    models = walk.dense.model, walk.pruned.model
    chunk_bytes = chunk_bytes_on(models[0].get_parameter(names[0]).device)
    sums = {name: WeightSums(weights[name], shares, chunk_bytes, walk.dense.allow_tf32) for name in names}
    for i in range(len(walk.dense.batches)):
        dense, pruned = (_met(walk, side, part, names, i) for side in (walk.dense, walk.pruned))
        known: InputSums | None = None  # the sums over inputs that the weight before has made
        for name, one in sums.items():
            pairs, obstacle = _pairs(walk, name, dense, pruned, i)
            one.obstacle = one.obstacle or obstacle
            ours, theirs = (model.get_parameter(name).detach() for model in models)
            into = one.fit if i < walk.n_fit_batches else one.validation
            for pair in pairs if not one.obstacle else ():
                known = one.add(into, pair, ours, theirs, known)
    return sums


class _Met:
    """The inputs of some weights in one run of a part (copies), and the streams beside them."""

    def __init__(self, walk: Walk, names: Sequence[str], i: int) -> None:
        self.uses: dict[str, list[WeightUse]] = {name: [] for name in names}
        self.streams: dict[str, Tensor] = {}
        self.awaited = {name: walk.streams[name] for name in names if name in walk.streams}
        self.is_known = not walk.map.recording.depends_on_values and all(walk.map.n_uses[name] == 1 for name in names)
        self.n_points, self.i = sum(batch.n_points for batch in walk.dense.batches), i
        self.last: tuple[Tensor, Tensor] | None = None  # the windows of the last use, as given and as they are kept

    @property
    def is_complete(self) -> bool:
        """Whether nothing more can come, so that the run may end."""
        return self.is_known and all(self.uses.values()) and len(self.streams) == len(self.awaited)

    def on_use(self, weight: Weight, use: WeightUse, batch: Batch) -> None:
        """Keeps a use of one of the weights. Those of a group read the same, of which there is one copy."""
        if weight.name not in self.uses:
            return
        use = thinned(use, weight, self.n_points, self.i)
        if self.last is None or not _are_same(self.last[0], use.windows):
            self.last = use.windows, use.windows if use.is_own_copy else use.windows.clone()
        self.uses[weight.name].append(replace(use, windows=self.last[1]))
        if self.is_complete:
            raise StopForward

    def on_stream(self, name: str, stream: Tensor) -> None:
        """Keeps the stream that the output of a weight's layer is added to."""
        self.streams[name] = stream
        if self.is_complete:
            raise StopForward


def _met(walk: Walk, side: Side, part: Part, names: Sequence[str], i: int) -> _Met:
    """Runs a part of one network on batch i as far as it is needed."""
    met, model = _Met(walk, names, i), side.model
    layers = [
        replace(layer, module=model.get_submodule(layer.module_name))
        for layer in walk.layers
        if any(weight.name in names for weight in layer.weights.values())
    ]

    def read(batch: Batch) -> None:
        # only padding needs the map: sums do not ask whose patches they add
        read_uses(model, layers, batch, met.on_use, None if batch.real_BT is None else walk.map)

    with meeting_streams(model, met.awaited, met.on_stream) if met.awaited else nullcontext():
        side.run(part, i, read)
    met.last = None  # the model's own tensors may go
    return met


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Whether these are views of the same numbers."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _pairs(walk: Walk, name: str, dense: _Met, pruned: _Met, i: int) -> tuple[list[UsePair], str]:
    """The uses of a weight in both networks, each with the gap between the streams; or why they cannot be compared."""
    uses, others = dense.uses[name], pruned.uses[name]
    if [use.windows.shape for use in uses] != [use.windows.shape for use in others]:
        return [], NOT_ALIGNED
    if name not in walk.streams:
        return [UsePair(use, other, None) for use, other in zip(uses, others)], ""
    ours, theirs = dense.streams.get(name), pruned.streams.get(name)
    if ours is None or theirs is None or ours.shape != theirs.shape or len(uses) != 1:
        return [], NOT_ALIGNED
    use = stream_as_use(walk.pruned.model, walk.streams[name], ours - theirs, uses[0], walk.pruned.batches[i])
    use = thinned(use, walk.weights[name], dense.n_points, i)
    is_like = use.windows.shape[: 2 + use.n_position_dims] == uses[0].windows.shape[: 2 + uses[0].n_position_dims]
    return ([UsePair(uses[0], others[0], use)], "") if is_like else ([], NOT_ALIGNED)


# --- How many weights each layer keeps while mask and weights are searched --------------------------------------------


def starting_masks(dense: nn.Module, weights: Sequence[Weight], masks: Masks, *, keeps_rows: bool) -> dict[str, Tensor]:
    """The masks to begin a search with, of as many weights as the given ones: their own weights are forgotten.

    Each layer keeps the geometric mean of what its mask keeps and of an even share, in its largest weights. A score of
    the whole network may leave a layer too little to be repaired, and even shares forget what the score knows. Where
    that changes hardly any count, the given masks stay. In a network that is sparse already, a layer's share refers to
    the weights it has left.
    """
    rows = [weight.rows(dense.get_parameter(weight.name).detach()) for weight in weights]
    counts, left = [int(masks[weight.name].sum()) for weight in weights], [int(w.count_nonzero()) for w in rows]
    shapes = [(weight.n_rows, weight.fan_in) for weight in weights]
    if sum(left) >= sum(counts):  # a weight with zeros counts as one row of the others
        shapes = [shape if n == math.prod(shape) else (1, n) for shape, n in zip(shapes, left)]
    even = even_layers(shapes, sum(counts), least=1 if keeps_rows else 0)
    shares = _geometric_means(counts, even, [math.prod(shape) for shape in shapes])
    if all(abs(share - count) <= SAME_BUDGET * count for share, count in zip(shares, counts)):
        return dict(masks)
    found = {}
    for weight, weight_FK, n_kept in zip(weights, rows, shares):
        size_FK = weight_FK.cpu().abs().to(numerics.SCORE_DTYPE)
        (mask_FK,) = best_within([size_FK], [size_FK], n_kept, floor=0.0 if keeps_rows else None)
        given = masks[weight.name]
        found[weight.name] = weight.shaped(mask_FK, given).to(given.device)
    return found


def _geometric_means(counts: Sequence[int], shares: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The geometric means of both, scaled to the same total; no layer gets more than it has."""
    means = [math.sqrt(count * share) for count, share in zip(counts, shares)]
    kept, left, rest = [0] * len(means), sum(counts), sum(means)
    for i in sorted(range(len(means)), key=lambda i: -means[i] / max(sizes[i], 1)):
        kept[i] = min(sizes[i], round(left * means[i] / rest)) if rest > 0 else 0
        left, rest = left - kept[i], rest - means[i]
    return kept
