"""Pruning in a user's own loop: the schedule, exact counts, masks that only shrink, a clean optimizer, a plain end."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import OptionError
from sipp.pruning.masking import hold, masks_of
from sipp.results.gradual import budget_at, cut_times
from sipp.results.options import Method
from sipp.scoring.methods import METHODS


def made() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    points = torch.rand(24, 1, 6, 6)

    def step(number: int) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(points), torch.arange(24) % 3).backward()
        optimizer.step()

    return net, optimizer, points, step


def test_the_schedule_by_hand() -> None:
    times = cut_times(100)
    assert times == {10 + 5 * k: k / 10 for k in range(1, 11)}  # from 10 to 60 in ten parts
    assert [budget_at(t, 1000, 100) for t in (0.0, 0.5, 1.0)] == [1000, 100 + 112, 100]  # 900 / 8 = 112.5, to even


@pytest.mark.parametrize("method", [row.name for row in METHODS if row.fitting is None])
def test_every_method_reaches_the_budget_and_ends_plain(method: Method) -> None:
    net, optimizer, points, step = made()
    data = [(points, torch.arange(24) % 3)]
    done = sipp.gradual(net, step, data, keep=0.25, steps=20, method=method, optimizer=optimizer)
    assert done.model is net and masks_of(net) == {} and not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    assert done.n_weights == 36 + 192 and done.kept == sum(int(mask.sum()) for mask in done.masks.values()) == 57
    assert [at for at, _ in done.path] == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert done.path[-1][1] == done.keep == 0.25
    for name, mask in done.masks.items():
        assert not bool(net.get_parameter(name)[~mask].any())
    assert sipp.certify(net, done, torch.rand(80, 1, 6, 6)).verdict == "certified"  # the result holds its network


def test_masks_only_shrink_along_the_curve_and_the_optimizer_forgets() -> None:
    net, optimizer, points, step = made()
    seen: list[dict[str, Tensor]] = []

    def watched(number: int) -> None:
        seen.append(masks_of(net))
        for name, mask in seen[-1].items():
            parameter = net.get_parameter(name)
            assert not bool(optimizer.state[parameter]["momentum_buffer"][~mask].any()) and bool(parameter.any())
        step(number)

    done = sipp.gradual(net, watched, points, keep=0.1, steps=40, optimizer=optimizer)
    counts = [sum(int(mask.sum()) for mask in masks.values()) if masks else 228 for masks in seen]
    assert len(seen) == 40 and counts[0] == 228 and counts[-1] == done.kept == 23
    for before, after in pairwise(masks for masks in seen if masks):
        assert all(not bool((after[name] & ~before[name]).any()) for name in before)
    after_step = {at: counts[at] for at, _ in done.path}
    assert after_step == {at: budget_at(t, 228, 23) for at, t in cut_times(40).items()}


def test_weights_outside_the_choice_stay_dense_and_an_error_of_the_loop_leaves_a_plain_model() -> None:
    net, optimizer, points, step = made()
    done = sipp.gradual(net, step, points, keep=0.5, steps=10, exclude="0", optimizer=optimizer)
    assert list(done.masks) == ["4.weight"] and bool((net.get_parameter("0.weight") != 0).all())

    def failing(number: int) -> None:
        step(number)
        if number == 8:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        sipp.gradual(net, failing, points, keep=0.5, steps=10, optimizer=optimizer)
    assert masks_of(net) == {}


def test_what_is_refused() -> None:
    net, _, points, step = made()
    with pytest.raises(OptionError, match="read again at every pruning"):
        sipp.gradual(net, step, iter([points]), keep=0.5, steps=10)
    with pytest.raises(OptionError, match=r"train_step\(0\)"):
        sipp.gradual(net, lambda: None, points, keep=0.5, steps=10)  # type: ignore[arg-type, misc]


def test_it_goes_on_from_held_masks() -> None:
    """A training that was stopped: what was pruned stays pruned, and the schedule begins there."""
    net, optimizer, points, step = made()
    first = sipp.gradual(net, step, points, keep=0.4, steps=10, optimizer=optimizer)
    hold(net, net, optimizer=optimizer)
    with pytest.raises(OptionError, match="held masks leave"):
        sipp.gradual(net, step, points, keep=0.5, steps=10, optimizer=optimizer)
    second = sipp.gradual(net, step, points, keep=0.2, steps=10, optimizer=optimizer)
    (step_done, share), times = second.path[0], cut_times(10)
    assert share == budget_at(times[step_done], first.kept, second.kept) / second.n_weights
    assert second.kept == round(0.2 * second.n_weights)
    assert all(bool((first.masks[name] | ~mask).all()) for name, mask in second.masks.items())
    assert masks_of(net) == {}
