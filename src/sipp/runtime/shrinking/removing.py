"""Removes what a network does not need: which channels stay, how constant ones are replaced, and the same outputs.

A channel is needed if a needed row reads it through a nonzero weight. Constant channels can be replaced: their
contribution to a row, weight times constant, is added to the row's bias; or, with zero padding or without a bias, to
the weight of one other constant channel of the same layer, the `stand_in`. Everything else goes, except one channel
where a layer would be empty. Channels that were chosen are no other case: nothing reads them any more.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sipp.errors import ModelError, SippError
from sipp.inputs import ONE_AT_A_TIME, Batch, run_batch, scoring_mode
from sipp.native import pytree
from sipp.results import ChannelsLeft, ShrunkLayer, numerics
from sipp.runtime.counting import count_both
from sipp.runtime.examples import Call, cloned, output_difference, rounding_of, rounding_tolerance
from sipp.runtime.shrinking.configuration import match_configuration
from sipp.runtime.shrinking.dependencies import ALWAYS, Channels, Product, channels_in, reads_of
from sipp.runtime.shrinking.traced import Traced


@dataclass(frozen=True)
class ReadingLayer:
    """A weight with all its uses, and which of its input channels can be replaced."""

    product: Product  # the first use
    reads: Tensor  # O x I
    constant: Tensor  # I, if the same in all uses; NaN: not constant
    stand_in: int | None  # the channel that replaces other constants; None: they go into the bias
    gives_way: Tensor  # I, channels that can be replaced even if they are read


@dataclass(frozen=True)
class ShrinkPlan:
    """Which indices of every parameter and buffer stay, by name and dimension, and how constants are replaced."""

    stays: dict[tuple[str, int], Tensor]  # indices
    layers: tuple[ReadingLayer, ...]
    is_needed: tuple[Tensor, ...]  # for each layer, whether each input channel is needed
    depthwise: frozenset[str]


# --- What stays -------------------------------------------------------------------------------------------------------


def plan_shrinking(channels: Channels) -> ShrinkPlan:
    """Decides which channels stay."""
    class_of = channels.classes
    layers = _layers(channels)
    inside = [class_of[layer.product.ids] for layer in layers]
    outside = [class_of[layer.product.out_ids] for layer in layers]
    needed = torch.zeros(int(class_of.max()) + 1, dtype=torch.bool, device="cpu")
    needed[class_of[ALWAYS]] = True
    n_needed = 0
    while n_needed < int(needed.sum()):
        n_needed = int(needed.sum())
        for layer, reads, gives in zip(reversed(layers), reversed(inside), reversed(outside)):
            is_read = layer.reads[needed[gives]].any(0)
            wanted = is_read & ~layer.gives_way
            if layer.stand_in is not None:
                wanted[layer.stand_in] |= bool((is_read & layer.gives_way & (layer.constant != 0)).any())
            needed[reads[wanted]] = True
    kept, sides = needed.clone(), {key: class_of[ids] for key, ids in channels.sides.items()}
    for side in sides.values():
        if len(side) and not bool(kept[side].any()):
            kept[side[0]] = True
    stays = {key: kept[side].nonzero().flatten() for key, side in sides.items()}
    return ShrinkPlan(stays, tuple(layers), tuple(needed[side] for side in inside), frozenset(channels.depthwise))


def _layers(channels: Channels) -> list[ReadingLayer]:
    """All weights that read channels, in order of first use."""
    uses: dict[str, list[Product]] = {}
    for product in channels.products:
        uses.setdefault(product.weight, []).append(product)
    return [_layer(channels, calls) for calls in uses.values()]


def _layer(channels: Channels, calls: list[Product]) -> ReadingLayer:
    first, n_reads = calls[0], channels.n_reads
    constant = first.constant.clone()
    for other in calls[1:]:
        constant[constant != other.constant] = torch.nan
    is_constant = ~constant.isnan()
    has_bias = len({call.bias for call in calls}) == 1 and first.bias is not None and n_reads[first.bias] == len(calls)
    stand_in = None
    if any(call.pads for call in calls) or not has_bias:
        others = is_constant & (constant != 0)
        if n_reads[first.weight] > len(calls):  # something else reads the weight
            is_constant &= constant == 0
        elif bool(others.any()):
            stand_in = int(torch.where(others, constant.abs(), 0.0).argmax())
    return ReadingLayer(first, reads_of(channels.tensors[first.weight]), constant, stand_in, is_constant)


# --- The smaller network ----------------------------------------------------------------------------------------------


def apply(model: nn.Module, plan: ShrinkPlan) -> None:
    """Shrinks the network in place; its modules get new parameters."""
    tensors = numerics.parameters_and_buffers(model)
    new = {name: tensors[name].detach() for name, _ in plan.stays}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for local, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, local))
    for layer, is_needed in zip(plan.layers, plan.is_needed):
        _fold_constants(layer, is_needed, new)
    for (name, dim), stays in plan.stays.items():
        new[name] = new[name].index_select(dim, stays.to(new[name].device))
    for name, values in new.items():
        old = tensors[name]
        if values.shape == old.shape and torch.equal(values, old):
            continue
        is_parameter, values = isinstance(old, nn.Parameter), values.contiguous()
        made = nn.Parameter(values, requires_grad=old.requires_grad) if is_parameter else values
        for module, local in owners[id(old)]:
            if name in plan.depthwise:
                module.groups = len(values) * module.groups // len(old)  # type: ignore[assignment, operator]
            (module._parameters if is_parameter else module._buffers)[local] = made  # type: ignore[assignment]
            _update_sizes(module)


def _fold_constants(layer: ReadingLayer, is_needed: Tensor, new: dict[str, Tensor]) -> None:
    """Moves the contribution of removed constant channels into the layer's bias, or into its stand-in channel."""
    product, constant = layer.product, layer.constant
    taken = layer.gives_way & (constant != 0) & ~is_needed & layer.reads.any(0)
    if not bool(taken.any()) or (layer.stand_in is not None and bool(taken[layer.stand_in])):
        return  # or no needed row reads any of them
    values = new[product.weight].double()
    if layer.stand_in is None:
        assert product.bias is not None
        sums = values.flatten(2).sum(2) if values.ndim > 2 else values
        bias = new[product.bias]
        more = sums[:, taken.to(sums.device)] @ constant[taken].to(sums.device)
        new[product.bias] = (bias.double() + more).to(bias.dtype)
    else:
        shares = torch.where(taken, constant / constant[layer.stand_in], 0.0).to(values.device)
        values[:, layer.stand_in] += torch.tensordot(shares, values, ([0], [1]))
    # Rows that stay without being needed now compute something else, so nothing may read these channels.
    values[:, taken.to(values.device)] = 0.0
    new[product.weight] = values.to(new[product.weight].dtype)


