"""Kinds of training steps: which one a run makes, and that a compiled one is the plain one. Graphs need a GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from lab.hyperparameters import hyperparameters
from lab.training.test_loop import HYPER, bits, equal, make_feed, make_net

from sipp_lab.training import feed as feeds
from sipp_lab.training.feed import train_batches
from sipp_lab.training.loop import new_state, train
from sipp_lab.training.step import set_rate


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
        hyper = hyperparameters(2, 8, 0.1, augment=True)
        return [(step, images, labels) for step, (images, labels) in train_batches(feed, hyper, seed=5, epoch=1)]

    expected = batches()
    monkeypatch.setattr(feeds, "AHEAD", ahead)
    found = batches()
    assert [one[0] for one in found] == [one[0] for one in expected] == [0, 1, 2, 3]
    assert all(torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in zip(found, expected))
