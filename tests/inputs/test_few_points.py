"""A few points are looked at and all are scored: what the few do not show must not become a wrong number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import draws
import pytest
import torch
from oracles import sensitivity as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import DataError
from sipp.scoring import sensitivities
from sipp.scoring.task import task_of

N, WIDTH = 8, 5  # points, features
randn = partial(draws.randn, dtype=torch.float64)


class Calls(nn.Module):
    """One layer, called in some way."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.m, self.call = nn.Linear(WIDTH, WIDTH, bias=False).double(), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.m, x)


def maxima_agree(model: Calls, batches: list[Tensor], points: list[Tensor]) -> bool:
    expected = oracle.sensitivity(oracle.f64(model.m.weight), [oracle.f64(point) for point in points], "max")
    return not oracle.disagreements(sipp.sensitivity(model, batches), {"m.weight": expected})


def has_a_mean(model: Calls, batches: list[Tensor]) -> bool:
    with suppress(DataError):
        return bool(sipp.sensitivity(model, batches, reduce="mean"))
    with pytest.raises(DataError, match="which values belong to which input"):
        sipp.sensitivity(model, batches, reduce="mean")
    return False


@pytest.mark.parametrize(("n_points", "n_steps"), [(2, 3), (2, 5), (3, 7), (4, 9), (6, 7), (8, 2), (8, 3), (8, 9)])
def test_features_repeated_step_by_step_are_not_taken_for_blocks(n_points: int, n_steps: int) -> None:
    """With two points and an odd number of repeated steps, blocks seem to move with the points."""

    def repeated(m: nn.Module, x: Tensor) -> Tensor:
        return m(x.repeat(n_steps, 1)).unflatten(0, (n_steps, len(x))).sum(0)

    model, x = Calls(repeated), randn(n_points, WIDTH)
    assert maxima_agree(model, [x], list(x[:, None]))
    assert not has_a_mean(model, [x])


def test_a_layer_that_some_points_call_for_is_scored_for_all() -> None:
    def asked_for(m: nn.Module, x: Tensor) -> Tensor:
        return m(x) if bool((x[:, 0] > 9).any()) else x.clone()

    x = randn(N, WIDTH)
    x[3, 0] = 10
    assert maxima_agree(Calls(asked_for), [x], [point[None] for point in x])


@pytest.mark.parametrize("by_itself", [False, True])
def test_a_compiled_part_is_scored_like_a_plain_one(by_itself: bool) -> None:
    part, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), torch.rand(N, WIDTH)
    plain = nn.Sequential(part, nn.Linear(WIDTH, 3))
    expected = sipp.sensitivity(plain, x)
    if by_itself:
        part.compile(backend="eager")
    found = sipp.sensitivity(plain if by_itself else nn.Sequential(torch.compile(part, backend="eager"), plain[1]), x)
    assert all(torch.equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True))


class Longer(nn.Module):
    """Takes another branch for more than two points, which no operation on values reveals."""

    def __init__(self, few: nn.Module, many: nn.Module) -> None:
        super().__init__()
        self.few, self.many = few, many

    def forward(self, x: Tensor) -> Tensor:
        h = self.few(x)
        return self.many(h) if len(x) > 3 else h


def test_a_weight_that_is_used_again_by_more_points_has_no_mean() -> None:
    torch.manual_seed(0)
    shared, x = nn.Linear(4, 4), torch.rand(8, 4)
    model = Longer(shared, shared)
    assert sensitivities.measure_sensitivities(task_of(model, [x]), with_means=True).layers[0].mean_FK is None
    with pytest.raises(DataError, match=r"which values belong to which input.*reduce='max'"):
        sipp.sensitivity(model, [x], reduce="mean")
