"""`repair=True`: prune and prune_to give the repaired network, and what they say speaks of that."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import sipp


def trained() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 6))


def points(n: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 5, generator=generator) @ torch.randn(5, 16, generator=torch.Generator().manual_seed(9))


def error(dense: nn.Module, pruned: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((pruned(x) - dense(x)).norm() / dense(x).norm())


def test_a_repaired_network_is_nearer_and_has_statements_of_its_own() -> None:
    model, data, new = trained(), points(400, 1), points(300, 2)
    before = copy.deepcopy(model.state_dict())
    raw = sipp.prune(model, data, keep=0.4, method="magnitude")
    fixed = sipp.prune(model, data, keep=0.4, method="magnitude", repair=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert error(model, fixed.model, new) < 0.5 * error(model, raw.model, new)
    for name in raw.masks:
        assert bool((fixed.model.get_parameter(name)[~fixed.masks[name]] == 0).all())
    assert fixed.repair is not None and raw.repair is None and fixed.kept == raw.kept and fixed.method == "magnitude"
    judged = sipp.assess(model, fixed.model, data)  # T17 says the same, whoever asks
    assert [layer.eps for layer in fixed.layers] == pytest.approx([layer.eps for layer in judged.layers])
    assert fixed.guarantee is not None and fixed.measured is None  # there is no holdout
    assert [layer.eps for layer in fixed.layers] != [layer.eps for layer in raw.layers]
    assert "repair" in str(fixed)


def test_rows_and_layers_say_that_biases_changed_beside_them() -> None:
    """Their bounds are of weights alone: here they are 0, and the layer moves by the bias."""
    model, data = trained(), points(400, 1)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("2.bias").add_(5.0)
    told = sipp.assess(model, other, data, holdout=points(80, 2))
    assert told.measured is not None and [layer.bound_measured for layer in told.layers] == [0.0, 0.0, 0.0]
    assert "not 2.bias, which changed too" in str(told.measured) and "not 2.bias" in told.details
    assert told.guarantee is not None and "not 2.bias" in str(replace(told.guarantee, reason=""))  # where it is met
    same = sipp.assess(model, model, data, holdout=points(80, 2))
    assert "changed too" not in str(same.measured) and "changed too" not in str(same.guarantee)
    fixed = sipp.prune(model, data, keep=0.4, repair=True, holdout=points(80, 2))
    assert fixed.measured is not None and fixed.measured.left_out and "changed too" in str(fixed.measured)
