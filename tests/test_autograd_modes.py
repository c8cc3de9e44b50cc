"""Every public function inside torch.inference_mode() and no_grad: it works, and what it gives can be trained."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_wrong_types import FUNCTIONS, RIGHT, net, points, pruned
from torch import Tensor, nn

import sipp
from sipp.errors import ModelError
from sipp.scoring import methods

WRITES = ("gradual", "hold", "load")  # to the model that it is given
MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad}


@pytest.fixture(autouse=True)
def methods_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered here is unknown to later tests of the process."""
    monkeypatch.setattr(methods, "_ROWS", dict(methods._ROWS))


def tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that can be reached from a result."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors(inner, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value), seen)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_made_in_inference_mode_are_ordinary_tensors(name: str) -> None:
    arguments = RIGHT[name]()
    with torch.inference_mode():
        found = getattr(sipp, name)(**arguments)
    assert not any(tensor.is_inference() for tensor in tensors((found, arguments)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_network_made_inside_is_read_or_refused(name: str) -> None:
    pruned()
    with torch.inference_mode():
        arguments = RIGHT[name]()
    if name in WRITES:
        with pytest.raises(ModelError, match="created in torch"):
            getattr(sipp, name)(**arguments)
    else:
        getattr(sipp, name)(**arguments)


class InPlace(nn.Module):
    """Writes over its input, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return self.layers(x)


@pytest.mark.parametrize("mode", MODES)
def test_pruned_and_repaired_inside_and_trained_outside(mode: str) -> None:
    torch.manual_seed(0)
    model = InPlace()
    with MODES[mode]():
        data = points(120).clone()
        cut = sipp.prune(model, data, keep=0.5, progress=False)
        fixed = sipp.repair(model, cut, data, steps=5, progress=False)
        sipp.certify(model, fixed, points(60).clone())
    assert fixed.repair is not None and fixed.repair.polish is not None
    for made in (cut, fixed):
        optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        sipp.hold(made.model, made, optimizer=optimizer)
        before = [parameter.detach().clone() for parameter in made.model.parameters()]
        made.model.train()(points(8)).square().sum().backward()
        optimizer.step()
        assert not all(torch.equal(one, other) for one, other in zip(before, made.model.parameters()))


def test_the_mode_of_the_caller_changes_no_result() -> None:
    outside = sipp.prune(net(), points(), keep=0.5, progress=False)
    for mode in MODES.values():
        with mode():
            inside = sipp.prune(net(), points(), keep=0.5, progress=False)
        assert inside.described_hash == outside.described_hash != ""
