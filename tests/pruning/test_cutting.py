"""Spared rows; and `moved`: what the output did on calibration points, with a warning where that is much."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.pruning.ranking import N_SAMPLE
from sipp.results.pruned import OutputChange, moved_warning
from sipp.scoring.methods import METHODS


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def points(n: int = 200) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(1))


def distance(dense: nn.Module, pruned: nn.Module, x: Tensor) -> float:
    """The definition: ||f^ - f|| / ||f|| over all points."""
    with torch.no_grad():
        f, g = dense(x).double(), pruned(x).double()
    return float((g - f).norm() / f.norm())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [row.name for row in METHODS if "labels" not in row.needs and row.fitting is None])
@pytest.mark.parametrize("keep", [0.05, 0.9])
def test_output_change_is_measured_on_calibration_points(method: str, keep: float) -> None:
    model, x = net(), points()
    pruned = sipp.prune(model, x, keep=keep, method=method)
    assert pruned.moved is not None
    used = x[150:] if method == "sipp-blend" else x[:N_SAMPLE]  # a blend has the held-back points
    assert pruned.moved.is_held_back == (method == "sipp-blend") and pruned.moved.n_inputs == len(used)
    assert pruned.moved.error == pytest.approx(distance(model, pruned.model, used), rel=1e-6)
    assert ("warning:         the output moved by" in str(pruned)) == (pruned.moved.error > 0.5)


@pytest.mark.filterwarnings("ignore")
def test_a_large_output_change_is_warned_of_and_a_small_one_is_not() -> None:
    much, little = (sipp.prune(net(), points(), keep=keep, method="magnitude") for keep in (0.05, 0.9))
    assert "warning:         the output moved by" in str(much) and "warning" not in str(little)
    assert "what it costs:   not measured on new inputs yet" in str(
        much
    ) and "what it costs:   the output moved by" in str(little)
    assert "Nothing is guaranteed for new inputs" in " ".join(str(little).split())
    for word in ("repair=True", "another method", "larger keep"):
        assert word in " ".join(str(much).split())


@pytest.mark.filterwarnings("ignore")
def test_a_repair_updates_the_output_change() -> None:
    """The old number would describe weights that have been replaced."""
    pruned = sipp.prune(net(), points(), keep=0.2, method="magnitude")
    fixed = sipp.repair(net(), pruned, points())
    assert fixed.repair is not None and fixed.moved is not None and pruned.moved is not None
    assert fixed.moved == OutputChange(fixed.repair.output_after, fixed.repair.n_test, is_held_back=True)  # type: ignore[arg-type]
    assert fixed.moved.error < pruned.moved.error
    few = sipp.repair(net(), pruned, points()[:40])
    assert few.repair is not None and few.repair.output_after is None
    assert few.moved == OutputChange(few.repair.output_validation, 4, is_held_back=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.51])
def test_an_output_change_that_is_not_finite_is_warned_of(error: float) -> None:
    pruned = sipp.prune(net(), None, keep=0.5, method="magnitude")
    assert moved_warning(replace(pruned, moved=OutputChange(error, 3, is_held_back=False)))
    assert not moved_warning(replace(pruned, moved=OutputChange(0.5, 3, is_held_back=False)))
    blames = "measure what that costs" in moved_warning(
        replace(pruned, moved=OutputChange(error, 1, is_held_back=False))
    )
    assert blames == math.isfinite(error)  # a dense output that is no number is not the pruning's fault
    assert "on 1 calibration input:" in moved_warning(replace(pruned, moved=OutputChange(error, 1, is_held_back=False)))
