"""The true error between two models, sample by sample, and modules that lay an error where a test wants it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def true_errors(dense: nn.Module, pruned: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The true error of each sample and the size of what was subtracted."""
    with torch.no_grad():
        outputs = [copy.deepcopy(model).eval().double()(x.double().clone()) for model in (dense, pruned)]
    f, g = (output.reshape(len(x), -1) for output in outputs)
    return (g - f).norm(dim=1), f.norm(dim=1) + g.norm(dim=1)


MEASURED = 1e-12  # the true error is itself measured in float64; a bound speaks of exact arithmetic


def covers(dense: nn.Module, pruned: nn.Module, x: Tensor, bound: Any) -> bool:
    """Whether a bound of the graph is at least the true error for every sample."""
    assert bound.reason == ""
    true_B, size_B = true_errors(dense, pruned, x)
    return bool((bound.absolute_B + MEASURED * size_B >= true_B).all())


class Shifted(nn.Module):
    """Adds a shift, which pruning changes, and then runs `body`: the error reaches it exactly as wanted."""

    def __init__(self, shift: Tensor, body: nn.Module) -> None:
        super().__init__()
        self.shift = nn.Parameter(shift)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + self.shift)


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
