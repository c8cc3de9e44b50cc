"""Numbers that tests draw."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.inputs import data_of


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values, by a generator of their own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scored_and_held_back(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The parts of inputs, or of inputs and their labels, that a blend scores and that it is chosen on."""
    parts = (next(part.batches()) for part in data_of([tensors]).hold_back())
    scored, held_back = ([*part.args, *([] if part.labels is None else [part.labels])] for part in parts)
    return scored, held_back
