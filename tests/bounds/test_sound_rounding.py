"""The sound network statement is about the networks as they run, rounding included (T13, T18)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.bounds import sound

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def points(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, 20, generator=torch.Generator().manual_seed(seed)).to(dtype)


def violations(dtype: torch.dtype) -> tuple[float, float, float]:
    """The share of new inputs beyond the statement, the share it allows and its epsilon, for one barely changed net."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 4)).to(dtype)
    given = copy.deepcopy(dense)
    with torch.no_grad():  # one weight, by one unit of the type: what shows is rounding
        given[0].weight[0, 0] *= 1 + torch.finfo(dtype).eps
    assert not torch.equal(given[0].weight, dense[0].weight)
    bound = sipp.assess(dense, given, points(100, 1, dtype), bound="sound", holdout=points(300, 2, dtype)).bound
    assert bound.met, bound.reason
    epsilon, allowed = bound.epsilon, bound.coverage.share
    x = points(2000, 3, dtype)
    with torch.no_grad():
        # One network runs on all points at once, the other point by point: sums may go in another order.
        f, g = dense(x).double(), torch.cat([given(part) for part in x.split(1)]).double()
    beyond = (g - f).norm(dim=1) > epsilon * f.norm(dim=1)
    return float(beyond.double().mean()), allowed, epsilon


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_in_the_statement(dtype: torch.dtype) -> None:
    share, allowed, epsilon = violations(dtype)
    assert share <= allowed and epsilon < 4000 * torch.finfo(dtype).eps


def test_the_check_sees_a_statement_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sound.error_bounds
    monkeypatch.setattr(sound, "_as_run", lambda dense, pruned, batch, error_B: exact(dense, pruned, batch))
    for dtype in (torch.float32, torch.float64):
        share, allowed, _ = violations(dtype)
        assert share > allowed
