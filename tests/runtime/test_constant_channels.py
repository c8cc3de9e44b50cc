"""`sparse` on the CPU compiles a network without the channels that are constant; NaN and infinity stay torch's."""

from __future__ import annotations

import math

import pytest
import torch
from runtime.nets import Net, is_close
from torch import Tensor, nn

import sipp
from sipp.runtime import steps

REMOVED = "without constant channels"


def without_rows(layer: nn.Module, *rows: int) -> nn.Module:
    """The layer with no weights left in these rows."""
    with torch.no_grad():
        layer.weight[list(rows)] = 0.0  # type: ignore[index, operator, union-attr]
    return layer


def convolutions(*, groups: int = 1) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    nn.init.uniform_(norm.bias)
    first, second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 6, 3, padding=1, groups=groups)
    parts = without_rows(first, 1, 2, 5), norm, nn.ReLU(), without_rows(second, 0, 4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(6 * 16, 5)).eval()


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(without_rows(nn.Linear(12, 16), 0, 3, 7), nn.Tanh(), nn.Linear(16, 4)).eval()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (convolutions(), (16, 3, 8, 8)),
        (convolutions(groups=2), (2, 3, 8, 8)),
        (perceptron(), (9, 12)),
        (perceptron(), (1, 12)),
    ],
)
def test_outputs_are_the_same_without_constant_channels(never_dense, model, shape) -> None:
    before = [parameter.clone() for parameter in model.parameters()]
    x = torch.randn(shape)
    fast = sipp.sparse(model, x)
    assert REMOVED in fast.latest.how and REMOVED in str(fast)
    for given in (x, 30 * torch.randn(shape), torch.zeros(shape), torch.randn(3, *shape[1:])):
        assert is_close(fast(given), model(given))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_the_layers_that_run_are_smaller(never_dense) -> None:
    fast = sipp.sparse(perceptron(), torch.randn(9, 12))
    assert [step.n_dense_bytes for step in fast.steps if step.n_dense_bytes] == [4 * 13 * 12, 4 * 4 * 13]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("model", [convolutions(), perceptron()])
def test_inputs_that_are_not_finite_give_what_torch_gives(never_dense, model, bad) -> None:
    shape = (4, 12) if isinstance(model[0], nn.Linear) else (4, 3, 8, 8)
    fast, x = sipp.sparse(model, torch.randn(shape)), torch.randn(shape)
    assert REMOVED in fast.latest.how
    x[1] = bad
    assert is_close(fast(x), model(x))
    assert is_close(fast(x.clamp(-1, 1).nan_to_num()), model(x.clamp(-1, 1).nan_to_num()))


def test_a_channel_that_nothing_reads_stays_because_it_may_overflow(never_dense) -> None:
    model = perceptron()
    with torch.no_grad():
        model[0].weight[5] = 1e30
        model[2].weight[:, 5] = 0.0
        model[1] = nn.ReLU()
    x = torch.rand(4, 12)
    fast = sipp.sparse(model, x)
    assert REMOVED in fast.latest.how
    assert is_close(fast(x), model(x)) and bool(model(x).isfinite().all())
    assert bool(model(1e20 * x).isnan().all()) and is_close(fast(1e20 * x), model(1e20 * x))


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv1d])
def test_an_infinite_value_inside_meets_the_zeros_even_if_torch_runs_all_layers(monkeypatch, kind) -> None:
    """The removed row would make NaN of it, the rows that stay only infinity."""
    monkeypatch.setattr(steps, "dense_time", lambda function, trials=1: 0.0)
    monkeypatch.setattr(steps, "race", lambda fast, dense: ([1e-3], [math.inf]))
    torch.manual_seed(0)
    size, shape = ((), (3, 4)) if kind is nn.Linear else ((1,), (3, 4, 2))
    first, second = without_rows(kind(4, 4, *size), 2), kind(4, 2, *size)
    with torch.no_grad():
        for layer in (first, second):
            layer.weight.abs_()
    model = Net(lambda first, second, x: second(first(1 / x)), first, second).eval()
    fast, x = sipp.sparse(model, torch.rand(shape) + 1), torch.rand(shape) + 1
    assert REMOVED in fast.latest.how and all(step.kernel in ("dense", "torch") for step in fast.steps)
    x[0, 1] = 0.0
    assert bool(model(x)[0].isnan().all()) and is_close(fast(x), model(x))


def _by_count(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    h = first(x)
    return second(h * (1 + 1e-5 * h.shape[1]))


def _by_view(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
    return second(first(x).reshape(-1, 2, 8).flatten(1))


@pytest.mark.parametrize("function", [_by_count, _by_view])
def test_code_that_knows_the_number_of_channels_keeps_them(never_dense, function) -> None:
    torch.manual_seed(0)
    model = Net(function, without_rows(nn.Linear(12, 16), 0, 3, 7), nn.Linear(16, 4)).eval()
    x = torch.randn(5, 12)
    fast = sipp.sparse(model, x)
    assert REMOVED not in fast.latest.how and is_close(fast(x), model(x))


def test_a_network_without_dead_rows_is_not_looked_through(never_dense, monkeypatch) -> None:
    from sipp.runtime.shrinking import constant_channels

    monkeypatch.setattr(constant_channels, "program_of", lambda *_, **__: pytest.fail("traced once more"))
    model = nn.Sequential(nn.Embedding(9, 16, padding_idx=0), nn.Linear(16, 4)).eval()
    assert REMOVED not in sipp.sparse(model, torch.randint(0, 9, (5, 3))).latest.how
