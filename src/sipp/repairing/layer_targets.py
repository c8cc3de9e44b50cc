"""The targets of layers: dense outputs, plus the error of the residual stream that they are added to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import Tensor, nn

from sipp.errors import DataError, OptionError
from sipp.inputs.data import points_at
from sipp.inputs.layer_checks import every_tensor
from sipp.inputs.patches import patches_of
from sipp.inputs.probing import first_and_last
from sipp.records.batches import Batch
from sipp.records.numerics import SCORE_DTYPE, device_of
from sipp.records.ranking import Weight
from sipp.repairing.gathering import Gatherer, WeightMoments, thinned
from sipp.repairing.layer_usage import DenseOutputs, Targets, target_bytes
from sipp.repairing.replaying import Replay
from sipp.repairing.residual_connections import (
    ResidualInputs,
    along_rows,
    bias_of,
    find_residual_connections,
    output_as_use,
    per_row,
)

SAME = 1e-3  # of the largest output: tolerance between a layer's output and the products of its weight


@dataclass(frozen=True)
class ResidualLayer:
    """A weight whose layer's output is added to a residual stream, and its module in both networks."""

    weight: Weight
    dense: nn.Module
    pruned: nn.Module


def find_residual_layers(
    gatherer: Gatherer, residuals: Collection[str] | None, *, follows: bool = False
) -> dict[str, ResidualLayer]:
    """The weights that correct a residual stream: the named ones, or all that can be found.

    With `follows`, earlier layers are pruned already, so the inputs have an error too.
    """
    found = dict[str, ResidualLayer]()
    if residuals is None or residuals:
        try:
            found = _found_in(_of_few_points(gatherer), residuals, follows=follows)
        except DataError:  # a few points fail by themselves
            found = _found_in(gatherer, residuals, follows=follows)
    for name in set(residuals or ()) - found.keys():
        refuse_residual(name)
    return found


def _of_few_points(gatherer: Gatherer) -> Gatherer:
    """The same networks with two points of the first batch; all of it if points are padded, or may lie elsewhere."""
    is_padded = gatherer.usage.orders[0] is not None
    if is_padded or not _lies_by_point(gatherer.dense.batches[0]):
        return gatherer
    dense, pruned = (
        replace(side, batches=[points_at(side.batches[0], first_and_last(side.batches[0].n_points))])
        for side in (gatherer.dense, gatherer.pruned)
    )
    return replace(gatherer, dense=dense, pruned=pruned)


def _lies_by_point(batch: Batch) -> bool:
    """Whether dimension 0 of the inputs can only be the points: in a time-first state they lie along the next one."""
    shapes = [tensor.shape for tensor in every_tensor((batch.args, batch.kwargs)) if tensor.is_floating_point()]
    return any(s[:1] == (batch.n_points,) for s in shapes) and not any(s[1:2] == (batch.n_points,) for s in shapes)


def _found_in(gatherer: Gatherer, residuals: Collection[str] | None, *, follows: bool) -> dict[str, ResidualLayer]:
    """The weights that correct a residual connection, as the first batch of the dense network shows them."""
    order = [name for group in gatherer.usage.order for name in group]
    dense = gatherer.dense
    outputs = find_residual_connections(dense.run, dense.layers, order, dense.batches[0], follows=follows)
    layers = residual_layers(gatherer, [name for name in outputs if residuals is None or name in residuals])
    return {name: layer for name, layer in layers.items() if _is_aligned(gatherer, layer, outputs[name])}


