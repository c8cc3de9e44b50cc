"""The masks that a training run keeps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sipp.errors import OptionError
from sipp.pruning import masks_in

Masks = Mapping[str, Tensor]  # {parameter name: bool tensor}, True = kept


def masks_to_hold(model: nn.Module, given: Masks | None, stored: Masks | None) -> dict[str, Tensor]:
    """The masks of the checkpoint, else those given, else the zeros of the model."""
    if stored is None:
        return masks_in(model if given is None else given)
    if given is not None and not _is_same(given, stored):
        raise OptionError(
            "the checkpoint was trained with other masks than the ones given",
            fix="leave them out to continue with those of the checkpoint, or start without it",
        )
    return dict(stored)


def _is_same(given: Masks, other: Masks) -> bool:
    return given.keys() == other.keys() and all(
        torch.equal(mask.cpu(), other[name].cpu()) for name, mask in given.items()
    )
