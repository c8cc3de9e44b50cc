"""Packs masks for checkpoints, one bit per weight, and says which masks a training run holds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from sipp.errors import OptionError
from sipp.pruning import masks_in

Masks = Mapping[str, Tensor]  # {parameter name: bool tensor}, True = kept


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
        return masks_in(model) if given is None else dict(given)
    masks = unpacked(stored, model)
    if given is not None and not _is_same(given, masks):
        raise OptionError(
            "the checkpoint was trained with other masks than the ones given",
            fix="leave them out to go on with those of the checkpoint, or start without it",
        )
    return masks


def _is_same(given: Masks, other: Masks) -> bool:
    return given.keys() == other.keys() and all(torch.equal(mask.cpu(), other[name]) for name, mask in given.items())
