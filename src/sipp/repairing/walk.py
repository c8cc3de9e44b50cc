"""The walk of a repair: brings a pruned network closer to the dense one, layer by layer, without labels (T21).

    for each part of the network (a block; the whole network, if it has no blocks):          parts.py
        for each group of weights with the same input (query, key and value):
            run both networks on the same points, and sum all that least squares needs       sums.py
            find mask and values of each weight from its sums                                fit.py
        keep what the part gives in each network: there the next one begins

So a layer is fitted on the inputs x that it gets in the network repaired so far. What it is to give is
W x + a (dense output - W x), where a is the error feedback: a = 0 repeats the dense layer W on its new inputs, a = 1
compensates the whole error of earlier layers. Where the output is added to a residual stream, the error of the stream
is compensated too.

The search for mask and weights, the refit under fixed masks, and the methods of others walk alike; `FitTask` says what
differs. `prune_on_disk` walks part by part, with the states between two blocks in files.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sipp.inputs import (
    Batch,
    ModelMap,
    PrunableLayer,
    Sum,
    Weight,
    WeightUse,
    copy_of,
    find_prunable_layers,
    meeting_sums,
    outputs,
    read_uses,
    trace_layers,
)
from sipp.native import memory
from sipp.progress import Advance, fit_cost, nothing, progress_bar
from sipp.pruning import (
    best_within,
    even_layers,
    is_like_a_language_model,
)
from sipp.repairing.data_split import DataSplit, in_large_batches
from sipp.repairing.fit import PEERS, FitTask, fit_layer, fit_task, leave_unfitted
from sipp.repairing.parts import Part, Side, StatesInMemory, StopForward, groups_in, parts_in
from sipp.repairing.sums import InputSums, UsePair, WeightSums, stream_as_use, streams_in, thinned
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
    progress: bool = False,
) -> Repaired:
    """A copy of the dense network with as many weights as the masks keep, fitted to it on the points of the split.

    `start` is the pruned network; None: the dense values under the masks. A refit begins with its values. The result is
    compared with it on the validation points, and undone if it is worse. Weights that are 0 in the dense network and
    not in the masks stay 0; with `keeps_rows`, no row dies that has a weight in the masks.
    """
    is_refit = method == "refit"
    split = in_large_batches(split, max((max(len(mask), mask[0].numel()) for mask in masks.values()), default=1))
    memory.give_back_freed()
    cost = sum(fit_cost(mask.shape) for mask in masks.values())
    title = "repairing" if is_refit else "finding masks and weights"
    with progress_bar(title, cost, shown=progress, in_percent=True) as advance:
        error_before, test_before = _errors(dense, _unrepaired(dense, masks, start), split)
        model = _unrepaired(dense, masks, start) if is_refit else copy_of(dense)
        ours, theirs = (Side(one, split.batches, StatesInMemory(len(split.batches))) for one in (dense, model))
        traced = dense, split.batches[0]
        walk = walk_of(ours, theirs, masks, split.n_fit_batches, traced=traced, corrects=method not in PEERS)
        is_large = is_like_a_language_model(list(walk.weights.values()), masks)
        task = fit_task(method, pattern, is_large=is_large, keeps_rows=keeps_rows)
        between = method == "joint" and pattern is None
        first_masks = masks_between(dense, walk.weights.values(), masks, keeps_rows=keeps_rows) if between else masks
        fitted, layers = fit_parts(walk, task, parts_in(walk.map, masks), first_masks, advance)
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
        output_refit=test_after,
        output_after=test_after,
        output_validation=error_after,
        polish=None,
        undone=UNDONE if is_undone else "",
        method=method,
    )
    return Repaired(model, fitted, record, split.seen)


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
    """Both networks on the same points. The weights of the pruned one change as they are fitted."""

    dense: Side
    pruned: Side
    map: ModelMap  # of the dense network
    layers: tuple[PrunableLayer, ...]  # of the dense network, with masked weights only
    streams: Mapping[str, Sum]  # that are corrected, by weight
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
    corrects: bool = True,
    inputs_differ: bool = False,
) -> Walk:
    """The walk of both networks past the masked weights, by a map of a model that is traced: of the dense one, or part.

    `corrects`: the ends of residual blocks compensate the error of the stream. `inputs_differ`: earlier parts have
    made the inputs of this one, so that these streams have an error too.
    """
    model, batch = traced
    layers = find_prunable_layers(model, include=[glob.escape(name) for name in masks])
    chosen = (replace(one, weights={l: w for l, w in one.weights.items() if w.name in masks}) for one in layers)
    masked = tuple(layer for layer in chosen if layer.weights)
    found = trace_layers(model, masked, batch)
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
    is_large = sum(mask.numel() for mask in masks.values()) > numerics.MOST_WEIGHTS_OF_SMALL
    gives_back = is_large and not any(mask.is_cuda for mask in masks.values())
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
                advance(fit_cost(masks[name].shape))
        n_left -= len(part.groups)
        for side in (walk.dense, walk.pruned) if n_left else ():
            side.pass_on(part)
    reached = {layer.name for layer in done}
    for name in (name for name in masks if name not in reached):
        done.append(leave_unfitted(model, name, masks[name], "no inputs reach it"))
        advance(fit_cost(masks[name].shape))
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
    task = fit_task("joint", pattern, is_large=True, keeps_rows=False)
    return fit_parts(walk, task, [replace(part, groups=groups_in(walk.map, masks))], masks)


# --- Sums over what both networks meet --------------------------------------------------------------------------------


@dataclass
class _Met:
    """What a run has met: the uses of some weights, with copies of what they read, and streams."""

    uses: dict[str, list[WeightUse]]
    streams: dict[str, Tensor]


def sums_of(walk: Walk, part: Part, names: Sequence[str]) -> dict[str, WeightSums]:
    """The sums of some weights of a part that have the same input, with the pruned network as it is now."""
    shares, weights = len(names) > 1, walk.weights
    models = walk.dense.model, walk.pruned.model
    chunk_bytes = chunk_bytes_on("auto", models[0].get_parameter(names[0]).device)
    sums = {name: WeightSums(weights[name], shares, chunk_bytes, walk.dense.allow_tf32) for name in names}
    for i in range(len(walk.dense.batches)):
        dense, pruned = (_met(walk, side, part, names, i) for side in (walk.dense, walk.pruned))
        known: InputSums | None = None  # the sums over inputs that the weight before has made
        for name, one in sums.items():
            ours, theirs = (model.get_parameter(name).detach() for model in models)
            uses, other_uses = dense.uses[name], pruned.uses[name]
            streams = _stream_gap(walk, name, dense, pruned, i)
            if [u.windows.shape for u in uses] != [u.windows.shape for u in other_uses] or streams is None:
                one.obstacle = NOT_ALIGNED
            into = one.fit if i < walk.n_fit_batches else one.validation
            for pair in map(UsePair, uses, other_uses, streams or ()) if not one.obstacle else ():
                known = one.add(into, pair, ours, theirs, known)
    return sums


def _met(walk: Walk, side: Side, part: Part, names: Sequence[str], i: int) -> _Met:
    """Runs a part of one network on batch i as far as it is needed."""
    met = _Met({name: [] for name in names}, {})
    streams = {name: walk.streams[name] for name in names if name in walk.streams}
    is_known = not walk.map.recording.depends_on_values and all(walk.map.n_uses[name] == 1 for name in names)
    n_left = len(names) if is_known else math.inf
    last: tuple[Tensor, Tensor] | None = None  # the windows of the last use, as they were given and as they are kept

    def stop_at_last() -> None:
        if n_left == 0 and len(met.streams) == len(streams):
            raise StopForward

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        nonlocal n_left, last
        if weight.name not in met.uses:
            return
        use = thinned(use, weight, n_points, i)
        if last is None or not _are_same(last[0], use.windows):  # the weights of a group read the same
            last = use.windows, use.windows if use.is_own_copy else use.windows.clone()
        met.uses[weight.name].append(replace(use, windows=last[1]))
        n_left -= 1
        stop_at_last()

    def on_stream(name: str, stream: Tensor) -> None:
        met.streams[name] = stream
        stop_at_last()

    n_points = sum(batch.n_points for batch in side.batches)
    layers = [
        replace(layer, module=side.model.get_submodule(layer.module_name))
        for layer in walk.layers
        if any(weight.name in names for weight in layer.weights.values())
    ]
    with meeting_sums(side.model, streams, on_stream) if streams else nullcontext():
        side.run(part, i, lambda batch: read_uses(side.model, layers, batch, on_use, _map_for(walk, batch)))
    return met


def _map_for(walk: Walk, batch: Batch) -> ModelMap | None:
    """The map where it is needed: padding is left out where patches belong to inputs."""
    return None if batch.real_BT is None else walk.map


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Whether these are views of the same numbers."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _stream_gap(walk: Walk, name: str, dense: _Met, pruned: _Met, i: int) -> Sequence[WeightUse | None] | None:
    """By use, the dense stream minus the pruned one, like the layer's output; None if they cannot be compared."""
    if name not in walk.streams:
        return [None] * len(dense.uses[name])
    ours, theirs = dense.streams.get(name), pruned.streams.get(name)
    if ours is None or theirs is None or ours.shape != theirs.shape or len(dense.uses[name]) != 1:
        return None
    side, like = walk.pruned, dense.uses[name][0]
    use = stream_as_use(side.model, walk.streams[name], ours - theirs, like, side.batches[i])
    use = thinned(use, walk.weights[name], sum(batch.n_points for batch in side.batches), i)
    is_like = use.windows.shape[: 2 + use.n_position_dims] == like.windows.shape[: 2 + like.n_position_dims]
    return [use] if is_like else None


# --- How many weights each layer keeps while mask and weights are searched --------------------------------------------


def masks_between(dense: nn.Module, weights: Iterable[Weight], masks: Masks, *, keeps_rows: bool) -> dict[str, Tensor]:
    """The masks to begin a search with, of as many weights as the given ones.

    Each layer keeps the geometric mean of what its mask keeps and of an even share, in its largest weights. A score of
    the whole network may leave a layer too little to be repaired, and even shares forget what the score knows. In a
    network that is sparse already, a layer's share refers to the weights it has left.
    """
    weights = list(weights)
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
    for i in sorted(range(len(means)), key=lambda i: -means[i] / sizes[i]):
        kept[i] = min(sizes[i], round(left * means[i] / rest)) if rest > 0 else 0
        left, rest = left - kept[i], rest - means[i]
    return kept
