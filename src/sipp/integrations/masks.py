"""Masks from a network that was pruned before, and masks as a checkpoint stores them: one bit a weight."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.inputs.layers.registry import find_prunable_layers
from sipp.records.options import Selector

Masks = Mapping[str, Tensor]  # {parameter name: bool tensor}, True = kept


def masks_from_zeros(
    model: nn.Module, *, include: Selector | None = None, exclude: Selector | None = None
) -> dict[str, Tensor]:
    """The masks of a pruned network, read from its zeros: {parameter name: where it is not zero}.

    Looked at are prunable weights (never biases, norms or embeddings) that hold zeros and other numbers; one that is
    all zero is left out, since a layer may begin like that.

    Example:
        >>> import sipp, torch
        >>> from sipp.integrations.masks import masks_from_zeros
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.25, method="wt")
        >>> masks = masks_from_zeros(pruned.model)
        >>> all(torch.equal(mask, masks[name]) for name, mask in pruned.masks.items())
        True
    """
    layers = find_prunable_layers(model, include=include, exclude=exclude)
    names = dict.fromkeys(weight.name for layer in layers for weight in layer.weights.values())
    found = {name: model.get_parameter(name).detach() != 0 for name in names}
    masks = {name: mask for name, mask in found.items() if bool(mask.any()) and not bool(mask.all())}
    if not masks:
        raise ModelError(
            "no prunable weight is partly zero: this network is not pruned",
            fix="give the masks, or prune it first (sipp.prune)",
        )
    return masks


def packed(masks: Masks) -> dict[str, Tensor]:
    """The masks with eight weights in a byte, on the CPU."""
    return {name: torch.from_numpy(np.packbits(mask.detach().cpu().numpy())) for name, mask in masks.items()}


def unpacked(bits: Masks, model: nn.Module) -> dict[str, Tensor]:
    """The masks that `packed` made for this model."""
    sizes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    wrong = [name for name, one in bits.items() if name not in sizes or len(one) != -(-sizes[name].numel() // 8)]
    if wrong:
        raise OptionError(f"the stored mask of {wrong[0]} is of another network", fix="resume the one it was made for")
    return {
        name: torch.from_numpy(np.unpackbits(one.numpy(), count=sizes[name].numel())).bool().reshape(sizes[name])
        for name, one in bits.items()
    }


def masks_to_hold(model: nn.Module, given: Masks | None, stored: Masks | None) -> dict[str, Tensor]:
    """The masks of a training that begins or goes on: those stored with it, else those given, else the zeros."""
    if stored is None:
        return masks_from_zeros(model) if given is None else dict(given)
    found = unpacked(stored, model)
    if given is not None and not _is_same(given, found):
        raise OptionError(
            "the checkpoint was trained with other masks than the ones given",
            fix="leave masks out to go on with those of the checkpoint, or start without it",
        )
    return found


def _is_same(given: Masks, found: Masks) -> bool:
    return given.keys() == found.keys() and all(torch.equal(mask.cpu(), found[name]) for name, mask in given.items())
