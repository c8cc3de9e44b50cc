"""The masks of whatever a caller has: a result of sipp, a network with zeros, or masks of torch.nn.utils.prune."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils.prune import BasePruningMethod

from sipp.errors import ModelError, OptionError
from sipp.inputs import find_prunable_layers
from sipp.results import Gradual, NetworkLike, Pruned, PrunedTo, SavedFile, Shrunk, record_of

WithMasks = NetworkLike | Gradual | SavedFile  # what `hold` takes its masks from


def masks_in(pruned: WithMasks) -> dict[str, Tensor]:
    """The masks of a result, by parameter name (True = kept); of a network, where its prunable weights are not zero."""
    if isinstance(pruned, PrunedTo):
        pruned = record_of(pruned)
    if isinstance(pruned, Pruned | Gradual):
        return pruned.masks
    if isinstance(pruned, SavedFile):
        if not pruned.masks:
            raise OptionError(
                "the file holds no masks: a plain network was saved", fix="load it, and pass the network as `pruned`"
            )
        return pruned.masks
    model = pruned.model if isinstance(pruned, Shrunk) else pruned
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"pruned is a {type(pruned).__name__}, not a pruned network",
            fix="give what sipp.prune returned, or a network with zeros; for masks of your own, what "
            "sipp.assess(model, masks, data) returns",
            option="pruned",
        )
    return _masks_from_zeros(model)


def _masks_from_zeros(model: nn.Module) -> dict[str, Tensor]:
    """Where prunable weights that are partly zero are not zero.

    A weight that is all zero is left out, because some layers are initialised like that.
    """
    names = dict.fromkeys(w.name for layer in find_prunable_layers(model) for w in layer.weights.values())
    nonzero = {name: model.get_parameter(name).detach() != 0 for name in names}
    masks = {name: mask for name, mask in nonzero.items() if bool(mask.any()) and not bool(mask.all())}
    if not masks:
        raise ModelError(
            "no prunable weight is partly zero: this network is not pruned",
            fix="give what sipp.prune returned",
        )
    return masks


# --- masks of torch.nn.utils.prune ------------------------------------------------------------------------------------


def masked_by_torch(model: nn.Module) -> list[str]:
    """The names of the parameters that torch.nn.utils.prune has replaced by NAME_orig and NAME_mask."""
    return [f"{path}.{local}" if path else local for path, _, _, local in _masked(model)]


def masked_values(original: Tensor, mask: Tensor) -> Tensor:
    """NAME_orig times NAME_mask, as torch computes it, but with plain zeros where the mask is 0.

    torch's product leaves -0.0 for a negative weight, which costs space in a file, and NaN for one that is not finite.
    """
    return (mask.to(original.dtype) * original.detach() + 0.0).masked_fill(mask == 0, 0)


def fold_torch_masks(model: nn.Module) -> None:
    """Turns NAME_orig and NAME_mask back into the parameter NAME, with zeros where the mask is 0.

    Modules that share a parameter and a mask still share it afterwards. If their masks differ, or one module has none,
    each gets its own tensor, and one of them keeps the shared parameter; torch's `remove` would mix them up.
    """
    n_owners = Counter(candidate for module in model.modules() for candidate in module._parameters.values())
    users: dict[Parameter, list[tuple[nn.Module, int, str]]] = {}
    for _, module, key, local in _masked(model):
        users.setdefault(getattr(module, f"{local}_orig"), []).append((module, key, local))
    for original, masked in users.items():
        folded: list[tuple[Parameter, Tensor]] = []  # each with its mask
        for module, key, local in masked:
            mask = getattr(module, f"{local}_mask").to(original.dtype)
            parameter = next((candidate for candidate, other in folded if torch.equal(other, mask)), None)
            if parameter is None:
                is_free = not folded and n_owners[original] == len(masked)
                parameter = original if is_free else Parameter(masked_values(original, mask), original.requires_grad)
                folded.append((parameter, mask))
            del module._forward_pre_hooks[key], module._parameters[f"{local}_orig"], module._buffers[f"{local}_mask"]
            vars(module).pop(local, None)
            setattr(module, local, parameter)
        first, mask = folded[0]
        if first is original:  # written last, since all others are computed from it
            original.data.copy_(masked_values(original, mask))
    for module in {module for masked in users.values() for module, _, _ in masked}:
        _restore_order(module)


def _restore_order(module: nn.Module) -> None:
    """Restores the order of parameters (weights before biases, or as a recurrent layer lists them)."""
    place = {local: i for i, local in enumerate(getattr(module, "_flat_weights_names", ()))}
    ordered = sorted(module._parameters.items(), key=lambda item: (place.get(item[0], len(place)), "bias" in item[0]))
    module._parameters.clear()
    module._parameters.update(ordered)


def _masked(model: nn.Module) -> Iterator[tuple[str, nn.Module, int, str]]:
    """Path, module, hook key and local name of every masked parameter."""
    for path, module in model.named_modules():
        for key, hook in module._forward_pre_hooks.items():
            if isinstance(hook, BasePruningMethod):
                yield path, module, key, hook._tensor_name
