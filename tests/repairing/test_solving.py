"""Least squares on masks and the sums over patches, against numpy's least squares row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracles.refit import refit_row

from sipp.repairing import solving
from sipp.repairing.solving import solve_rows
from sipp.repairing.sums import Moments


def patches(n_groups: int, fan_in: int, n_patches: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(n_groups, fan_in, n_patches, generator=generator, dtype=torch.float64)
    return mixed + 0.8 * mixed.roll(1, 1) + 0.5  # neighbours alike, means off zero


def moments_of(x_GKP: torch.Tensor, gap_GRP: torch.Tensor) -> Moments:
    sums = Moments.zeros(len(x_GKP), gap_GRP.shape[1], x_GKP.shape[1], x_GKP.device)
    no_mean_GK1 = torch.zeros_like(x_GKP[..., :1])
    sums.add_inputs(x_GKP, no_mean_GK1)
    sums.add_rows(x_GKP, gap_GRP, gap_GRP, no_mean_GK1)
    sums.n = float(x_GKP.shape[2])
    return sums


def test_sums_of_patches_far_from_zero_keep_what_varies() -> None:
    x_GKP, gap_GRP = patches(2, 7, 300, 0) + 3e4, patches(2, 3, 300, 1)
    exact, sums = moments_of(x_GKP, gap_GRP), Moments.zeros(2, 3, 7, x_GKP.device)
    for some in (slice(200), slice(200, 300)):
        x, gap = x_GKP[..., some].float(), gap_GRP[..., some].float()
        mean_GK1 = x.mean(-1, keepdim=True)
        x -= mean_GK1
        sums.add_inputs(x, mean_GK1)
        sums.add_rows(x, gap, gap, mean_GK1)
    sums.n = 300.0
    for got, expected in zip((*sums.centred(), sums.xx_GKK), (*exact.centred(), exact.xx_GKK)):
        assert bool(((got - expected).abs() <= 1e-3 * expected.abs().amax()).all())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n_groups=st.integers(1, 3),
    n_rows=st.integers(1, 9),
    fan_in=st.integers(1, 12),
    keep=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    ridge=st.sampled_from([1e-6, 0.1, 100.0]),
    has_intercept=st.booleans(),
)
def test_rows_are_those_of_least_squares(
    seed: int, n_groups: int, n_rows: int, fan_in: int, keep: float, ridge: float, has_intercept: bool
) -> None:
    x_GKP = patches(n_groups, fan_in, 60, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    gap_GRP = torch.randn(n_groups, n_rows, 60, generator=generator, dtype=torch.float64)
    mask_GRK = torch.rand(n_groups, n_rows, fan_in, generator=generator) < keep
    sums = moments_of(x_GKP, gap_GRP)
    xx, dx = sums.centred() if has_intercept else (sums.xx_GKK, sums.dx_GRK)
    got_GRK = solve_rows(xx, dx, mask_GRK, torch.full((n_groups,), ridge, dtype=torch.float64))
    assert bool((got_GRK[~mask_GRK] == 0).all())
    for g, r in np.ndindex(n_groups, n_rows):
        expected_K, shift = refit_row(
            x_GKP[g].T.numpy(), gap_GRP[g, r].numpy(), mask_GRK[g, r].numpy(), ridge, has_intercept
        )
        assert np.allclose(got_GRK[g, r].numpy(), expected_K, rtol=1e-6, atol=1e-7)
        if has_intercept:
            assert np.isclose(float(sums.intercept(got_GRK)[g, r]), shift, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("scale", "n_at_once"), [(1e-30, 7), (1.0, 3), (1e30, 1)])
def test_steps_gain_as_much_as_factors(
    keep: float, scale: float, n_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_GKP, generator = scale * patches(2, 30, 200, 0), torch.Generator().manual_seed(0)
    x_GKP[:, 3] = 0.0  # a feature that never occurs
    mask = torch.rand(2, 7, 30, generator=generator) < keep
    sums = moments_of(x_GKP, torch.randn(2, 7, 200, generator=generator, dtype=torch.float64))
    ridge_G = 1e-3 * sums.xx_GKK.diagonal(dim1=1, dim2=2).mean(1)
    exact = solve_rows(sums.xx_GKK, sums.dx_GRK, mask, ridge_G)
    monkeypatch.setattr(solving, "FACTOR_COST", {"cpu": 1e12})
    monkeypatch.setattr(solving, "SOLVE_BYTES", {"cpu": n_at_once * 2 * 30 * solving.N_KEPT_ALIVE * 4})
    found = solve_rows(sums.xx_GKK, sums.dx_GRK, mask, ridge_G)
    assert bool((found[~mask] == 0).all()) and bool((found[:, :, 3] == 0).all())
    nothing = torch.zeros_like(sums.d_GR)
    left, wanted = (sums.error(change, nothing) for change in (found, exact))
    gain = sums.error(torch.zeros_like(exact), nothing) - wanted
    assert bool((left <= wanted + solving.SMALL_GAIN * gain + 1e-9 * sums.dd_GR).all())


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_the_scale_of_a_feature_does_not_matter(scale: float) -> None:
    x_GKP = patches(1, 6, 50, 3)
    gap = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(1, 2, 6, dtype=torch.bool)
    mask[0, :, 4] = False
    factors = torch.tensor([1, 1, scale, 1, 1, 1 / scale], dtype=torch.float64)
    plain, scaled = moments_of(x_GKP, gap), moments_of(x_GKP * factors[:, None], gap)
    expected = solve_rows(plain.xx_GKK, plain.dx_GRK, mask, torch.zeros(1))
    assert torch.allclose(solve_rows(scaled.xx_GKK, scaled.dx_GRK, mask, torch.zeros(1)) * factors, expected, rtol=1e-9)


def test_the_error_of_a_change_is_that_of_the_patches() -> None:
    x_GKP, gap_GRP = patches(2, 5, 40, 1), patches(2, 3, 40, 2)
    generator = torch.Generator().manual_seed(0)
    change_GRK = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    shift_GR = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    expected = (gap_GRP - change_GRK @ x_GKP - shift_GR[..., None]).square().sum(-1)
    assert torch.allclose(moments_of(x_GKP, gap_GRP).error(change_GRK, shift_GR), expected)


@pytest.mark.parametrize("n_kept", [2, 3])
def test_a_system_without_a_factor_becomes_nan_and_another_row_stays(n_kept: int) -> None:
    """As rounding leaves two features that are nearly constant: their covariance above the root of their variances."""
    xx_GKK = torch.eye(4, dtype=torch.float64).repeat(2, 1, 1)
    xx_GKK[0, 0, 1] = xx_GKK[0, 1, 0] = 1.0 + 1e-6
    mask_GRK = (torch.arange(4) < n_kept).expand(2, 1, 4)
    got_GRK = solve_rows(xx_GKK, torch.ones(2, 1, 4, dtype=torch.float64), mask_GRK, torch.full((2,), 1e-8))
    assert bool(got_GRK[0, 0, :n_kept].isnan().all()) and bool((got_GRK[~mask_GRK] == 0).all())
    assert torch.allclose(got_GRK[1, 0, :n_kept], torch.ones(n_kept, dtype=torch.float64), rtol=1e-7)
