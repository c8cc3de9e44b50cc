"""Reads masks from the zeros of a network, and packs them for checkpoints, one bit per weight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.inputs.layers.registry import find_prunable_layers
from sipp.results.options import Selector

Masks = Mapping[str, Tensor]  # {parameter name: bool tensor}, True = kept


def masks_from_zeros(
    model: nn.Module, *, include: Selector | None = None, exclude: Selector | None = None
) -> dict[str, Tensor]:
    """Returns the masks of a pruned network, read from its zeros: {parameter name: where it is not zero}.

    Only prunable weights that are partly zero count, never biases, norms or embeddings. A weight that is all zero is
    left out, because some layers are initialised like that.

    Example:
        >>> import sipp, torch
        >>> from sipp.integrations.masks import masks_from_zeros
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.25, method="magnitude")
        >>> masks = masks_from_zeros(pruned.model)
        >>> all(torch.equal(mask, masks[name]) for name, mask in pruned.masks.items())
        True
    """
    layers = find_prunable_layers(model, include=include, exclude=exclude)
    names = dict.fromkeys(weight.name for layer in layers for weight in layer.weights.values())
    nonzero = {name: model.get_parameter(name).detach() != 0 for name in names}
    masks = {name: mask for name, mask in nonzero.items() if bool(mask.any()) and not bool(mask.all())}
    if not masks:
        raise ModelError(
            "no prunable weight is partly zero: this network is not pruned",
            fix="give the masks, or prune it first (sipp.prune)",
        )
    return masks


def packed(masks: Masks) -> dict[str, Tensor]:
    """The masks with eight weights per byte, on the CPU."""
    return {name: torch.from_numpy(np.packbits(mask.detach().cpu().numpy())) for name, mask in masks.items()}


def unpacked(bits: Masks, model: nn.Module) -> dict[str, Tensor]:
    """The inverse of `packed` for this model."""
    sizes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    wrong = [
        name
        for name, packed_mask in bits.items()
        if name not in sizes or len(packed_mask) != -(-sizes[name].numel() // 8)
    ]
    if wrong:
        raise OptionError(f"the stored mask of {wrong[0]} is of another network", fix="resume the one it was made for")
    return {
        name: torch.from_numpy(np.unpackbits(packed_mask.numpy(), count=sizes[name].numel()))
        .bool()
        .reshape(sizes[name])
        for name, packed_mask in bits.items()
    }


def masks_to_hold(model: nn.Module, given: Masks | None, stored: Masks | None) -> dict[str, Tensor]:
    """The masks for a training run: those of its checkpoint, else those given, else the zeros of the model."""
    if stored is None:
        return masks_from_zeros(model) if given is None else dict(given)
    masks = unpacked(stored, model)
    if given is not None and not _is_same(given, masks):
        raise OptionError(
            "the checkpoint was trained with other masks than the ones given",
            fix="leave masks out to go on with those of the checkpoint, or start without it",
        )
    return masks


def _is_same(given: Masks, other: Masks) -> bool:
    return given.keys() == other.keys() and all(torch.equal(mask.cpu(), other[name]) for name, mask in given.items())
