"""Where a model's weights wait for the next compilation: kept values and one bit for each weight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

MOST_KEPT = 0.9  # of a parameter: with more, it stays as it is


@dataclass(frozen=True)
class Shelved:
    """A parameter without its zeros."""

    shape: torch.Size
    values: Tensor
    bits: np.ndarray

    @property
    def n_bytes(self) -> int:
        return int(self.values.nbytes + self.bits.nbytes)


def shelve(model: nn.Module, held: set[int]) -> dict[str, Shelved]:
    """Empties the parameters that have zeros to leave out (-0.0 too), and gives what they were, by name.

    But not those whose memory is `held` by others (addresses): it would not get less.
    """
    shelf = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if weight.untyped_storage().data_ptr() in held:
            continue
        is_kept = weight != 0
        if weight.numel() and float(is_kept.sum()) <= MOST_KEPT * weight.numel():
            bits = np.packbits(is_kept.flatten().numpy())
            shelf[name] = Shelved(weight.shape, weight[is_kept].clone(), bits)
    for name, parameter in model.named_parameters():
        if name in shelf:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device="cpu")
    return shelf


def restore(model: nn.Module, shelf: dict[str, Shelved]) -> None:
    """Puts the parameters back as they were, and empties the shelf."""
    for name, parameter in model.named_parameters():
        if name in shelf:
            kept = shelf[name]
            is_kept = torch.from_numpy(np.unpackbits(kept.bits, count=kept.shape.numel()).astype(bool))
            weight = torch.zeros(kept.shape, dtype=kept.values.dtype, device="cpu")
            weight.view(-1)[is_kept] = kept.values
            parameter.data = weight
            del shelf[name]  # not before: memory may end
