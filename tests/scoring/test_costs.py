"""What a score costs: forward passes, counted rather than timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.results import numerics
from sipp.scoring.kernels import cpu

N, BATCH = 48, 16
FEW = 3  # points that are looked at, in two orders
ALONE = 4  # points that are run by themselves, beside the whole batch


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 5)
    ).eval()


def images(n: int = N) -> Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@contextmanager
def passes(model: nn.Module) -> Iterator[list[int]]:
    """Sizes of the forward passes, in order."""
    sizes = list[int]()
    handle = model.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    yield sizes
    handle.remove()


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_sensitivities_take_one_pass_and_a_few_points_three_times(reduce: str) -> None:
    model, points = network(), images()
    with passes(model) as sizes:
        sipp.sensitivity(model, list(points.split(BATCH)), reduce=reduce)  # type: ignore[arg-type]
    assert sizes == [FEW, FEW, BATCH, ALONE, BATCH, BATCH]
    with passes(model) as sizes:  # neither a short last batch nor one of another size is looked at again
        sipp.sensitivity(model, [points[:BATCH], points[:8], points[:3]], reduce=reduce)  # type: ignore[arg-type]
    assert sizes == [FEW, FEW, BATCH, ALONE, 8, 3]


def test_a_pruning_scores_in_one_pass() -> None:
    model, points = network(), images()
    with passes(model) as sizes:
        sipp.prune(model, list(points.split(BATCH)), keep=0.5, method="sipp-det")
    # and both networks on one batch, at the end
    assert sizes == [FEW, FEW, BATCH, ALONE, BATCH, BATCH, BATCH, BATCH]


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_weights_are_laid_out_once_a_score(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out, real = list[tuple[int, ...]](), cpu.pack_weights

    def noted(weight: Tensor, factors: Tensor) -> Any:
        laid_out.append(tuple(weight.shape))
        return real(weight, factors)

    monkeypatch.setattr(cpu, "pack_weights", noted)
    sipp.sensitivity(network(), list(images().split(BATCH)), reduce=reduce)  # type: ignore[arg-type]
    assert laid_out == [(1, 4, 27), (1, 5, 64)]


def test_a_score_leaves_nothing_to_the_garbage_collector() -> None:
    """Hooks that refer to each other would stay, with what they saw, until it runs; and it would run more often."""
    model, batches = network(), list(images().split(BATCH))
    sipp.sensitivity(model, batches, progress=False)
    gc.collect()
    gc.disable()
    try:
        sipp.sensitivity(model, batches, progress=False)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_products_of_a_use_know_their_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in half precision may use TF32 on a GPU, which holds their bits; neither is widened before it is asked."""
    dtypes, exact = list[tuple[torch.dtype, ...]](), numerics.exact_matmul
    monkeypatch.setattr(
        numerics, "exact_matmul", lambda *some: dtypes.append(tuple(t.dtype for t in some)) or exact(*some)
    )
    sipp.sensitivity(nn.Linear(6, 4).to(torch.bfloat16), torch.randn(12, 6).to(torch.bfloat16))
    assert set(dtypes) - {()} == {(torch.bfloat16, torch.bfloat16)}
