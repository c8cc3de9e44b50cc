"""`shrink`: removes dead channels, or whole channels down to a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs import ONE_AT_A_TIME, data_of, find_prunable_layers, turn_off_caches, unscored_layers
from sipp.native import pytree
from sipp.results import (
    NetworkLike,
    PrunedTo,
    Selector,
    Shrunk,
    hashing,
    inputs_seen,
    network_of,
    numerics,
    other_names,
)
from sipp.runtime import (
    ChannelOptions,
    call_of,
    choose_channels,
    plain_copy,
    without_dead_channels,
)
from sipp.verbs.assess import assess

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

N_BOUND_POINTS = 256  # inputs that the bounds of layers are computed on: the theory asks for fewer
ROUNDING = 1e-9  # of the share that is asked for


@other_names.explain_unknown_options
@torch.inference_mode(False)
def shrink(
    model: NetworkLike,
    data: Any,
    *,
    multiply_adds: float | None = None,
    weights: float | None = None,
    uniform: bool = False,
    multiple_of: int = 1,
    repair: bool = True,
    steps: int = 0,
    exclude: Selector | nn.Module | Sequence[str | type | nn.Module] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Shrunk:
    """Makes a smaller dense network: without its dead channels, or with as few channels as a budget asks for.

    `model` is a network, or what `prune` or `prune_to` returned; it is left as it was. Without a budget, channels go
    that are dead or that no layer reads, and the outputs stay the same. `data` is then an example as for `sparse`.
    Channels that cannot be removed safely stay, and the record names them. Outputs are compared before anything is
    returned: on the example, and at other sizes.

    With `multiply_adds=0.5` (or `weights=0.5`: of all parameters) the network keeps half of them, and `data` are
    calibration inputs as for `prune`; labels are not used. Channels go that only one layer reads, those first that this
    layer can do without, and every layer gets new weights by least squares, so that it gives what the dense network
    has there; `repair=False` leaves that out. `steps` of Adam then bring the outputs closer to the dense ones.
    `uniform=True` takes the same share of every layer, which a Hugging Face model needs, because its configuration has
    one width for all layers; it is set to the new one, and as many heads stay as it accepts. `multiple_of=8` leaves
    multiples of eight channels, and layers in `exclude` (as in `prune`, or modules) keep all their inputs and outputs.
    One input in ten is held back, to stop Adam and to measure the error. All inputs are held in memory.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> small = sipp.shrink(net, torch.rand(500, 64), multiply_adds=0.5)
        >>> small.model[0].weight.shape
        torch.Size([128, 64])
        >>> pruned = sipp.prune(net, None, keep=0.02, method="magnitude")
        >>> small = sipp.shrink(pruned, torch.rand(4, 64))  # no budget: the same outputs
        >>> torch.allclose(small.model(torch.ones(1, 64)), pruned.model(torch.ones(1, 64)), atol=1e-5)
        True
    """
    network = network_of(model)
    options = ChannelOptions(
        multiply_adds=multiply_adds, weights=weights, uniform=uniform, multiple_of=multiple_of, repair=repair,
        steps=steps, exclude=_by_name(network, exclude), seed=seed, progress=progress,
    )  # fmt: skip
    with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
        own = plain_copy(network)
        was_training = {name: module.training for name, module in network.named_modules()}
    cached = {name for name, module in own.named_modules() if _has_cache(module)}
    turn_off_caches(own.modules())  # torch.export knows no cache among the outputs
    chosen, seen = None, inputs_seen(model)
    if not options.has_budget:
        call = _on_device(own, call_of(data))
    else:
        smaller = choose_channels(own, data, options)
        n_points = min(N_BOUND_POINTS, smaller.chosen.n_fit)
        scored = data_of([batch.as_given for batch in smaller.split.fit], n_points=n_points)
        bounds = assess(own, smaller.model, scored, exclude=unscored_layers(own), progress=progress)
        chosen = replace(smaller.chosen, layers=bounds.layers, guarantee=bounds.guarantee)
        own, call = smaller.model, smaller.call
        # Of a plain network, all is known: there was no pruning before this one.
        seen = smaller.split.seen if isinstance(model, nn.Module) else seen | smaller.split.seen
    found = without_dead_channels(own, call, None if chosen is None else chosen.sites)
    small = found.model
    for name, module in small.named_modules():
        module.training = was_training.get(name, module.training)
        if name in cached:
            vars(module)["config"].use_cache = True
    before = hashing.of_model(network)
    certificate = model.certificate if isinstance(model, PrunedTo) and chosen is None else None
    result = Shrunk(
        model=small,
        layers=found.layers,
        n_parameters_before=sum(parameter.numel() for parameter in own.parameters()),
        n_parameters=sum(parameter.numel() for parameter in small.parameters()),
        multiply_adds_before=found.multiply_adds_before,
        multiply_adds=found.multiply_adds,
        example=_described(call),
        off_by=found.off_by,
        left_alone=found.left_alone,
        hash_before=before,
        described_hash=hashing.of_model(small),
        certificate=certificate if certificate is not None and certificate.pruned_hash == before else None,
        seen=seen,
        chosen=chosen,
    )
    _check_budget(result)
    return result


def _by_name(network: nn.Module, exclude: Any) -> Any:
    """The excluded layers by name: a copy of the network has other modules."""
    if isinstance(exclude, nn.Module):
        return _layers_in(network, exclude)
    if not isinstance(exclude, list | tuple):
        return exclude
    return [name for one in exclude for name in (_layers_in(network, one) if isinstance(one, nn.Module) else [one])]


def _layers_in(network: nn.Module, module: nn.Module) -> list[str]:
    """The names of the prunable layers of a network that are in this module of it."""
    layers, parts = find_prunable_layers(network, include="*"), set(module.modules())
    names = [layer.module_name for layer in layers if layer.module in parts]
    if not names:
        what = f"exclude= contains a {type(module).__name__} without a layer of this network"
        raise OptionError(what, fix="give modules of the network that is shrunk", option="exclude")
    return names


def _check_budget(small: Shrunk) -> None:
    """Raises if channels that were chosen are still there."""
    chosen = small.chosen
    if chosen is not None:
        before, after = small.multiply_adds_before, small.multiply_adds
        if chosen.of == "parameters":
            before, after = small.n_parameters_before, small.n_parameters
        if after > (1 + ROUNDING) * chosen.share * before:
            raise ModelError(
                f"the smaller network keeps {after / before:.4g} of the {chosen.of}, more than {chosen.share:.4g}",
                where=type(small.model).__name__,
                fix="its forward pass may need all channels of a layer: ask for less, or change the layer's code",
            )


def _has_cache(module: nn.Module) -> bool:
    return getattr(vars(module).get("config"), "use_cache", None) is True


def _on_device(model: nn.Module, call: Arguments) -> Arguments:
    device = numerics.device_of(model) if any(True for _ in model.parameters()) else torch.device("cpu")
    for value in pytree.tree_leaves(call):
        if isinstance(value, Tensor) and value.is_meta:
            raise DataError("the example contains a tensor without values", fix="give one that is not on meta")
    moved: Arguments = pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, call)
    return moved


def _described(call: Arguments) -> str:
    tensors = [value for value in pytree.tree_leaves(call) if isinstance(value, Tensor)]
    return "an input of " + " and ".join(" x ".join(map(str, tensor.shape)) for tensor in tensors)
