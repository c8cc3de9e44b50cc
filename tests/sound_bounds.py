"""The bounds of T13 for a batch of inputs, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from sipp.bounds.rules import NoBound
from sipp.bounds.sound import error_bounds, relative
from sipp.inputs.data import as_batch


@dataclass(frozen=True)
class SoundBound:
    """Bounds on ||f^(x) - f(x)|| and on its share of ||f(x)||, input by input; None if there is a reason."""

    absolute_B: Tensor | None
    epsilon_B: Tensor | None
    reason: str

    @property
    def epsilon(self) -> float | None:
        return None if self.epsilon_B is None else float(self.epsilon_B.max())


def sound_bound(
    dense: nn.Module, pruned: nn.Module, inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor]
) -> SoundBound:
    try:
        error_B, size_B = error_bounds(dense, pruned, as_batch((inputs, None), 0, "inputs"))
    except NoBound as why:
        return SoundBound(None, None, str(why))
    return SoundBound(error_B, relative(error_B, size_B), "")
