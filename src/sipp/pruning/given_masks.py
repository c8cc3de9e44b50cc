"""The masks of whatever a caller has: a result of sipp, or a network whose zeros are its masks."""

from __future__ import annotations

from torch import Tensor, nn

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