def _update_sizes(module: nn.Module) -> None:
    """Updates the module's size attributes (in_features and the like) to its tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd):
        module.out_channels, module.in_channels = len(module.weight), module.weight.shape[1] * module.groups
    elif isinstance(module, _NormBase):
        held = module.running_mean if module.weight is None else module.weight
        module.num_features = len(held) if held is not None else module.num_features
    elif isinstance(module, nn.Embedding):
        module.embedding_dim = module.weight.shape[1]
    elif isinstance(module, nn.PReLU):
        module.num_parameters = len(module.weight)


# --- The same outputs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithoutDead:
    """A network without its dead channels, which gives the same outputs."""

    model: nn.Module
    off_by: float  # the largest difference of an output on the example, relative to its largest value
    layers: tuple[ShrunkLayer, ...]
    multiply_adds_before: int
    multiply_adds: int
    left_alone: tuple[str, ...]  # operations that keep all channels they read


def without_dead_channels(own: nn.Module, call: Call, sites: Iterable[ChannelsLeft] | None = None) -> WithoutDead:
    """A copy without its dead channels; ModelError if it gives other outputs on the example.

    `sites` are where channels were chosen, whose widths a Hugging Face model's configuration takes over.
    """
    expected = outputs_of(own, call)
    if not any(isinstance(output, Tensor) for output in expected):
        raise ModelError("returns no tensor to compare", where=type(own).__name__, fix="let forward return one")
    channels, plan, program = checked_plan(own, call)
    small = copy.deepcopy(own)
    apply(small, plan)
    moved = output_difference(outputs_of(small, call), expected)
    if not moved <= rounding_tolerance(expected):
        raise differs(moved)
    if sites is not None:
        match_configuration(small, sites)
    return WithoutDead(small, moved, *count_both(program, own, small), tuple(channels.left_alone))


def checked_plan(
    own: nn.Module, call: Call, take_out: Callable[[Channels, nn.Module], None] | None = None
) -> tuple[Channels, ShrinkPlan, torch.export.ExportedProgram]:
    """Which channels stay, checked on the example in float64, where rounding hides nothing, and at other sizes.

    A forward pass may contain channel counts (`x.view(-1, 512)`) or compute with sizes (`x / x.shape[1]`), which no
    trace shows. If outputs differ with fewer channels, or at another batch, image or sequence size, more are kept.
    `take_out` may first write zeros into a copy of the network, in place of channels that could be chosen to go.
    """
    precise = _float64_copy(own, call)
    net, points, expected = (own, call, outputs_of(own, call)) if precise is None else precise
    with ONE_AT_A_TIME:  # torch.export replaces functions of Python while it works
        traced = Traced.of(net, [points])
    modules, tensors = dict(net.named_modules(remove_duplicate=False)), numerics.parameters_and_buffers(net)
    if precise is None:
        most = rounding_tolerance(expected)
    else:
        most = rounding_of(node.meta.get("val") for node in traced.nodes)
    for knows_constants, follows_views in itertools.product((True, False), repeat=2):
        known = {"follows_views": follows_views, "knows_constants": knows_constants}
        channels = channels_in(traced, tensors, modules, **known)
        given = net
        if take_out is not None:
            given = copy.deepcopy(net)
            take_out(channels, given)
            channels.tensors = numerics.parameters_and_buffers(given)
        plan = plan_shrinking(channels)
        small = copy.deepcopy(given)
        apply(small, plan)
        moved = torch.inf
        with suppress(SippError):  # it does not run
            wanted = [(points, outputs_of(given, points)), *_other_sizes(given, points)]
            moved = max(output_difference(outputs_of(small, inputs), outputs) for inputs, outputs in wanted)
        if moved <= most:
            return channels, plan, traced.program
    raise differs(moved)


def outputs_of(model: nn.Module, call: Call) -> list[Any]:
    """All outputs for the example, in eval mode and with a fixed seed; buffers that the pass changes are restored."""
    args, kwargs = cloned(call)
    batch = Batch(index=0, where="the example", args=args, kwargs=kwargs, labels=None, n_points=1)
    with torch.random.fork_rng(), scoring_mode(model, "running"):
        torch.manual_seed(0)
        return list(pytree.tree_leaves(run_batch(model, batch)))


def _float64_copy(model: nn.Module, call: Call) -> tuple[nn.Module, Call, list[Any]] | None:
    """A float64 copy of the network, with example and outputs; None if it does not run in float64."""
    try:
        precise = copy.deepcopy(model).double()
        wide = pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, call)
        return precise, wide, outputs_of(precise, wide)
    except (SippError, RuntimeError, TypeError):
        return None


def _other_sizes(model: nn.Module, call: Call) -> list[tuple[Call, list[Any]]]:
    """The example at other sizes that the network accepts, and its outputs: each size halved, 1 doubled.

    Those of the first dimension change together, and those that are the same: height and width; the length of a
    sequence and of its mask.
    """
    leaves, spec = pytree.tree_flatten(call)
    found = []
    for size in (None, *sorted({size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape})):
        inputs: Call = pytree.tree_unflatten([_resized(leaf, size) for leaf in leaves], spec)
        with suppress(SippError):
            found.append((inputs, outputs_of(model, inputs)))
    return found


def _resized(leaf: Any, size: int | None) -> Any:
    """A tensor whose dimensions of this size, or the first one, are halved, or doubled if they are 1."""
    for dim, n in enumerate(leaf.shape if isinstance(leaf, Tensor) else ()):
        if n == size or (size is None and dim == 0):
            leaf = torch.cat((leaf, leaf), dim) if n == 1 else leaf.narrow(dim, 0, (n + 1) // 2)
    return leaf


def differs(moved: float) -> ModelError:
    how = (
        "does not run, or returns other shapes or other plain numbers,"
        if moved == torch.inf
        else f"differs by {moved:.1e}"
    )
    return ModelError(
        f"the smaller network {how} on the example or at other sizes of it, so it is not returned",
        fix="make sure that forward uses no fixed channel counts and nothing random, returns finite numbers, and takes "
        "the same layers at every size",
    )
