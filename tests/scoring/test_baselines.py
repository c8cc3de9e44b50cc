"""Magnitude, SNIP and random: the scores they say they are, the model left alone."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sipp.errors import DataError
from sipp.scoring import baselines, wanda as wanda_score
from sipp.scoring.task import task_of


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 4))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 1, 6, 6, generator=generator), torch.randint(0, 4, (n,), generator=generator)) for n in (5, 8)
    ]


def test_magnitude_is_the_absolute_value() -> None:
    model = net()
    scores = baselines.magnitude(task_of(model))
    assert list(scores) == ["0.weight", "4.weight"]
    assert torch.equal(scores["0.weight"], model[0].weight.detach().abs())


def test_random_is_seeded() -> None:
    first, again, other = (baselines.random(task_of(net(), seed=seed))["4.weight"] for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 0.4 < float(first.mean()) < 0.6


def snip_oracle(model: nn.Module, name: str) -> torch.Tensor:
    """|w dL/dw| with L the sum of the losses of all points, by finite differences in float64."""
    model = copy.deepcopy(model).double().eval()
    weight = model.get_parameter(name)
    gradient = torch.zeros_like(weight)
    step = 1e-6

    def total() -> float:
        with torch.no_grad():
            return float(sum(F.cross_entropy(model(x.double()), y, reduction="sum") for x, y in data()))

    for i in range(weight.numel()):
        flat = weight.data.view(-1)
        flat[i] += step
        above = total()
        flat[i] -= 2 * step
        below = total()
        flat[i] += step
        gradient.view(-1)[i] = (above - below) / (2 * step)
    return (weight * gradient).abs().detach()


def test_snip_accumulates_over_batches() -> None:
    model = net()
    expected = snip_oracle(model, "0.weight").float()
    score = baselines.snip(task_of(model, data()))["0.weight"]
    torch.testing.assert_close(score, expected, rtol=1e-3, atol=1e-5)
    first_only = baselines.snip(task_of(model, data()[:1]))["0.weight"]
    assert not torch.allclose(first_only, expected, rtol=1e-2)


def test_snip_leaves_gradients_flags_and_buffers_alone() -> None:
    model = net().train()
    model[0].weight.requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    before = copy.deepcopy(model.state_dict())
    for norm_stats in ("running", "batch"):
        baselines.snip(task_of(model, data(), norm_stats=norm_stats))
    assert model.training and not model[0].weight.requires_grad
    assert torch.equal(model[4].weight.grad, torch.ones_like(model[4].weight))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_snip_with_batch_statistics_differs_and_with_another_loss_too() -> None:
    model = net()
    running, batch = (baselines.snip(task_of(model, data(), norm_stats=s))["4.weight"] for s in ("running", "batch"))
    assert not torch.allclose(running, batch)
    other = baselines.snip(task_of(model, data(), loss=lambda output, labels: output.square().mean()))["4.weight"]
    assert not torch.allclose(running, other)


def test_snip_needs_labels() -> None:
    with pytest.raises(DataError, match="labels"):
        baselines.snip(task_of(net(), [data()[0][0]]))


def test_wanda_holds_a_sum_a_column_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one a weight: of a language model these would be twice its size."""
    held: list[tuple[int, ...]] = []
    scores = wanda_score._scores

    def noted(weight: Any, parameter: Any, squares: Any) -> Any:
        held.extend(tuple(one.shape) for one in squares[weight.name].values())
        return scores(weight, parameter, squares)

    monkeypatch.setattr(wanda_score, "_scores", noted)
    model = nn.Sequential(nn.Linear(7, 30), nn.ReLU(), nn.Linear(30, 20))
    wanda_score.wanda(task_of(model, [torch.rand(5, 7), torch.rand(3, 7)]))
    assert held == [(1, 7), (1, 30)]
