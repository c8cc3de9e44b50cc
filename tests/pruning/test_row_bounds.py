"""T5-T7: the bounds of a row, and draws against weights kept, compared with the oracle and at their extremes."""

import math

import pytest
import torch
from one_layer import draws_for, eps_det, eps_rand
from oracles import budget as oracle

from sipp.errors import DataError
from sipp.pruning.budgets import check_sensitivity
from sipp.pruning.rows import eps_given, largest_in_rows

C, ETA, DELTA = 3.0, 1000, 1e-16


def some_rows(seed: int, n_rows: int = 12, fan_in: int = 40, power: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(n_rows, fan_in, dtype=torch.float64, generator=generator) ** power
    rows[:, ::9] = 0.0
    rows[0] = 0.0  # a row without sensitivity
    rows[1, 1:] = 0.0
    rows[1, 0] = 0.5  # a row with one weight
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eps_det_is_the_tail_of_the_sorted_row(dtype: torch.dtype) -> None:
    rows = some_rows(0).to(dtype)
    given = rows.clone()
    for kept in (0, 1, 7, 39, 40):
        found = eps_det(rows, torch.full((12,), kept), c_constant=C)
        assert found.dtype == torch.float64
        expected = [oracle.eps_det(row, kept, C) for row in rows.numpy()]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)
    assert torch.equal(rows, given)


def test_eps_rand_is_the_formula() -> None:
    for total in (0.7, 1.0, 40.0):
        for n_draws in (1.0, 13.5, 1e4, 2.0**40):
            total_F = torch.tensor([total], dtype=torch.float64)
            found = eps_rand(total_F, torch.tensor([n_draws]), n_outputs=ETA, delta=DELTA, c_constant=C).item()
            assert found == pytest.approx(oracle.eps_rand(total, n_draws, ETA, DELTA, C), rel=1e-12)


def test_a_smaller_delta_never_tightens_and_more_never_loosens() -> None:
    rows = some_rows(1)[2:]
    total = rows.sum(1)
    by_kept = torch.stack([eps_det(rows, torch.full((10,), m), c_constant=C) for m in range(41)])
    assert (by_kept.diff(dim=0) <= 0).all()
    drawn = [draws_for(rows, torch.full((10,), m)) for m in range(1, int((rows > 0).sum(1).min()))]
    by_draws = torch.stack([eps_rand(total, n, n_outputs=ETA, delta=DELTA, c_constant=C) for n in drawn])
    assert (by_draws.diff(dim=0) < 0).all()
    draws = torch.logspace(0, 12, 10, dtype=torch.float64)
    by_delta = torch.stack([eps_rand(total, draws, n_outputs=ETA, delta=10.0**-k, c_constant=C) for k in range(1, 17)])
    assert (by_delta.diff(dim=0) > 0).all()
    assert (eps_rand(total, 2 * draws, n_outputs=ETA, delta=DELTA, c_constant=C) <= by_delta[-1]).all()


def test_draws_for_is_the_inverse_found_by_bisection() -> None:
    for seed, power in ((2, 1.0), (3, 3.0), (4, 10.0), (5, 0.2)):
        rows = some_rows(seed, n_rows=8, fan_in=30, power=power)[2:]
        for kept in (1, 2, 9, 20, 24, 25, 0.3, 12.5):
            assert kept < (rows > 0).sum(1).min()
            for row, found in zip(rows.numpy(), draws_for(rows, torch.full((6,), kept, dtype=torch.float64)).tolist()):
                expected = oracle.draws_for(row, kept)
                more = oracle.expected_kept(row, 1.001 * expected) - kept  # next to nothing on a plateau of U
                assert found == pytest.approx(expected, rel=max(1e-9, 1e-17 * kept / more))


def test_draws_for_at_its_ends() -> None:
    rows = torch.tensor(
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1e-12, 1e-12, 0.0], [1.0, 1e-300, 1e-300, 1e-300], [1.0, 5e-324, 5e-324, 0.0]],
        dtype=torch.float64,
    )
    found = draws_for(rows, torch.tensor([2, 2, 3, 2])).tolist()
    assert found[0] == pytest.approx(math.log(0.5) / math.log(0.75), rel=1e-12)
    # Two of three equal, very rare weights beside a certain one: 1 + 2 (1 - e^-Nq) = 2.
    assert found[1] == pytest.approx(math.log(2.0) / 1e-12, rel=1e-9)
    assert 1e299 < found[2] < math.inf  # huge, but never infinite below the cap: that would claim eps = 0
    assert math.isfinite(found[3])


def test_largest_in_rows_breaks_ties_by_column() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    mask = largest_in_rows(values, torch.tensor([2, 3, 0]))
    assert mask.tolist() == [[False, True, True, False, False], [True, True, True, False, False], [False] * 5]


def test_bad_input_is_refused_with_a_way_out() -> None:
    for bad in (
        torch.tensor([[math.nan, 1.0, 1.0]] * 2),
        torch.tensor([[-1.0, 1, 1]] * 2),
        torch.rand(2, 3) * math.inf,
    ):
        with pytest.raises(DataError, match="outside"):
            check_sensitivity(bad)
    with pytest.raises(DataError, match="float32 or float64 matrix"):
        check_sensitivity(torch.rand(3))


def test_the_bound_of_a_long_row_does_not_depend_on_threads() -> None:
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    weight, factor, sensitivity = torch.rand(3, 1, 300_000, generator=generator, dtype=torch.float64)
    found = []
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            found.append(eps_given(weight, factor * weight, sensitivity, c_constant=C).item())
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2] == pytest.approx(C * float(((1 - factor) * sensitivity).sum()), rel=1e-12)
