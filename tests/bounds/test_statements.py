"""T4, T11, T12, T17, T19: recomputed by hand and by the oracle, never exceeded, and honest where they do not hold."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from oracles import bounds as oracle
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

import sipp
from sipp.bounds.statements import LEAST_OF_ROW, calibration_needed
from sipp.errors import ModelError, OptionError
from sipp.pruning.rows import eps_given
from sipp.results.jsonio import to_json
from sipp.results.pruned import Pruned


def mlp(sizes: tuple[int, ...] = (5, 7, 3), seed: int = 0, between: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), between())]
    return nn.Sequential(*layers[:-1])


def points(n: int, n_in: int = 5, seed: int = 0) -> Tensor:
    return torch.rand(n, n_in, generator=torch.Generator().manual_seed(seed)) - 0.3


def arrays(model: nn.Module) -> tuple[list[np.ndarray], list[np.ndarray]]:
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [m.weight.detach().double().numpy() for m in linears], [m.bias.detach().double().numpy() for m in linears]


# --- T17 -------------------------------------------------------------------------------------------------------------


def test_t17_by_hand() -> None:
    weight = torch.tensor([[1.0, 2.0, 4.0, 0.0], [1.0, 2.0, 4.0, 0.0], [1.0, 2.0, 4.0, 0.0]])
    sensitivity = torch.tensor([[0.1, 0.2, 0.7, 0.0]]).expand(3, 4)
    values = torch.tensor([[0.0, 2.0, 5.0, 0.0], [1.0, -2.0, 4.0, 0.0], [1.0, 2.0, 4.0, 0.5]])
    eps = eps_given(weight, values, sensitivity, c_constant=3.0)
    assert eps[:2].tolist() == pytest.approx([3 * (0.1 + 0.25 * 0.7), 3 * 2 * 0.2], rel=1e-7)
    assert eps[2] == math.inf
    assert eps_given(weight, values * math.nan, sensitivity, c_constant=3.0).isinf().all()


@pytest.mark.parametrize("method", ["magnitude", "random", "snip"])
def test_a_baseline_with_data_has_the_statement_of_any_mask(method: str) -> None:
    model, x = mlp(between=nn.ReLU), points(60)
    data = [(x[:40], torch.zeros(40).long()), (x[40:], torch.ones(20).long())]
    pruned = sipp.prune(model, data, keep=0.6, method=method)
    scores = oracle.sensitivities(*arrays(model), x.double().numpy())
    for layer, score, mask in zip(pruned.layers, scores, pruned.masks.values()):
        np.testing.assert_allclose(layer.eps_F.numpy(), 3 * np.where(mask.numpy(), 0, score).sum(1), rtol=1e-5)
        assert layer.bound == layer.eps * layer.sign_complexity and layer.eps_measured is None
        assert layer.strategies == {}
    assert pruned.guarantee is not None and pruned.bound.epsilon is not None and pruned.measured is None


def sipp_mine(task: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().abs() for name, weight in task.parameters().items()}


@pytest.mark.parametrize(("method", "repair"), [(sipp_mine, False), ("sipp-blend", False), ("sipp-hybrid", True)])
def test_rows_are_counted_by_strategy_only_where_sensitivities_alone_chose_them(method: Any, repair: bool) -> None:
    pruned = sipp.prune(mlp(), points(60), keep=0.6, method=method, repair=repair)
    assert all(layer.eps_F is not None and layer.strategies == {} for layer in pruned.layers)
    alone = sipp.prune(mlp(), points(60), keep=0.6, method="sipp-det")
    assert all(sum(layer.strategies.values()) == layer.n_rows for layer in alone.layers)


def test_without_data_or_with_an_iterator_that_is_used_up_the_reason_is_said() -> None:
    without = sipp.prune(mlp(), None, keep=0.5, method="magnitude")
    assert without.guarantee is None and without.measured is None and "was given no data" in without.bound.reason
    once = iter([(points(60), torch.zeros(60).long())])
    assert "used up" in sipp.prune(mlp(), once, keep=0.5, method="snip").bound.reason
    assert sipp.prune(mlp(), iter([points(60)]), keep=0.5, method="magnitude").guarantee is not None


def test_assess_gives_what_prune_gives_for_the_same_weights() -> None:
    model, x, new = mlp(), points(80), points(40, seed=1)
    for method in ("sipp-det", "magnitude"):
        pruned = sipp.prune(model, x, keep=0.5, method=method, holdout=new)
        for given in (pruned.model, pruned.masks):
            judged = sipp.assess(model, given, x, holdout=new)
            assert judged.method == "given" and judged.kept == pruned.kept == judged.budget
            assert [layer.eps for layer in judged.layers] == pytest.approx([layer.eps for layer in pruned.layers])
            assert judged.bound.epsilon == pytest.approx(pruned.bound.epsilon) and str(judged.guarantee) == str(
                pruned.guarantee
            )
            assert judged.measured.epsilon == pytest.approx(pruned.measured.epsilon)
            assert all(torch.equal(judged.masks[name], mask) for name, mask in pruned.masks.items())


def test_assess_of_repaired_and_of_revived_weights() -> None:
    model, x = mlp(), points(80)
    repaired = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight[0, 0] = 0
        repaired[0].weight[0, 0] = 0
        repaired[0].weight[1] *= 1.5
    judged = sipp.assess(model, repaired, x)
    sensitivity = sipp.sensitivity(model, x)["0.weight"]
    assert judged.layers[0].eps_F[1] == pytest.approx(3 * 0.5 * float(sensitivity[1].double().sum()), rel=1e-6)
    assert judged.layers[0].eps_F[0] == 0 and judged.layers[1].eps == 0
    with torch.no_grad():
        repaired[0].weight[0, 0] = 1.0
    revived = sipp.assess(model, repaired, x)
    assert revived.layers[0].eps == math.inf and not revived.bound.met
    assert "1 row has a weight that was 0 and no longer is" in revived.guarantee.reason
    with torch.no_grad():
        repaired[0].weight[0, 0] = 0.0
        repaired[2].bias += 1
    moved = sipp.assess(model, repaired, x, holdout=points(40, seed=1))
    assert "2.bias changed" in moved.bound.reason and moved.measured.epsilon is None


def test_assess_refuses_by_name() -> None:
    model, x = mlp(), points(40)
    for masks, word in (
        ({"7.weight": torch.ones(7, 5).bool()}, "7.weight"),
        ({"0.weight": torch.ones(5, 7).bool()}, r"\(7, 5\)"),
        ({"0.weight": [True]}, "not a bool tensor"),
        ({"0.weight": torch.full((7, 5), 0.5)}, "not a bool tensor"),
    ):
        with pytest.raises(OptionError, match=word):
            sipp.assess(model, masks, x)
    with pytest.raises(ModelError, match="shapes"):
        sipp.assess(model, mlp((5, 8, 3)), x)
    masked = copy.deepcopy(model)
    torch_prune.l1_unstructured(masked[0], "weight", amount=0.4)
    with pytest.raises(ModelError, match=r"sipp\.release"):
        sipp.assess(model, masked, x)
    assert sipp.assess(model, {"0.weight": masked[0].weight_mask.bool()}, x).kept == 35 - 14 + 21
    with pytest.raises(ModelError, match="str"):
        sipp.assess(model, "masks", x)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="holdout"):
        sipp.assess(model, model, x, bound="sound")
    assert sipp.assess(model, model, x, bound="sound", holdout=points(30, seed=1)).bound.epsilon == 0


# --- T4: what the data refutes, and what counts as a point -----------------------------------------------------------


def test_an_assumption_that_the_data_refutes_is_contradicted_never_met() -> None:
    """One row of 30 equal inputs: every ratio is 1/30 < 1/3 at every point."""
    model = nn.Linear(30, 1, bias=False)
    nn.init.ones_(model.weight)
    x = torch.ones(400, 30) * torch.linspace(1, 2, 400)[:, None]
    pruned = sipp.prune(model, x, keep=0.5, method="sipp-det", delta=0.1)
    found = pruned.guarantee
    assert (found.verdict, found.n_never_above, found.n_weights) == ("contradicted by the data", 30, 30)
    assert not found.met and not pruned.bound.met and found.n >= found.n_needed
    assert "more than 1/C = 0.333 of its row's sum, but 30 of 30 never did in 400 inputs" in found.reason
    enough = sipp.prune(model, x, keep=0.5, method="sipp-det", delta=0.1, c_constant=31.0)
    assert enough.guarantee.met and enough.bound.met and enough.guarantee.n_never_above == 0
    few = sipp.prune(model, x[:20], keep=0.5, method="sipp-det", delta=0.1)
    assert few.guarantee.verdict == "not met"  # exp(-20/3) is not small enough to refute anything
    # one weight in a thousand may stay below 1/C by chance as long as so many would be expected to
    assert not replace(found, n_weights=1000, n_never_above=1, n=30).contradicted
    assert replace(found, n_weights=1000, n_never_above=1, n=45).contradicted


def test_far_more_weights_than_expected_refute_an_assumption_that_expects_some() -> None:
    found = sipp.prune(mlp(), points(40), keep=0.5, method="sipp-det").guarantee
    # 1000 exp(-30/3) = 0.045 are expected, 100 were found: by Markov's inequality their probability is below 0.0005
    assert replace(found, n_weights=1000, n_never_above=100, n=30, k_constant=3.0).contradicted


def test_one_point_repeated_is_one_point() -> None:
    x = points(1).expand(500, 5)
    pruned = sipp.prune(mlp(), x, keep=0.5, method="sipp-det", delta=0.1, c_constant=1e6)
    assert pruned.guarantee.n == 1 and "equal ones counted once" in pruned.guarantee.reason
    assert pruned.guarantee.layers.share == pytest.approx(0.95)
    batches = [points(8)] * 50
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert sipp.prune(model, batches, keep=0.9, norm_stats="batch", method="sipp-det").guarantee.n == 1
    sound = sipp.prune(mlp(), x, keep=0.9, bound="sound")
    assert sound.bound.coverage is None and not sound.bound.met  # nothing different could be held back


@pytest.mark.parametrize("method", ["sipp-det", "sipp-hybrid", "sipp-simple", "magnitude"])
def test_as_many_points_as_the_theory_asks_for_are_enough_and_one_fewer_is_not(method: str) -> None:
    x = points(400)
    factor = 16 if method == "sipp-simple" else 8  # T4; eta = 7 + 3 outputs, rho = 7
    n = math.ceil(3 * math.log(factor * 10 * 7 / 1e-16))
    for n_given in (n, n - 1):
        pruned = sipp.prune(mlp(), x[:n_given], keep=0.5, method=method, c_constant=1e6, draws="fixed")
        assert (pruned.guarantee.n, pruned.guarantee.n_needed) == (n_given, n)
        assert pruned.guarantee.met is (n_given == n), pruned.guarantee
    assert method == "sipp-simple" or sipp.sample_size(mlp(), x[:1]) == n


# --- T19 -------------------------------------------------------------------------------------------------------------


def test_the_measured_constant_is_that_of_the_definition() -> None:
    """Point by point, row by row: the largest g_j(x) / s_j over the holdout, s_j floored."""
    model, x, new = mlp(seed=3, between=nn.ReLU), points(38, seed=4) + 0.35, points(12, seed=5) + 0.35
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()  # every input counts at every point, so that no ratio is 1
    pruned = sipp.prune(model, [x[:17], x[17:]], keep=0.5, method="magnitude", holdout=[new[:5], new[5:]])
    weights, biases = arrays(model)
    limits = []
    for score in oracle.sensitivities(weights, biases, x.double().numpy()):
        most = score.max(1, keepdims=True)
        limits.append(np.maximum(score, LEAST_OF_ROW * np.where(most > 0, most, 1.0)))
    ratios = [
        max(float((g / limit).max()) for g, limit in zip(oracle.sensitivities(weights, biases, one[None]), limits))
        for one in new.double().numpy()
    ]
    found = pruned.measured
    assert found.n == len(new) and found.share == pytest.approx(1 - 0.05 ** (1 / len(new)))
    assert found.c_constant == pytest.approx(max(ratios), rel=1e-4) and max(ratios) > 1.01
    for layer, limit, mask in zip(pruned.layers, limits, pruned.masks.values()):
        lost = np.where(mask.numpy(), 0, limit).sum(1)
        assert layer.eps_measured == pytest.approx(float(lost.max()) * found.c_constant, rel=1e-5)
    seen = sipp.check_assumption(model, x, new).measured  # the same of single inputs
    assert seen.c_constant == pytest.approx(found.c_constant, rel=1e-6)
    assert (seen.n, seen.share) == (found.n, pytest.approx(found.share))


def test_where_nothing_is_measured_the_reason_is_said() -> None:
    def reason(model: nn.Module, x: Any, new: Any, **options: Any) -> str:
        found = sipp.prune(model, x, keep=0.9, method="sipp-det", holdout=new, **options)
        assert found.measured.c_constant is None and all(layer.eps_measured is None for layer in found.layers)
        return found.measured.reason

    normed = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert "mean" in reason(mlp(), points(80), points(40, seed=1), reduce="mean")
    batches = [points(8, seed=i) for i in range(9)]
    assert "batch statistics" in reason(normed, batches[:6], batches[6:], norm_stats="batch")
    assert "too few inputs: 4 of the holdout are new" in reason(mlp(), points(16), points(4, seed=1))
    assert "too few inputs: 0 of the holdout are new" in reason(mlp(), points(80), points(80))


def test_print_and_record_state_assumed_and_measured_constants() -> None:
    model, x, new = mlp((40, 20, 3)), points(300, 40), points(64, 40, seed=1)
    pruned = sipp.prune(model, x, keep=0.5, method="sipp-det", holdout=new)
    text = " ".join(pruned.details.split())
    assert "contradicted by the data" in text
    assert (
        "For all but 4.58 % of new inputs from the same source, every row stays within its measured eps, 95 %" in text
    )
    assert pruned.bound.coverage.share == pytest.approx(1 - 0.05 ** (1 / 64))
    record = to_json(pruned)
    assert record["guarantee"]["verdict"] == "contradicted by the data" and record["bound"]["met"] is False
    assert record["measured"]["sentence"] == pruned.measured.sentence  # also where no bound says anything


@pytest.mark.parametrize("scale", [1e180, 1e-180])
def test_norms_beyond_the_range_of_float64_make_no_claim_stronger(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)).double()
    x, new = (torch.randn(n, 6).double() * scale for n in (200, 60))
    pruned = sipp.prune(model, x, keep=0.5, method="sipp-det", delta=0.1, holdout=new)
    assert all(layer.bound == math.inf for layer in pruned.layers if layer.eps)
    assert not pruned.bound.met and pruned.measured.epsilon is None


# --- T12 --------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["sipp-det", "sipp-hybrid"])
def test_network_epsilon_equals_the_oracle(seed: int, method: str) -> None:
    model = mlp((5, 7, 6, 3), seed, nn.ReLU)
    points = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed + 100))
    pruned = sipp.prune(model, points, keep=0.5, method=method, delta=1e-3, draws="fixed")
    weights, biases = arrays(model)
    expected = oracle.network_epsilon(
        weights, arrays(pruned.model)[0], biases, points.double().numpy(), [layer.eps for layer in pruned.layers]
    )
    assert pruned.bound.epsilon == pytest.approx(expected, rel=1e-5)
    if method == "sipp-det":
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
    for trial in range(12):
        method = ("sipp-det", "sipp-simple", "sipp-hybrid", "sipp-rand")[trial % 4]
        model = mlp((6, 8, 4), trial)  # tanh: no unit is dead
        generator = torch.Generator().manual_seed(trial)
        points = torch.rand(200, 6, generator=generator) - 0.2 * (trial % 3)
        pruned = sipp.prune(
            model,
            points,
            keep=0.6,
            method=method,
            delta=0.05,
            draws="fixed",
            seed=trial,
            c_constant=1e4,
        )
        assert pruned.bound.met, pruned.bound.reason
        fresh = torch.rand(500, 6, generator=generator) - 0.2 * (trial % 3)
        excess = max(excess, worst_excess(pruned, model, fresh, factor=1.0))
        excess_of_broken = max(excess_of_broken, worst_excess(pruned, model, fresh, factor=1e-7))
    assert excess <= 1
    assert excess_of_broken > 1  # the check can fail: a bound that is far too strong is caught


def test_sample_size_formula_and_its_directions() -> None:
    assert calibration_needed(100, 50, 1e-16, factor=8, k_constant=3.0) == math.ceil(3 * math.log(8 * 100 * 50 / 1e-16))
    conv = nn.Conv2d(3, 5, 3)
    assert sipp.sample_size(conv, torch.rand(2, 3, 6, 6), delta=0.1) == math.ceil(3 * math.log(8 * 5 * 16 * 27 / 0.1))
    model, x = mlp((6, 8, 4)), points(50, 6)
    options = {"keep": 0.5, "method": "sipp-rand", "draws": "fixed"}
    found = [sipp.prune(model, x, delta=delta, **options) for delta in (0.1, 1e-4, 1e-16)]
    for values in ([one.guarantee.n_needed for one in found], [one.layers[0].eps for one in found]):
        assert values == sorted(set(values))  # a smaller delta tightens nothing


def test_batch_statistics_speak_of_batches() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    data = [torch.randn(16, 4) for _ in range(5)]
    pruned = sipp.prune(model, data, keep=0.5, norm_stats="batch", method="sipp-det")
    assert (pruned.guarantee.unit, pruned.guarantee.n) == ("batches", 5)
    running = sipp.prune(model, data, keep=0.5, method="sipp-det")
    assert (running.guarantee.unit, running.guarantee.n) == ("inputs", 80)


def test_until_draws_are_not_claimed_to_meet_t6() -> None:
    model = mlp((40, 30, 4), 3)
    points = torch.rand(400, 40, generator=torch.Generator().manual_seed(0))
    options = {"keep": 0.5, "method": "sipp-rand", "delta": 0.1, "c_constant": 1e4}
    until = sipp.prune(model, points, **options)
    fixed = sipp.prune(model, points, draws="fixed", **options)
    assert sum(layer.strategies["rand"] for layer in until.layers) > 0
    assert not until.guarantee.met and "fixed" in until.guarantee.reason
    assert fixed.guarantee.met and fixed.bound.met


def test_the_bound_of_a_network_with_sampled_rows_needs_more_inputs() -> None:
    """T4's factor for T12 leaves no share of delta to sampling."""
    model, x = mlp(between=nn.ReLU), points(40)
    sampled, sorted_rows = (
        sipp.prune(model, x, keep=0.5, method=method, draws="fixed") for method in ("sipp-rand", "sipp-det")
    )
    assert sampled.bound.guarantee.n_needed > sorted_rows.bound.guarantee.n_needed
