"""Simulation: the error that a repair's own record tells is that of new points, or the record says that it has none."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.inputs import data_of
from sipp.repairing import split_data

N_SEEDS = 12


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5))


def error(dense: nn.Module, other: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        f, g = dense(x).double(), other(x).double()
    return float((g - f).norm() / f.norm())


def ratios(n: int, steps: int, n_seeds: int = N_SEEDS, *, by_those_that_chose: bool = False) -> list[float]:
    """What each record tells of the repaired network, by its error on 1,000 new points; none where it tells nothing."""
    found = []
    for seed in range(n_seeds):
        dense, x, fresh = net(seed), torch.randn(n, 20), torch.randn(1000, 20)
        pruned = sipp.prune(dense, None, keep=0.4, method="magnitude", progress=False)
        fixed = sipp.repair(dense, pruned, x, steps=steps, progress=False)
        assert fixed.repair is not None
        told = fixed.repair.output_validation if by_those_that_chose else fixed.repair.output_after
        if told is not None:
            found.append(told / error(dense, fixed.model, fresh))
        else:
            assert "estimate the error on new ones" in fixed.repair.sentence and "before repair" not in str(fixed)
            assert fixed.moved is not None and not fixed.moved.is_held_back
    return found


@pytest.mark.parametrize(("n", "steps"), [(10, 0), (20, 4), (40, 0), (200, 0), (200, 4)])
def test_a_record_tells_the_error_of_new_points_or_nothing(n: int, steps: int) -> None:
    if n < 80:
        assert ratios(n, steps, 3) == []
    else:
        assert len(found := ratios(n, steps)) == N_SEEDS and 0.9 < statistics.mean(found) < 1.15


@pytest.mark.parametrize("n", [10, 20])
def test_the_points_that_chose_flatter(n: int) -> None:
    assert statistics.mean(ratios(n, 0, by_those_that_chose=True)) < 0.9


def test_copies_judge_nothing() -> None:
    """400 points, 40 of them different: too few to test the result on."""
    torch.manual_seed(0)
    dense, x = net(0), torch.randn(40, 20)[torch.randint(0, 40, (400,))]
    done = sipp.repair(dense, sipp.prune(dense, None, keep=0.4, method="magnitude"), x, progress=False).repair
    assert done is not None and done.output_after is None and done.n_test == 0


def test_held_back_copies_are_not_fitted_and_count_once() -> None:
    """400 points, 200 of them different: the 10 that test the result are in no other part."""
    x = torch.randn(200, 20, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    split = split_data(data_of(x))
    parts = [[key for batch in some for key in batch.hashes()] for some in (split.fit, split.validation, split.test)]
    assert [len(part) for part in parts] == [360, 10, 10] and len({key for part in parts for key in part}) == 200
    assert [len(set(part)) for part in parts] == [180, 10, 10]
