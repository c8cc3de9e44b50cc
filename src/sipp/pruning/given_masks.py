"""The masks of whatever a caller has: a dict, a result of sipp, a network with zeros, or torch.nn.utils.prune."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import prune as torch_prune
from torch.nn.utils.prune import BasePruningMethod

from sipp.errors import ModelError, OptionError
from sipp.inputs import find_prunable_layers
from sipp.results import Gradual, NetworkLike, Pruned, PrunedTo, SavedFile, Shrunk, record_of

WithMasks = NetworkLike | Gradual | SavedFile | Mapping[str, Tensor]  # what `hold` takes its masks from


def masks_in(pruned: WithMasks) -> dict[str, Tensor]:
    """The masks of a result, by parameter name (True = kept); of a network, where its prunable weights are not zero."""
    if isinstance(pruned, Mapping):
        for name, mask in pruned.items():
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                raise OptionError(
                    f"the mask of {name!r} is not a bool tensor",
                    fix="give {parameter name: bool tensor}, True = kept",
                    option="pruned",
                )
        return dict(pruned)
    if isinstance(pruned, PrunedTo):
        pruned = record_of(pruned)
    if isinstance(pruned, Pruned | Gradual):
        return pruned.masks
    if isinstance(pruned, SavedFile):
        if not pruned.masks:
            raise OptionError(
                "the file contains no masks: a plain network was saved", fix="load it, and pass the network as `pruned`"
            )
        return pruned.masks
    model = pruned.model if isinstance(pruned, Shrunk) else pruned
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"pruned is a {type(pruned).__name__}, not a pruned network",
            fix="give the result of sipp.prune, a network with zeros, or {parameter name: bool tensor}",
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
            fix="give the result of sipp.prune",
        )
    return masks


# --- masks of torch.nn.utils.prune ------------------------------------------------------------------------------------


def fold_torch_masks(model: nn.Module) -> None:
    """Turns NAME_orig and NAME_mask back into the parameter NAME, with plain zeros where the mask is 0.

    torch's own `remove` leaves -0.0 for negative weights, which costs space in a file. Modules that share a parameter
    still share it.
    """
    masked = [
        (module, hook._tensor_name)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod)
    ]
    masks: dict[Parameter, Tensor] = {}
    unmasked = {one for module in model.modules() for name, one in module._parameters.items() if name[-5:] != "_orig"}
    for module, local in masked:
        original, mask = getattr(module, f"{local}_orig"), getattr(module, f"{local}_mask")
        if original in unmasked or not torch.equal(mask, masks.setdefault(original, mask)):
            raise ModelError(
                f"{local} of {type(module).__name__} is shared between modules with different masks",
                fix="give all of them one mask: torch.nn.utils.prune.custom_from_mask",
            )
    for module, local in masked:
        is_kept = getattr(module, f"{local}_mask") != 0
        torch_prune.remove(module, local)
        with torch.no_grad():
            getattr(module, local).masked_fill_(~is_kept, 0)
        _restore_order(module)


def _restore_order(module: nn.Module) -> None:
    """Restores the order of parameters (weights before biases, or as a recurrent layer lists them)."""
    place = {local: i for i, local in enumerate(getattr(module, "_flat_weights_names", ()))}
    ordered = sorted(module._parameters.items(), key=lambda item: (place.get(item[0], len(place)), "bias" in item[0]))
    module._parameters.clear()
    module._parameters.update(ordered)