def residual_layers(gatherer: Gatherer, names: Collection[str]) -> dict[str, ResidualLayer]:
    """The weights of these names, with their modules in both networks."""
    return {
        weight.name: ResidualLayer(weight, dense.module, pruned.module)
        for dense, pruned in zip(gatherer.dense.layers, gatherer.pruned.layers)
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


def _is_aligned(gatherer: Gatherer, layer: ResidualLayer, output: Tensor) -> bool:
    """Whether a layer's output, cut into patches like a stream, equals the products of its weight there."""
    bias = bias_of(layer.dense)
    if bias is not None:
        output = output - along_rows(layer.dense, bias, output.ndim)
    found = _chunks(gatherer, layer.weight, layer.dense, output, 0)
    apart = replace(gatherer, dense_replay=Replay(is_off=True))  # later weights still need the replay
    wanted = apart.targets([layer.weight.name], 0)[0][layer.weight.name]
    if found is None or [chunk.shape for chunk in found] != [chunk.shape for chunk in wanted]:
        return False
    return all(bool((a - b).abs().max() <= SAME * b.abs().max()) for a, b in zip(found, wanted))


def _chunks(gatherer: Gatherer, weight: Weight, module: nn.Module, tensor: Tensor, i: int) -> list[Tensor] | None:
    """A tensor of the shape of the layer's output, cut into the chunks of patches of batch i: G x R x P each."""
    use = output_as_use(module, tensor, gatherer.pruned.batches[i])  # both networks have the same points
    if use is None:
        return None
    use = thinned(use, gatherer.usage.strides[weight.name], i)
    return [patches_of(windows, use.n_position_dims, None, SCORE_DTYPE) for windows in gatherer.chunks(weight, use)]


class LayerTargets:
    """The targets of some weights, batch by batch: dense outputs plus the current error of their streams (T21)."""

    def __init__(
        self,
        gatherer: Gatherer,
        corrected: Mapping[str, ResidualLayer],
        names: Sequence[str],
        fits: bool,
        known: DenseOutputs | None = None,
    ) -> None:
        """With `fits`, the dense outputs of all batches are kept; without, they are recomputed.

        `known` holds those that an earlier fit has kept.
        """
        self.gatherer, self.names = gatherer, names
        self.corrected = {name: corrected[name] for name in names if name in corrected}
        which = tuple(names), tuple(self.corrected)
        self.kept = None if known is None else known.targets.get(which)
        if fits and self.kept is None:
            self.kept = [self._dense(names, i) for i in range(len(gatherer.is_validation))]
            n_bytes = sum(gatherer.usage.target_bytes[name] for name in names)
            if known is not None and known.n_bytes + n_bytes <= target_bytes(device_of(gatherer.dense.model)):
                known.targets[which] = self.kept
                known.n_bytes += n_bytes
        if self.kept is not None:
            self.kept = [dict(targets) for targets in self.kept]  # `known` keeps its own

    def pop(self, names: Sequence[str]) -> LayerTargets:
        """Removes and returns the targets of these weights."""
        few = LayerTargets(self.gatherer, self.corrected, names, fits=False)
        if self.kept is not None:
            few.kept = [{name: targets.pop(name) for name in names} for targets in self.kept]
        return few

    def moments(self) -> dict[str, WeightMoments]:
        """The moments of these weights and their targets, with the current pruned network."""
        modules = {name: layer.pruned for name, layer in self.corrected.items()}

        def of_batch(i: int, streams: ResidualInputs) -> Targets:
            targets = self._dense(self.names, i) if self.kept is None else self.kept[i]
            targets = {name: list(targets[name]) for name in self.names}
            self._add_streams(targets, modules, streams, i, -1)
            return targets

        return self.gatherer.gather(self.names, of_batch, modules)

    def _dense(self, names: Sequence[str], i: int) -> Targets:
        """The outputs of the dense network, without bias, plus the streams they are added to."""
        modules = {name: self.corrected[name].dense for name in names if name in self.corrected}
        targets, streams = self.gatherer.targets(names, i, modules)
        self._add_streams(targets, modules, streams, i, 1)
        return targets

    def _add_streams(
        self, targets: Targets, modules: Mapping[str, nn.Module], streams: ResidualInputs, i: int, sign: int
    ) -> None:
        """Adds the streams, in units of the layers' outputs; drops targets whose stream has another shape."""
        for name, module in modules.items():
            before, chunks = targets[name], None
            if name in streams:
                mark, stream = streams[name]
                weight = self.corrected[name].weight
                chunks = _chunks(self.gatherer, weight, module, per_row(module, stream, mark.scale_F), i)
            is_same = chunks is not None and [c.shape for c in chunks] == [t.shape for t in before]
            targets[name] = [t + sign * c for t, c in zip(before, chunks or ())] if is_same else []
