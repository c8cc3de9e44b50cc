"""Bounds for any mask and new values (T17), if the data refutes T4, and with a measured constant (T19)."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import draws_for, eps_det, eps_rand, sparsify
from oracles import bounds as oracle
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.nn.utils.rnn import pack_padded_sequence

import sipp
from sipp.bounds.assumption import LEAST_OF_ROW
from sipp.errors import ModelError, OptionError
from sipp.pruning.ranking import rank
from sipp.pruning.rows import RAND, eps_given
from sipp.results import Coverage
from sipp.results.jsonio import to_json
from sipp.results.options import PruneOptions
from sipp.scoring.task import task_of


def mlp(sizes: tuple[int, ...] = (5, 7, 3), seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def points(n: int, n_in: int = 5, seed: int = 0) -> Tensor:
    return torch.rand(n, n_in, generator=torch.Generator().manual_seed(seed)) - 0.3


def arrays(model: nn.Module) -> tuple[list[np.ndarray], list[np.ndarray]]:
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return [m.weight.detach().double().numpy() for m in linears], [m.bias.detach().double().numpy() for m in linears]


class ReluNet(nn.Sequential):
    """As the oracle computes it."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))


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
    model, x = ReluNet(), points(60)
    data = [(x[:40], torch.zeros(40).long()), (x[40:], torch.ones(20).long())]
    pruned = sipp.prune(model, data, keep=0.6, method=method)
    scores = oracle.sensitivities(*arrays(model), x.double().numpy())
    for layer, score, mask in zip(pruned.layers, scores, pruned.masks.values()):
        np.testing.assert_allclose(layer.eps_F.numpy(), 3 * np.where(mask.numpy(), 0, score).sum(1), rtol=1e-5)
        assert layer.bound == layer.eps * layer.sign_complexity and layer.eps_measured is None
        assert layer.strategies == {}
    assert pruned.guarantee is not None and pruned.bound.epsilon is not None and pruned.measured is None


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
        ({"0.weight": [True]}, "list"),
        ({"0.weight": torch.full((7, 5), 0.5)}, "0 and 1"),
    ):
        with pytest.raises(ModelError, match=word):
            sipp.assess(model, masks, x)
    with pytest.raises(ModelError, match="shapes"):
        sipp.assess(model, mlp((5, 8, 3)), x)
    masked = copy.deepcopy(model)
    torch_prune.l1_unstructured(masked[0], "weight", amount=0.4)
    with pytest.raises(ModelError, match=r"sipp\.release"):
        sipp.assess(model, masked, x)
    assert sipp.assess(model, {"0.weight": masked[0].weight_mask}, x).kept == 35 - 14 + 21
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


def test_one_point_repeated_is_one_point() -> None:
    x = points(1).expand(500, 5)
    pruned = sipp.prune(mlp(), x, keep=0.5, method="sipp-det", delta=0.1, c_constant=1e6)
    assert pruned.guarantee.n == 1 and "equal ones counted once" in pruned.guarantee.reason
    assert pruned.guarantee.layers.share == pytest.approx(0.95)
    batches = [points(8)] * 50
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert sipp.prune(model, batches, keep=0.9, norm_stats="batch", method="sipp-det").guarantee.n == 1
    sound = sipp.prune(mlp(), x, keep=0.9, bound="sound")
    assert sound.bound.coverage.n == 0 and not sound.bound.met
    lstm, sequence = nn.LSTM(5, 3, batch_first=True), torch.rand(3, 4, 5)
    packed = pack_padded_sequence(sequence, [4, 3, 2], batch_first=True)
    assert rank(task_of(lstm, [packed, packed]), PruneOptions(method="sipp-det")).sensitivities.n_distinct == 3


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


# --- T8: fixed draws and the budget ----------------------------------------------------------------------------------


def test_hybrid_rows_take_the_smaller_bound_of_the_draws_they_get() -> None:
    """Many rows near the tie: a number of draws rounded down must not make the sampled bound the larger one."""
    rng = torch.Generator().manual_seed(1)
    weight, sensitivity = torch.rand(2000, 40, generator=rng) + 0.1, torch.rand(2000, 40, generator=rng) + 0.5
    sensitivity[:, 4:] *= torch.logspace(0, -2, 2000)[:, None]
    kept = torch.full((2000,), 8)
    options: dict[str, Any] = {"n_outputs": 1, "delta": 0.9, "c_constant": 0.3}
    rows = sparsify(weight, sensitivity, kept, method="hybrid", draws="fixed", **options)
    n_draws = draws_for(sensitivity, kept).add(1e-9).floor()
    least = torch.minimum(
        eps_det(sensitivity, kept, c_constant=0.3), eps_rand(sensitivity.double().sum(1), n_draws, **options)
    )
    torch.testing.assert_close(rows.eps_F, least, rtol=1e-9, atol=0)
    assert 100 < int((rows.strategy_FS == RAND).sum()) < 1900


# --- T19 -------------------------------------------------------------------------------------------------------------


def test_the_measured_constant_is_that_of_the_definition() -> None:
    """Point by point, row by row: the largest g_j(x) / s_j over the holdout, s_j floored."""
    model, x, new = ReluNet(3), points(38, seed=4) + 0.35, points(12, seed=5) + 0.35
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
    text = pruned.details
    assert "contradicted by the data" in text and text.index("what it costs") < text.index("measured:")
    said = "For all but 4.58 % of new inputs from the same source, every row stays within its measured eps, 95 % sure"
    assert said in " ".join(text.split())
    assert "1e-16" not in pruned.measured.sentence and "with probability" not in text
    assert pruned.bound.coverage == Coverage.of(64, 1, 0.95)
    record = to_json(pruned)
    assert record["guarantee"]["verdict"] == "contradicted by the data"
    assert record["measured"]["c_constant"] == pruned.measured.c_constant
    assert record["bound"]["coverage"]["q"] == 1 and record["bound"]["met"] is False
    assert record["measured"]["sentence"] == pruned.measured.sentence  # also where no bound says anything
    lossless = sipp.prune(model, x, keep=0.999, method="sipp-det", holdout=new)
    assert any(line.startswith("measured:") for line in str(lossless.sheet_with(in_shell=True)).splitlines())


@pytest.mark.parametrize("scale", [1e180, 1e-180])
def test_norms_beyond_the_range_of_float64_make_no_claim_stronger(scale: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)).double()
    x, new = (torch.randn(n, 6).double() * scale for n in (200, 60))
    pruned = sipp.prune(model, x, keep=0.5, method="sipp-det", delta=0.1, holdout=new)
    assert all(layer.bound == math.inf for layer in pruned.layers if layer.eps)
    assert not pruned.bound.met and pruned.measured.epsilon is None
