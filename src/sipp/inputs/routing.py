"""Sees whether a model's way, or the sizes of what it computes, hang on the values of its data.

Then a few points do not show what other points do: which layers run, how often, and whose patches they get.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Routing(TorchDispatchMode):
    """A mode that notes operations whose results have a size, or are plain numbers, that follow from values.

    Python branches on nothing else of a tensor, but for `tolist` and `numpy`, which no dispatch shows (see `Watch`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_values = False
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for operations that are not the model's own."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused and not self.by_values and not _BY_VALUES.isdisjoint(func.tags):
            self.by_values = func is not torch.ops.aten.index.Tensor or _has_mask(args[1])
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Any) -> bool:
    """Whether one of the indices chooses by truth values: as many as are true."""
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
