"""The assumption of T4 made visible: against brute force, by hand, and what it must not do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from oracles import assumption as oracle, sensitivity as patches_oracle
from oracles.sensitivity import f64
from torch import Tensor, nn

from sipp.bounds.assumption import check_assumption
from sipp.errors import DataError, ModelError
from sipp.results.assumption import Assumption

Seen = dict[str, tuple[int, int, int]]
N_CALIBRATION, N_HOLDOUT = 3, 5


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def seeded(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The module with standard normal parameters."""
    with torch.no_grad():
        for i, parameter in enumerate(module.to(dtype).parameters()):
            parameter.copy_(randn(*parameter.shape, seed=100 + i, dtype=dtype))
    return module


def linear(weight: list[list[float]]) -> nn.Linear:
    """A Linear with the given rows and no bias."""
    module = nn.Linear(len(weight[0]), len(weight), bias=False)
    module.weight = nn.Parameter(torch.tensor(weight))
    return module


def counts(seen: Assumption) -> Seen:
    """{weight: (holding, failures, pairs)}."""
    return {layer.name: (layer.n_holding, layer.es_failures, layer.n_pairs) for layer in seen.layers}


# --- Against brute force ---------------------------------------------------------------------------------------------

Rows = dict[str, list[oracle.Row]]


class Twice(nn.Module):
    """One module called twice, on several vectors a point and on one."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(torch.tanh(self.f(x)).mean(1))


def linear_case() -> tuple[nn.Module, Tensor, Tensor, Rows]:
    model = seeded(nn.Linear(6, 3))
    x, y = randn(N_CALIBRATION, 2, 6), randn(N_HOLDOUT, 2, 6, seed=1)
    y[0, 0, 0], model.weight.data[1, 1] = 0.0, 0.0  # pairs that do not count
    points = [patches_oracle.linear_points(data) for data in (x, y)]
    return model, x, y, {"weight": oracle.rows_of(f64(model.weight), *points)}


def conv_case() -> tuple[nn.Module, Tensor, Tensor, Rows]:
    conv = seeded(nn.Conv2d(4, 6, (2, 1), stride=2, padding=1, groups=2))
    x, y = randn(N_CALIBRATION, 4, 3, 4), randn(N_HOLDOUT, 4, 3, 4, seed=1)
    by_group = [patches_oracle.conv_points(conv, data) for data in (x, y)]
    filters = f64(conv.weight).reshape(6, -1)
    return conv, x, y, {"weight": [(w, by_group[0][i // 3], by_group[1][i // 3]) for i, w in enumerate(filters)]}


def twice_case() -> tuple[nn.Module, Tensor, Tensor, Rows]:
    model = seeded(Twice())
    x, y = randn(N_CALIBRATION, 3, 6), randn(N_HOLDOUT, 3, 6, seed=1)
    with torch.no_grad():
        hidden = [torch.tanh(model.f(data)).mean(1) for data in (x, y)]
    points = [
        patches_oracle.union(patches_oracle.linear_points(data), patches_oracle.linear_points(inner))
        for data, inner in zip((x, y), hidden)
    ]
    return model, x, y, {"f.weight": oracle.rows_of(f64(model.f.weight), *points)}


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor, Rows]]] = {
    "linear": linear_case,
    "conv": conv_case,
    "twice": twice_case,
}


@pytest.mark.parametrize(("c_constant", "k_constant"), [(1.0, 3.0), (1.5, 1.0), (6.0, 0.5)])
@pytest.mark.parametrize("case", CASES)
def test_equals_brute_force(case: str, c_constant: float, k_constant: float) -> None:
    model, x, y, rows = CASES[case]()
    expected = {name: oracle.look(of_name, c_constant, k_constant) for name, of_name in rows.items()}
    seen = check_assumption(model, [x[:2], x[2:]], [y], c_constant=c_constant, k_constant=k_constant)
    assert counts(seen) == expected
    assert [layer.n_weights for layer in seen.layers] == [p.numel() for n, p in model.named_parameters() if n in rows]
    for layer in seen.layers:
        assert layer.share_holding == layer.n_holding / layer.n_weights
        assert layer.es_failure_share == layer.es_failures / layer.n_pairs
    assert counts(dataclasses.replace(seen, layers=(seen.total,))) == {
        "all": tuple(map(sum, zip(*expected.values(), strict=True)))
    }


def test_batches_change_nothing() -> None:
    model, x, y, _ = conv_case()
    whole = check_assumption(model, [x], [y], c_constant=1.0)
    assert whole.total.es_failures
    assert check_assumption(model, list(x.split(1)), list(y.split(3)), c_constant=1.0) == whole


# --- By hand ---------------------------------------------------------------------------------------------------------


def test_a_ratio_of_exactly_one_over_c_does_not_exceed_it() -> None:
    """Equal products of a row: each ratio is 1/13, which float32 rounds up."""
    x = torch.full((4, 13), 0.3)
    assert check_assumption(linear([[1.0] * 13]), x, c_constant=13.0).total.n_holding == 0
    assert check_assumption(linear([[1.0] * 13]), x, c_constant=13.01).total.n_holding == 13


# --- The calibration points as the holdout ---------------------------------------------------------------------------


def test_no_calibration_point_breaks_the_inequality_at_c_1() -> None:
    """s_j is the largest ratio of these very points; for C = 1/2 the largest itself fails, so the check can be red."""
    for dtype in (torch.float32, torch.bfloat16):
        model, x = (
            seeded(nn.Sequential(nn.Linear(500, 20), nn.ReLU(), nn.Linear(20, 4)), dtype),
            randn(6, 500, dtype=dtype),
        )
        assert check_assumption(model, [x], [x[:1], x[1:]], c_constant=1.0).total.es_failures == 0
        assert check_assumption(model, [x], [x], c_constant=0.5).total.es_failures > 0


@pytest.mark.parametrize("factor", [1e9, 2.0**-600])
def test_scales_change_nothing(factor: float) -> None:
    """Also where a product of weight and activation leaves the range of float64."""
    model, x, y, _ = linear_case()
    before = check_assumption(model, [x], [y], c_constant=1.0)
    assert before.total.es_failures
    model.weight.data *= factor
    after = check_assumption(model, [x * factor], [y * factor], c_constant=1.0)
    assert dataclasses.replace(after, measured=before.measured) == before
    assert after.measured.c_constant == pytest.approx(before.measured.c_constant, rel=1e-6)


# --- Kinds of data, and what is left as it was -----------------------------------------------------------------------


@pytest.mark.parametrize("norm_stats", ["running", "batch"])
def test_batch_statistics_make_it_speak_of_batches(norm_stats: str) -> None:
    model = seeded(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)))
    x = randn(6, 3)
    seen = check_assumption(model, [x[:4], x[4:]], [x[:4]], norm_stats=norm_stats, c_constant=1.0)
    expected = ("inputs", 6, 4) if norm_stats == "running" else ("batches", 2, 1)
    assert (seen.unit, seen.n_calibration, seen.n_holdout) == expected
    assert seen.total.es_failures == 0


class Sometimes(nn.Module):
    """A branch for points with a positive first coordinate and another for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = linear([[1.0, 1.0]]), linear([[1.0, 2.0]])

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x) if x[0, 0] > 0 else self.g(x)


