"""Kinds of training steps: which one a run makes, and that a compiled one is the plain one. Graphs need a GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from lab.hyperparameters import hyperparameters
from lab.training.test_loop import HYPER, bits, equal, make_feed, make_net
from pydantic import ValidationError

from sipp.errors import OptionError
from sipp_lab.recipes.schema import StepKind
from sipp_lab.training import feed as feeds
from sipp_lab.training.feed import train_batches
from sipp_lab.training.loop import new_state, train
from sipp_lab.training.step import resolve_step, set_rate

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("kind", "device", "in_memory", "n_processes", "expected"),
    [
        ("auto", CPU, True, 1, "eager"),
        ("auto", GPU, True, 1, "graph"),
        ("auto", GPU, False, 1, "eager"),
        ("auto", GPU, True, 2, "eager"),
        ("eager", GPU, True, 1, "eager"),
        ("compiled", CPU, True, 1, "compiled"),
        ("graph", GPU, True, 1, "graph"),
    ],
)
def test_auto_picks_the_kind_of_step(
    kind: StepKind, device: torch.device, in_memory: bool, n_processes: int, expected: StepKind
) -> None:
    assert resolve_step(kind, device, in_memory=in_memory, n_processes=n_processes) == expected


@pytest.mark.parametrize(("device", "in_memory", "n_processes"), [(CPU, True, 1), (GPU, False, 1), (GPU, True, 2)])
def test_a_graph_that_cannot_be_recorded_is_refused(device: torch.device, in_memory: bool, n_processes: int) -> None:
    with pytest.raises(OptionError, match=r"train\.step=auto"):
        resolve_step("graph", device, in_memory=in_memory, n_processes=n_processes)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValidationError, match="compiled"):
        hyperparameters(1, 8, 0.1, step="fast")


@pytest.mark.parametrize("masked", [False, True])
def test_a_compiled_step_is_the_plain_one(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler's front end with no code generation behind it: what it traces must be the plain step, bit for bit.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    generator = torch.Generator().manual_seed(0)
    found = []
    for kind in ("eager", "compiled"):
        net, hyper = make_net(), HYPER.model_copy(update={"step": kind})
        masks = {"5.weight": torch.rand(4, 216, generator=generator.manual_seed(2)) < 0.3} if masked else None
        state = train(new_state(net, hyper, masks=masks), make_feed(), hyper, seed=3)
        found.append(bits(state))
        if masks is not None:
            assert not bool((net[5].weight * ~masks["5.weight"]).any())
    assert equal(*found)


def test_a_rate_in_a_tensor_is_set_in_place() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    lr = torch.tensor(0.5)
    optimizer = torch.optim.SGD([weight], lr=lr)
    set_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == 0.25


@pytest.mark.parametrize("ahead", [1, 8, 20])
def test_batches_do_not_depend_on_how_many_are_made_at_once(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = make_feed(uint8=True)

    def batches() -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        options = {"seed": 5, "epoch": 1, "batch_size": 8, "augmented": True}
        return [(step, images, labels) for step, (images, labels) in train_batches(feed, **options)]

    expected = batches()
    monkeypatch.setattr(feeds, "AHEAD", ahead)
    found = batches()
    assert [one[0] for one in found] == [one[0] for one in expected] == [0, 1, 2, 3]
    assert all(torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in zip(found, expected))
