"""Ranks in place of scores, for scores of both signs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sipp.results import numerics


def ordinals(layers: Sequence[Tensor]) -> list[Tensor]:
    """The dense rank of each value among all layers: 0, 1, 2, ...; equal values have equal ranks.

    Exact, whereas a shift by the smallest value would round away differences between small ones.
    """
    if not layers:
        return []
    _, place = torch.unique(torch.cat([layer.flatten() for layer in layers]), return_inverse=True)
    parts = place.to(numerics.BOUND_DTYPE).split([layer.numel() for layer in layers])
    return [part.view(layer.shape) for part, layer in zip(parts, layers)]