def test_a_layer_that_some_points_do_not_reach() -> None:
    """g is met by one point of four only: too rarely for either weight of it."""
    x = torch.tensor([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [-1.0, 1.0]])
    assert counts(check_assumption(Sometimes(), x, x)) == {"f.weight": (2, 0, 6), "g.weight": (0, 0, 2)}
    with pytest.raises(ModelError, match=r"no input reached g\.weight"):
        check_assumption(Sometimes(), x[:3], x)


def test_the_constant_is_measured_only_on_points_that_are_new() -> None:
    model, x = linear([[1.0, 2.0]]), randn(60, 2, dtype=torch.float32)
    measured = check_assumption(model, x, x).measured
    assert measured.n == 0 and measured.c_constant is None
    assert check_assumption(model, x, torch.cat([x, 1 + x[:30]])).measured.n == 30


# --- Refusals and words ----------------------------------------------------------------------------------------------


def test_refuses_values_that_are_not_finite_and_names_them() -> None:
    x = torch.ones(3, 2)
    with pytest.raises(DataError, match="holdout batch 1"):
        check_assumption(nn.Linear(2, 1), x, [x, x * math.nan])
    model = nn.Sequential(linear([[3e38, 3e38]]), linear([[1.0]]))
    with pytest.raises(DataError, match=r"holdout batch 0, input 2: the values that reach 1\.weight"):
        check_assumption(model, x * 0, [torch.tensor([[0.0, 0.0], [0.1, 0.1], [1.0, 1.0]])])


def test_the_printed_text_says_what_holds() -> None:
    x = randn(20, 30, dtype=torch.float32)
    wide = check_assumption(seeded(nn.Linear(30, 7), torch.float32), x[:10], x[10:])
    assert f"does not look plausible on this data: {wide.total.n_holding} of 210 weights" in str(wide)
    assert f"failed for {wide.total.es_failures} of 2,100 (input, weight) pairs on 10 holdout inputs" in str(wide)
    held = str(check_assumption(linear([[1.0, 1.0]]), torch.ones(4, 2)))
    assert "looks plausible on this data: 2 of 2 weights" in held and "was not checked: pass a holdout" in held
