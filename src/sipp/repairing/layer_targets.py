"""The targets of layers: dense outputs, plus the error of the residual stream that they are added to.

The error of a stream is the dense network's stream minus the pruned one's. Its first part never changes, and is kept
together with the dense outputs (the dense targets); the second is subtracted when a layer is fitted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor, nn

from sipp.errors import DataError, OptionError
from sipp.inputs.data import first_and_last, points_at
from sipp.inputs.layer_checks import every_tensor
from sipp.inputs.patches import patches_of
from sipp.repairing.layer_usage import DenseOutputs, Targets, most_target_bytes
from sipp.repairing.moments import WeightMoments
from sipp.repairing.network_pair import NetworkPair, thinned
from sipp.repairing.replaying import Replay
from sipp.repairing.residual_connections import (
    ResidualInputs,
    along_rows,
    bias_of,
    find_residual_connections,
    output_as_use,
    per_row,
)
from sipp.results.batches import Batch
from sipp.results.numerics import SCORE_DTYPE, device_of
from sipp.results.ranking import Weight

SAME = 1e-3  # of the largest output: tolerance between a layer's output and the products of its weight


@dataclass(frozen=True)
class ResidualLayer:
    """A weight whose layer's output is added to a residual stream, and its module in both networks."""

    weight: Weight
    dense: nn.Module
    pruned: nn.Module


def find_residual_layers(pair: NetworkPair, residuals: Collection[str] | None) -> dict[str, ResidualLayer]:
    """The weights that correct a residual stream: the named ones, or all that can be found."""
    found = dict[str, ResidualLayer]()
    if residuals is None or residuals:
        try:
            found = _found_in(_of_few_points(pair), residuals)
        except DataError:  # a few points fail by themselves
            found = _found_in(pair, residuals)
    for name in set(residuals or ()) - found.keys():
        refuse_residual(name)
    return found


def _of_few_points(pair: NetworkPair) -> NetworkPair:
    """The same networks with two points of the first batch; all of it if points are padded, or may lie elsewhere."""
    is_padded = pair.usage.maps[0] is not None
    if is_padded or not _lies_by_point(pair.dense.batches[0]):
        return pair
    dense, pruned = (
        replace(side, batches=[points_at(side.batches[0], first_and_last(side.batches[0].n_points))])
        for side in (pair.dense, pair.pruned)
    )
    return replace(pair, dense=dense, pruned=pruned)


def _lies_by_point(batch: Batch) -> bool:
    """Whether dimension 0 of the inputs can only be the points: in a time-first state they lie along the next one."""
    shapes = [tensor.shape for tensor in every_tensor((batch.args, batch.kwargs)) if tensor.is_floating_point()]
    return any(s[:1] == (batch.n_points,) for s in shapes) and not any(s[1:2] == (batch.n_points,) for s in shapes)


def _found_in(pair: NetworkPair, residuals: Collection[str] | None) -> dict[str, ResidualLayer]:
    """The weights that correct a residual connection, as the first batch of the dense network shows them."""
    dense = pair.dense
    outputs = find_residual_connections(
        dense.run, dense.layers, pair.names, dense.batches[0], inputs_differ=pair.inputs_differ
    )
    layers = residual_layers(pair, [name for name in outputs if residuals is None or name in residuals])
    return {name: layer for name, layer in layers.items() if _is_aligned(pair, layer, outputs[name])}


def residual_layers(pair: NetworkPair, names: Collection[str]) -> dict[str, ResidualLayer]:
    """The weights of these names, with their modules in both networks."""
    return {
        weight.name: ResidualLayer(weight, dense.module, pruned.module)
        for dense, pruned in zip(pair.dense.layers, pair.pruned.layers)
        for weight in pruned.weights.values()
        if weight.name in names
    }


def refuse_residual(name: str) -> NoReturn:
    """Raises for a weight that was named as the end of a residual block but is not one."""
    raise OptionError(
        f"the output of {name} is not seen to be added to a stream of earlier layers",
        fix="name weights of layers whose output is added to one, directly or behind a BatchNorm, or leave it out",
        option="residuals",
    )


