"""Scoring leaves data, flags and other threads alone, and notices layers that compute something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draws import randn
from torch import Tensor, nn

import sipp
from sipp.errors import DataError


def in_place() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))


LABELS = torch.arange(8) % 3
CALLS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "sensitivity": sipp.sensitivity,
    "mean": lambda m, x: sipp.sensitivity(m, [x], reduce="mean"),
    "sample_size": sipp.sample_size,
    "prune": lambda m, x: sipp.prune(m, x, keep=0.5),
    "snip": lambda m, x: sipp.prune(m, [(x, LABELS)], keep=0.5, method="snip"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_model_that_works_in_place_does_not_change_the_data(call: Callable[[nn.Module, Tensor], object]) -> None:
    x = randn(8, 6)
    before = x.clone()
    call(in_place(), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("is_training", [True, False])
def test_flags_of_scripted_parts_come_back(is_training: bool) -> None:
    inner = torch.jit.script(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)))
    model = nn.Sequential(nn.Linear(6, 4), inner, nn.Linear(4, 2)).train(is_training)
    inner[0].train(not is_training)
    before = [module.training for module in model.modules()]
    sipp.sensitivity(model, randn(8, 6), include=nn.Linear)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("call", [sipp.sensitivity, lambda m, x: sipp.prune(m, x, keep=0.5).model.state_dict()])
@pytest.mark.filterwarnings("ignore")
def test_threads_that_share_a_model(call: Callable[[nn.Module, Tensor], dict[str, Tensor]]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2)).train()
    batches = [randn(4, 6, seed=i) for i in range(12)]
    expected = call(model, batches)
    found: list[dict[str, Tensor]] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.extend(call(model, batches) for _ in range(3))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(found) == 9
    assert all(torch.equal(one[name], expected[name]) for one in found for name in expected)
    assert all(module.training for module in model.modules()) and torch.backends.mha.get_fastpath_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "one number a point": lambda out: out[:, 0],
    "sparse": lambda out: out.to_sparse(),
    "plain": lambda out: (out, [{"a": out}]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_may_have_any_structure(kind: str) -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return OUTPUTS[kind](self.fc(x))

    assert set(sipp.sensitivity(Gives(), randn(8, 4))) == {"fc.weight"}


def test_data_that_cannot_be_begun_is_an_error_of_the_data() -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise RuntimeError("worker died")

    with pytest.raises(DataError, match="worker died"):
        sipp.sensitivity(in_place(), Broken())
