"""Each operation by itself: its factor is a bound, and it is reached."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles.dense_map import worst_direction
from oracles.true_error import Apply, Shifted, true_errors
from sound_bounds import sound_bound
from torch import Tensor, nn


@dataclass(frozen=True)
class Probe:
    """A map and an error (a direction at a base point) that it stretches as much as it can; perhaps a changed map."""

    body: nn.Module
    shape: tuple[int, ...]
    base: Tensor
    direction: Tensor
    tight: float = 1e-4
    changed: nn.Module | None = None

    def outcome(self) -> tuple[float, float]:
        """The true error after the map and its bound."""
        dense = Shifted(self.base, self.body)
        pruned = Shifted(self.base + self.direction, copy.deepcopy(self.changed or self.body))
        x = torch.zeros(2, *self.shape, dtype=torch.float64)
        bound = sound_bound(dense, pruned, x)
        if "changes more than its operations allow" in bound.reason:
            return math.inf, 0.0  # the bound is below the true error
        assert bound.reason == ""
        return float(true_errors(dense, pruned, x)[0].max()), float(bound.absolute_B.max())


def _linear_probe(body: nn.Module, shape: tuple[int, ...]) -> Probe:
    body = body.double().eval()
    with torch.no_grad():
        direction = worst_direction(lambda x: body(x) - body(torch.zeros_like(x)), shape)
    return Probe(body, shape, torch.zeros(shape, dtype=torch.float64), direction)


def _slope_probe(body: nn.Module, at: float, step: float = 1e-4) -> Probe:
    return Probe(
        body.double(),
        (3,),
        torch.full((3,), at, dtype=torch.float64),
        torch.full((3,), step, dtype=torch.float64),
    )


def _pixel_probe(body: nn.Module, shape: tuple[int, ...], pixel: tuple[int, ...]) -> Probe:
    direction = torch.zeros(shape, dtype=torch.float64)
    direction[pixel] = 1.0
    return Probe(body, shape, torch.zeros(shape, dtype=torch.float64), direction)


def _ones_conv(*args: Any, **kwargs: Any) -> nn.Module:
    conv = nn.Conv2d(*args, bias=False, **kwargs)
    nn.init.ones_(conv.weight)
    return conv


def _batch_norm(n_channels: int, kind: type[nn.Module] = nn.BatchNorm2d) -> nn.Module:
    norm = kind(n_channels)
    generator = torch.Generator().manual_seed(3)
    norm.weight.data = torch.randn(n_channels, generator=generator) * 3
    norm.running_var.copy_(torch.rand(n_channels, generator=generator) + 0.1)
    return norm


def _twice(x: Tensor) -> Tensor:
    return x + x


PROBES: dict[str, Callable[[], Probe]] = {
    "linear": lambda: _linear_probe(nn.Linear(5, 4), (5,)),
    "conv": lambda: _linear_probe(nn.Conv2d(2, 3, 2, stride=2), (2, 4, 4)),
    "conv padded": lambda: replace(_linear_probe(_ones_conv(1, 1, 3, padding=1), (1, 8, 8)), tight=0.1),
    "conv groups": lambda: _linear_probe(nn.Conv2d(4, 4, 2, stride=2, groups=2), (4, 4, 4)),
    "batch norm": lambda: _linear_probe(_batch_norm(3), (3, 2, 2)),
    "conv and batch norm": lambda: replace(
        _linear_probe(nn.Sequential(nn.Conv2d(2, 3, 1), _batch_norm(3)), (2, 2, 2)), tight=10.0
    ),
    "positions and batch norm": lambda: replace(
        _linear_probe(nn.Sequential(nn.Linear(3, 4), _batch_norm(4, nn.BatchNorm1d)), (4, 3)), tight=10.0
    ),
    "average pool": lambda: _linear_probe(nn.AvgPool2d(3, 2, padding=1), (1, 6, 6)),
    "max pool": lambda: _pixel_probe(nn.MaxPool2d(3, 2), (1, 9, 9), (0, 4, 4)),
    "add": lambda: _linear_probe(Apply(_twice), (3,)),
    "add broadcast": lambda: _linear_probe(Apply(lambda x: x + x.mean(1, keepdim=True)), (3,)),
    "sub": lambda: _linear_probe(Apply(lambda x: x - (-1) * x), (3,)),
    "cat": lambda: _linear_probe(Apply(lambda x: torch.cat([x, x, x], 1)), (3,)),
    "mul": lambda: _linear_probe(Apply(lambda x: 3 * x), (3,)),
    "div": lambda: _linear_probe(Apply(lambda x: x / 0.25), (3,)),
    "mean": lambda: _linear_probe(Apply(lambda x: x.mean(dim=-1)), (2, 5)),
    "expand": lambda: _linear_probe(Apply(lambda x: x.unsqueeze(2).expand(-1, -1, 4)), (3,)),
    "slice": lambda: _linear_probe(Apply(lambda x: x[:, ::2]), (4,)),
    "pad": lambda: _linear_probe(Apply(lambda x: F.pad(x, (1, 2), value=3.0)), (3,)),
    "permute": lambda: _linear_probe(Apply(lambda x: x.permute(0, 2, 1).contiguous().flatten(1)), (2, 3)),
    "relu": lambda: _slope_probe(nn.ReLU(), 1.0),
    "leaky relu": lambda: _slope_probe(nn.LeakyReLU(2.0), -1.0),
    "sigmoid": lambda: _slope_probe(nn.Sigmoid(), 0.0),
    "tanh": lambda: _slope_probe(nn.Tanh(), 0.0),
    "gelu": lambda: _slope_probe(nn.GELU(), math.sqrt(2)),
    "silu": lambda: _slope_probe(nn.SiLU(), 2.399),
}


@pytest.mark.parametrize("name", sorted(PROBES))
def test_each_operation_is_bounded_and_the_bound_is_reached(name: str) -> None:
    probe = PROBES[name]()
    true, bound = probe.outcome()
    assert true <= bound <= true * (1 + probe.tight)


class With(nn.Module):
    """Something done with a parameter of its own."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.tensor([0.5, -1.0]).reshape(2, 1, 1)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