def _is_aligned(pair: NetworkPair, layer: ResidualLayer, output: Tensor) -> bool:
    """Whether a layer's output, cut into patches like a stream, equals the products of its weight there."""
    bias = bias_of(layer.dense)
    if bias is not None:
        output = output - along_rows(layer.dense, bias, output.ndim)
    found = _chunks(pair, layer.weight, layer.dense, output, 0)
    apart = replace(pair, dense=replace(pair.dense, replay=Replay("off")))  # later weights still need the replay
    wanted = apart.dense_outputs([layer.weight.name], 0)[0][layer.weight.name]
    if found is None or [chunk.shape for chunk in found] != [chunk.shape for chunk in wanted]:
        return False
    return all(bool((a - b).abs().max() <= SAME * b.abs().max()) for a, b in zip(found, wanted))


def _chunks(pair: NetworkPair, weight: Weight, module: nn.Module, tensor: Tensor, i: int) -> list[Tensor] | None:
    """A tensor of the shape of the layer's output, cut into the chunks of patches of batch i: G x R x P each."""
    use = output_as_use(module, tensor, pair.pruned.batches[i])  # both networks have the same points
    if use is None:
        return None
    use = thinned(use, pair.usage.strides[weight.name], i)
    return [patches_of(windows, use.n_position_dims, None, SCORE_DTYPE) for windows in pair.chunks(weight, use)]


def dense_targets(pair: NetworkPair, corrected: Mapping[str, ResidualLayer], names: Sequence[str], i: int) -> Targets:
    """The dense outputs of these weights on batch i, without bias, plus the streams they are added to."""
    modules = {name: corrected[name].dense for name in names if name in corrected}
    targets, streams = pair.dense_outputs(names, i, modules)
    return _with_streams(pair, corrected, targets, modules, streams, i, 1)


def dense_targets_of_all(
    pair: NetworkPair,
    corrected: Mapping[str, ResidualLayer],
    names: Sequence[str],
    known: DenseOutputs | None,
) -> list[Targets]:
    """The dense targets of all batches; `known` keeps them for later fits, as far as memory allows."""
    which = tuple(names), tuple(name for name in names if name in corrected)
    found = None if known is None else known.targets.get(which)
    if found is None:
        found = [dense_targets(pair, corrected, names, i) for i in range(len(pair.dense.batches))]
        n_bytes = sum(pair.usage.target_bytes[name] for name in names)
        if known is not None and known.n_bytes + n_bytes <= most_target_bytes(device_of(pair.dense.model)):
            known.targets[which] = found
            known.n_bytes += n_bytes
    return [dict(targets) for targets in found]  # the caller frees its own as it goes


def moments_to_targets(
    pair: NetworkPair,
    corrected: Mapping[str, ResidualLayer],
    names: Sequence[str],
    kept: list[Targets] | None,
) -> dict[str, WeightMoments]:
    """The moments of these weights and their targets: dense targets minus the pruned network's current streams (T21).

    `kept` are the dense targets by batch, which are freed as they are used; None: they are recomputed.
    """
    modules = {name: corrected[name].pruned for name in names if name in corrected}

    def targets_of(i: int, streams: ResidualInputs) -> Targets:
        if kept is None:
            targets = dense_targets(pair, corrected, names, i)
        else:
            targets = {name: kept[i].pop(name) for name in names}
        return _with_streams(pair, corrected, targets, modules, streams, i, -1)

    return pair.moments(names, targets_of, modules)


def _with_streams(
    pair: NetworkPair,
    corrected: Mapping[str, ResidualLayer],
    targets: Targets,
    modules: Mapping[str, nn.Module],
    streams: ResidualInputs,
    i: int,
    sign: int,
) -> Targets:
    """The targets plus (or minus) the streams, in units of the layers' outputs; none if a stream has another shape."""
    found = dict(targets)
    for name, module in modules.items():
        chunks = None
        if name in streams:
            mark, stream = streams[name]
            chunks = _chunks(pair, corrected[name].weight, module, per_row(module, stream, mark.scale_F), i)
        is_same = chunks is not None and [c.shape for c in chunks] == [t.shape for t in targets[name]]
        found[name] = [t + sign * c for t, c in zip(targets[name], chunks or ())] if is_same else []
    return found
