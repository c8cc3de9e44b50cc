"""T4, T11 and T12: recomputed by hand, never exceeded, and honest about when they do not bind."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from oracles import bounds as oracle
from torch import Tensor, nn

import sipp
from sipp.errors import OptionError
from sipp.inputs.data import as_batch
from sipp.inputs.structure import why_no_chain
from sipp.inputs.trace import trace_layers
from sipp.results.pruned import Pruned
from sipp.scoring.task import calibration_needed


def recorded(model: Any, batch: Any) -> Any:
    return trace_layers(model, (), batch).run


N_TRIALS = 25
DELTA = 0.05
LARGE_C = 1e4  # 1/C is small enough for every weight of these networks to exceed it: the assumption is not refuted


def mlp(sizes: list[int], *, seed: int, bias: bool = True, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layer = nn.Linear(n_in, n_out, bias=bias)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        layers += [layer, between()]
    return nn.Sequential(*layers[:-1])


def arrays(model: nn.Module) -> tuple[list[np.ndarray], list[np.ndarray]]:
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    weights = [m.weight.detach().double().numpy() for m in linears]
    biases = [np.zeros(m.out_features) if m.bias is None else m.bias.detach().double().numpy() for m in linears]
    return weights, biases


def test_two_layers_by_hand() -> None:
    """x = (1, 1): Z1 = (4, 4), Z2 = f = 8. Ratios are 1/4 3/4 | 1/2 1/2 and 1/2 1/2; all signs agree, so Delta = 1."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 1.0]]))
    pruned = sipp.prune(model, torch.ones(1, 2), budget=4, method="sipp-det", delta=0.5)
    assert pruned.masks["0.weight"].tolist() == [[False, True], [True, True]]
    assert pruned.masks["2.weight"].tolist() == [[True, False]]
    first, second = pruned.layers
    assert (first.eps, second.eps) == (3 * 0.25, 3 * 0.5)
    assert first.eps_F.tolist() == [0.75, 0.0]
    assert (first.sign_complexity, second.sign_complexity) == (1.0, 1.0)
    assert first.kappa == pytest.approx(math.sqrt(2) * math.sqrt(32) / 8, rel=1e-15)
    assert second.kappa == 1.0
    assert first.bound == 0.75
    assert pruned.bound.epsilon == pytest.approx(1 * 0.75 + 1 * 1.5, rel=1e-15)
    needed = math.ceil(3 * math.log(6 * 3 * 2 / 0.5))  # T4 with c = 6, eta = 2 + 1 outputs, rho = 2
    assert pruned.bound.guarantee.n_needed == needed
    assert not pruned.bound.met
    assert f"n=1, needs {needed}" in pruned.bound.reason


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ["sipp-det", "sipp-simple", "sipp-rand", "sipp-hybrid"])
def test_network_epsilon_equals_the_oracle(seed: int, method: str) -> None:
    model = mlp([5, 7, 6, 3], seed=seed)
    points = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed + 100))
    pruned = sipp.prune(model, points, keep=0.5, method=method, delta=1e-3, draws="fixed")
    weights, biases = arrays(model)
    expected = oracle.network_epsilon(
        weights, arrays(pruned.model)[0], biases, points.double().numpy(), [layer.eps for layer in pruned.layers]
    )
    assert pruned.bound.epsilon == pytest.approx(expected, rel=1e-5)
    if method in ("sipp-det", "sipp-simple"):
        scores = oracle.sensitivities(weights, biases, points.double().numpy())
        for layer, score, mask in zip(pruned.layers, scores, pruned.masks.values()):
            tails = np.where(mask.numpy(), 0, score).sum(1)
            np.testing.assert_allclose(layer.eps_F.numpy(), 3 * tails, rtol=1e-5, atol=1e-7)


def worst_excess(pruned: Pruned, model: nn.Module, fresh: Tensor, factor: float) -> float:
    """The largest of ||f^ - f|| / (factor * epsilon * ||f||) over fresh points: above 1 the statement fails."""
    assert pruned.bound.epsilon is not None
    with torch.no_grad():
        dense, sparse = model(fresh).double(), pruned.model(fresh).double()
    return float(((sparse - dense).norm(dim=1) / (factor * pruned.bound.epsilon * dense.norm(dim=1))).max())


def test_the_true_error_never_exceeds_a_met_bound() -> None:
    excess, excess_of_broken = 0.0, 0.0
    for trial in range(N_TRIALS):
        method = ("sipp-det", "sipp-simple", "sipp-hybrid", "sipp-rand")[trial % 4]
        model = mlp([6, 8, 4], seed=trial, bias=trial % 2 == 0, between=nn.Tanh)  # no unit is dead
        generator = torch.Generator().manual_seed(trial)
        points = torch.rand(200, 6, generator=generator) - 0.2 * (trial % 3)
        pruned = sipp.prune(
            model,
            points,
            keep=0.6,
            method=method,
            delta=DELTA,
            draws="fixed",
            seed=trial,
            c_constant=LARGE_C,
        )
        assert pruned.bound.met, pruned.bound.reason
        fresh = torch.rand(500, 6, generator=generator) - 0.2 * (trial % 3)
        excess = max(excess, worst_excess(pruned, model, fresh, factor=1.0))
        excess_of_broken = max(excess_of_broken, worst_excess(pruned, model, fresh, factor=1e-7))
    assert excess <= 1
    assert excess_of_broken > 1  # the check can fail: a bound that is far too strong is caught