CHANGED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(2, 3, bias=False),
    "conv": lambda: nn.Conv2d(2, 3, 1, bias=False),
    "batch norm": lambda: _batch_norm(2),
    "conv and batch norm": lambda: nn.Sequential(nn.Conv2d(2, 2, 1), _batch_norm(2)),
    "mul": lambda: With(lambda x, w: x * w),
    "div": lambda: With(lambda x, w: x / (1 / w)),
    "cat": lambda: With(lambda x, w: torch.cat([x, w.unsqueeze(0).expand(x.shape[0], -1, 2, 2)], 1)),
    "sub": lambda: With(lambda x, w: 2 * (w - x)),
}


def _changed(name: str) -> tuple[nn.Module, nn.Module]:
    """A map, and the same with weights three times as large: what re-weighting does to a row."""
    torch.manual_seed(1)
    body = CHANGED[name]().double().eval()
    larger = copy.deepcopy(body)
    for parameter in larger.parameters():
        parameter.data *= 3
    return body, larger


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_what_changed_weights_add_is_measured_on_the_actual_values(name: str) -> None:
    body, larger = _changed(name)
    base = torch.randn(2, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    true, bound = Probe(body, (2, 2, 2), base, torch.zeros_like(base), changed=larger).outcome()
    assert 0 < true <= bound
    if name != "conv and batch norm":
        assert bound <= true * (1 + 1e-6)


def test_a_module_used_twice_counts_twice() -> None:
    layer = nn.Linear(3, 3, bias=False).double()
    layer.weight.data = 2 * torch.eye(3, dtype=torch.float64)
    true, bound = _linear_probe(nn.Sequential(layer, layer), (3,)).outcome()
    assert true == pytest.approx(4.0) and true <= bound <= 4.0 * (1 + 1e-6)
