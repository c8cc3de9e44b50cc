"""What the checks cost: forward passes, hashed points and copied bytes of one scoring, counted rather than timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sipp
from sipp.inputs import hashes
from sipp.inputs.data import Batch
from sipp.inputs.layers import find_prunable_layers, recurrent
from sipp.inputs.patches import Weight, WeightUse
from sipp.inputs.trace import read_uses
from sipp.results import numerics
from sipp.scoring.kernels import cpu

N, BATCH = 48, 16
FEW = 3  # points that are looked at, in two orders
ALONE = 4  # points that are run by themselves, beside the whole batch


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    ).eval()


def images(n: int = N) -> Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class _Copies(TorchDispatchMode):
    """Counts the points that are cloned."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.n_points = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and out.shape[1:] == self.shape:
            self.n_points += len(out)
        return out


@dataclass
class Costs:
    """Sizes of the forward passes, in order; points whose content was read for a hash; points that were copied."""

    passes: list[int] = field(default_factory=list)
    n_hashed: int = 0
    n_copied: int = 0


@contextmanager
def counted(model: nn.Module, monkeypatch: pytest.MonkeyPatch, points: Tensor) -> Iterator[Costs]:
    costs, real = Costs(), hashes._rows

    def rows(part: Any) -> list[bytes]:
        costs.n_hashed += len(part)
        return real(part)

    monkeypatch.setattr(hashes, "_rows", rows)
    handle = model.register_forward_pre_hook(lambda module, args: costs.passes.append(len(args[0])))
    with _Copies(points.shape[1:]) as copies:
        yield costs
    costs.n_copied = copies.n_points
    handle.remove()


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_sensitivities_take_one_pass_and_a_few_points_three_times(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, points = network(), images()
    with counted(model, monkeypatch, points) as costs:
        sipp.sensitivity(model, list(points.split(BATCH)), reduce=reduce)
    assert costs.passes == [FEW, FEW, BATCH, ALONE, BATCH, BATCH]
    assert costs.n_hashed == N
    assert costs.n_copied == N + 2 * FEW + ALONE  # each pass is given a copy


def test_a_short_last_batch_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, points = network(), images(BATCH + 3)
    with counted(model, monkeypatch, points) as costs:
        sipp.sensitivity(model, list(points.split(BATCH)))
    assert costs.passes == [FEW, FEW, BATCH, ALONE, 3]


def test_one_look_is_enough_for_inputs_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, points = nn.Linear(6, 3), torch.rand(4, 5, 6)
    with counted(model, monkeypatch, points) as costs:
        sipp.sensitivity(model, [points, points[:, :3], points + 1, points[:, :3] + 1])
    assert costs.passes == [FEW, FEW, 4, 2, 4, 4, 4]  # two points of the first batch by themselves, too


def test_a_pruning_scores_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, points = network(), images()
    with counted(model, monkeypatch, points) as costs:
        sipp.prune(model, list(points.split(BATCH)), keep=0.5, method="sipp-det")
    assert costs.passes == [
        FEW,
        FEW,
        BATCH,
        ALONE,
        BATCH,
        BATCH,
        BATCH,
        BATCH,
    ]  # and both networks on one batch, at the end
    assert costs.n_hashed == N
    assert costs.n_copied == N + 2 * FEW + ALONE + 3 * BATCH  # and a copy is kept of the points on which both are run


def test_each_weight_of_a_recurrence_is_met_once_a_pass() -> None:
    model, met = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), list[str]()
    batch = Batch(0, "batch 0", (torch.rand(4, 5, 3),), {}, None, 4)

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        met.append(weight.name)

    read_uses(model, find_prunable_layers(model), batch, on_use)
    assert sorted(met) == sorted(recurrent.recurrent_weights(model))


def test_a_hook_on_some_points_does_not_change_what_a_recurrence_met() -> None:
    """Such a hook changes what the layers behind see; the hidden weights meet the states as they are."""
    torch.manual_seed(0)
    model, points = nn.LSTM(3, 4, 2, batch_first=True), torch.rand(8, 5, 3)
    points[4] = 5.0
    expected = sipp.sensitivity(model, [points])
    model.register_forward_hook(lambda m, args, out: (torch.where(args[0][:, :1, :1] > 4, 9.0, out[0]), out[1]))
    found = sipp.sensitivity(model, [points])
    assert all(torch.equal(found[name], score) for name, score in expected.items())


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_weights_are_laid_out_once_a_score(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out, real = [], cpu.pack_weights
    monkeypatch.setattr(
        cpu, "pack_weights", lambda weight, factors: laid_out.append(tuple(weight.shape)) or real(weight, factors)
    )
    sipp.sensitivity(network(), list(images().split(BATCH)), reduce=reduce)
    assert laid_out == [(1, 4, 27), (1, 5, 64)]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_score_leaves_nothing_to_the_garbage_collector(n_threads: int, set_threads: Callable[[int], None]) -> None:
    """Hooks that refer to each other would stay, with what they saw, until it runs; and it would run more often."""
    set_threads(n_threads)
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