def test_sample_size_formula_and_its_directions() -> None:
    assert calibration_needed(100, 50, 1e-16, factor=8, k_constant=3.0) == math.ceil(3 * math.log(8 * 100 * 50 / 1e-16))
    model = mlp([4, 3, 2], seed=0)
    eta, rho = 3 + 2, 4
    assert sipp.sample_size(model, torch.rand(7, 4), delta=1e-16) == math.ceil(3 * math.log(8 * eta * rho / 1e-16))
    conv = nn.Conv2d(3, 5, 3)
    assert sipp.sample_size(conv, torch.rand(2, 3, 6, 6), delta=0.1) == math.ceil(3 * math.log(8 * 5 * 16 * 27 / 0.1))
    for delta in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(OptionError, match="delta"):
            sipp.sample_size(model, torch.rand(7, 4), delta=delta)


def test_a_smaller_delta_never_tightens_a_bound() -> None:
    model = mlp([6, 8, 4], seed=1)
    points = torch.randn(50, 6, generator=torch.Generator().manual_seed(2))
    for method in ("sipp-det", "sipp-rand", "sipp-hybrid"):
        previous = math.inf
        for delta in (1e-16, 1e-8, 1e-4, 0.1):
            ranking = sipp.prune(model, points, keep=1.0, method=method, delta=delta)
            assert ranking.bound.epsilon == 0
        for delta in (0.1, 1e-4, 1e-8, 1e-16):
            needed = sipp.prune(
                model, points, keep=0.5, method=method, delta=delta, draws="fixed"
            ).bound.guarantee.n_needed
            assert needed >= (0 if previous == math.inf else previous)
            previous = needed


def test_batch_statistics_speak_of_batches() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    data = [torch.randn(16, 4) for _ in range(5)]
    pruned = sipp.prune(model, data, keep=0.5, norm_stats="batch", method="sipp-det")
    assert (pruned.guarantee.unit, pruned.guarantee.n) == ("batches", 5)
    running = sipp.prune(model, data, keep=0.5, method="sipp-det")
    assert (running.guarantee.unit, running.guarantee.n) == ("inputs", 80)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) + x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.size(0), -1)
        return self.second(torch.relu(self.first(x)))


def obstacle(model: nn.Module, *sizes: int) -> str:
    weights = {name for name, _ in model.named_parameters() if name.endswith("weight")}
    return why_no_chain(model, recorded(model, as_batch(torch.rand(3, *sizes), 0, "points")), weights)


def test_the_papers_formula_says_where_it_is_no_bound() -> None:
    assert obstacle(Plain(), 4) == ""
    assert obstacle(mlp([3, 4, 5, 2], seed=0), 3) == ""
    assert obstacle(nn.Linear(3, 2), 3) == ""
    assert obstacle(nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(0.2), nn.Dropout(), nn.Softmax(-1)), 3) == ""
    shared = nn.Linear(3, 3)
    assert "convolution" in obstacle(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), 1, 4, 4)
    assert "add" in obstacle(Residual(), 4)
    assert "GELU" in obstacle(nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 2)), 3)
    assert "twice" in obstacle(nn.Sequential(shared, nn.ReLU(), shared), 3)
    assert "BatchNorm1d" in obstacle(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), 3)
    assert "slope" in obstacle(nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(7.0)), 3)
    assert "the others in its batch" in obstacle(nn.Sequential(nn.Linear(3, 3), nn.Softmax(0)), 3)


def test_until_draws_are_not_claimed_to_meet_t6() -> None:
    model = mlp([40, 30, 4], seed=3, between=nn.Tanh)
    points = torch.rand(400, 40, generator=torch.Generator().manual_seed(0))
    options = {"keep": 0.5, "method": "sipp-rand", "delta": 0.1, "c_constant": LARGE_C}
    until = sipp.prune(model, points, **options)
    fixed = sipp.prune(model, points, draws="fixed", **options)
    assert sum(layer.strategies["rand"] for layer in until.layers) > 0
    assert not until.guarantee.met and "fixed" in until.guarantee.reason
    assert fixed.guarantee.met and fixed.bound.met


def small_conv_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 6)
    ).eval()


def test_sound_mode_bounds_what_the_papers_formula_cannot() -> None:
    model, points = small_conv_net(), torch.rand(120, 1, 5, 5)
    pruned = sipp.prune(model, points, keep=0.5, method="sipp-det", delta=0.1, bound="sound")
    assert pruned.bound.mode == "sound" and pruned.bound.met, pruned.bound.reason
    with torch.no_grad():
        dense, sparse = model(points).double(), pruned.model(points).double()
    errors = (sparse - dense).norm(dim=1) / dense.norm(dim=1)
    assert float(errors.max()) <= pruned.bound.epsilon


def test_sound_mode_names_the_operation_it_cannot_bound() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    pruned = sipp.prune(model, torch.rand(50, 4), keep=0.5, bound="sound")
    assert pruned.bound.epsilon is None and not pruned.bound.met
    assert "LayerNorm" in pruned.bound.reason
