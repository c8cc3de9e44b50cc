"""The search for a mask, and SparseGPT, are those of the slow definitions (T21)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracles import joint as oracle
from oracles.sparsegpt import sparsegpt as sparsegpt_oracle

from sipp.repairing import search as searching
from sipp.repairing.search import LeastSquares, MaskRule, search
from sipp.repairing.sparsegpt import sparsegpt
from sipp.results.options import Pattern


def system(x_PK: oracle.Array, t_PF: oracle.Array, w_FK: oracle.Array) -> LeastSquares:
    x, t = torch.from_numpy(x_PK), torch.from_numpy(t_PF)
    return LeastSquares((x.T @ x)[None], (t.T @ x)[None], torch.from_numpy(w_FK)[None], len(x))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["layer", "2:4", "1:3", "rows"])
@pytest.mark.parametrize("takes_newton", [False, True])  # on a CPU, and on a GPU
def test_the_search_is_the_definition(
    kind: str, seed: int, takes_newton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching._System, "takes_newton", takes_newton)
    fan_in = 10
    random = np.random.default_rng(seed)
    x_PK = random.normal(size=(200, fan_in)) @ random.normal(size=(fan_in, fan_in))
    w_FK = random.normal(size=(7, fan_in)) * np.logspace(-0.7, 0.3, 7)[:, None]
    t_PF = x_PK @ w_FK.T + random.normal(size=(200, 7))
    n_m = tuple(map(int, kind.split(":"))) if ":" in kind else None
    lives_F = np.full(7, kind == "rows")
    start_FK = oracle.largest(np.abs(w_FK), 20, n_m, lives_F)  # type: ignore[arg-type]
    pattern = None if n_m is None else Pattern(*n_m)
    rule = MaskRule(int(start_FK.sum()), torch.ones(7, fan_in, dtype=torch.bool), torch.from_numpy(lives_F), pattern)
    mask_FK, n_rounds = search([system(x_PK, t_PF, w_FK)], torch.from_numpy(start_FK), rule)
    wanted_FK, wanted_rounds = oracle.search(x_PK, t_PF, w_FK, start_FK, False, n_m, lives_F)  # type: ignore[arg-type]
    assert np.array_equal(mask_FK.numpy(), wanted_FK) and n_rounds == wanted_rounds
    assert not np.array_equal(wanted_FK, start_FK)
    if kind == "rows":
        assert bool(mask_FK.any(1).all()) and int(mask_FK.sum()) == 20


def test_the_first_mask_stays_where_a_system_has_no_factor() -> None:
    """As rounding may leave the covariances of features that hardly vary."""
    n_rows = 5
    xx_GKK = 3.0 - 2.0 * torch.eye(8, dtype=torch.float64)[None]
    rows_GRK = torch.arange(8.0 * n_rows, dtype=torch.float64).view(1, n_rows, 8)
    start_FK = torch.arange(8).expand(n_rows, 8) < 3
    found = search([LeastSquares(xx_GKK, rows_GRK, rows_GRK, 10.0)], start_FK, MaskRule(3 * n_rows, None, None))
    assert torch.equal(found[0], start_FK) and found[1] == 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    fan_in=st.integers(1, 40),
    alike=st.sampled_from([0.0, 1.0, 100.0]),
    growth=st.sampled_from([growth for _, growth in searching.GROWTHS]),
)
def test_an_inverse_by_newton_is_that_of_the_larger_system(seed: int, fan_in: int, alike: float, growth: float) -> None:
    generator, rho = torch.Generator().manual_seed(seed), 0.3
    x_PK = torch.randn(60, fan_in, generator=generator, dtype=torch.float64)
    x_PK += alike * x_PK[:, :1]  # up to a system of rank one, nearly
    unit_KK = torch.corrcoef(x_PK.T).view(fan_in, fan_in)
    eye_KK = torch.eye(fan_in, dtype=torch.float64)
    before_GKK, system_GKK = torch.linalg.inv(unit_KK + rho * eye_KK)[None], (unit_KK + rho * growth * eye_KK)[None]
    found_GKK = searching._newton_inverse(system_GKK.float(), before_GKK.float(), growth)
    wanted_GKK = torch.linalg.inv(system_GKK)
    assert float((found_GKK - wanted_GKK).norm() / wanted_GKK.norm()) < 2 * searching.NEWTON_ERROR


@pytest.mark.parametrize("kind", ["layer", "2:4", "1:3"])
@pytest.mark.parametrize("fan_in", [10, 150])
def test_sparsegpt_is_its_definition(kind: str, fan_in: int) -> None:
    random = np.random.default_rng(0)
    x_PK = random.normal(size=(2 * fan_in, fan_in)) @ random.normal(size=(fan_in, fan_in))
    x_PK[:, 3] = 0.0  # an input that never occurs
    w_FK = random.normal(size=(5, fan_in))
    n_m = tuple(map(int, kind.split(":"))) if ":" in kind else None
    n_kept = w_FK.size * 2 // 5
    rows = system(x_PK, x_PK @ w_FK.T, w_FK)
    nothing = torch.zeros(5, dtype=torch.bool)
    rule = MaskRule(n_kept, torch.ones(w_FK.shape, dtype=torch.bool), nothing, None if n_m is None else Pattern(*n_m))
    mask_FK, values_FK = sparsegpt([rows], rule)
    wanted_mask_FK, wanted_FK = sparsegpt_oracle(x_PK, w_FK, n_kept, n_m)  # type: ignore[arg-type]
    assert np.array_equal(mask_FK.numpy(), wanted_mask_FK)
    assert np.allclose(values_FK.numpy(), wanted_FK, rtol=1e-6, atol=1e-8)
    if n_m is None:
        assert int(mask_FK.sum()) == n_kept
