"""T5, T6, T8, T9 on single rows: what is kept, how it is weighted, what is claimed."""

import math

import numpy as np
import pytest
import torch
from one_layer import draw_until, draws_for, eps_rand, reweighted, sparsify
from oracles import budget as oracle
from torch import Tensor

from sipp.allocation.sparse_rows import DET, RAND, WHOLE, SparseRows
from sipp.errors import DataError
from sipp.pruning import sampling
from sipp.pruning.sampled_rows import Draws, sparsify_layers
from sipp.pruning.sampling import draw_fixed

BOUND = {"n_outputs": 40, "delta": 1e-4, "c_constant": 3.0}


def rows(seed: int, n_rows: int = 24, fan_in: int = 50, power: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_rows, fan_in, generator=generator)
    sensitivity = torch.rand(n_rows, fan_in, generator=generator) ** power
    sensitivity[:, ::7] = 0.0
    weight[:, 3] = 0.0
    sensitivity[:, 3] = 0.9  # scores that did not come from the weights: a zero weight is worth nothing all the same
    return weight, sensitivity


def run(
    weight: Tensor, sensitivity: Tensor, kept: Tensor, method: str, draws: Draws = "until", seed: int = 0
) -> SparseRows:
    generator = torch.Generator().manual_seed(seed)
    return sparsify(weight, sensitivity, kept, method=method, draws=draws, generator=generator, **BOUND)


def effective(weight: Tensor, sensitivity: Tensor) -> np.ndarray:
    return torch.where(weight != 0, sensitivity, 0.0).double().numpy()


def test_det_keeps_the_most_sensitive_unchanged() -> None:
    weight, sensitivity = rows(0)
    kept = torch.arange(24) * 2
    result = run(weight, sensitivity, kept, "det")
    assert torch.equal(result.mask_FK.sum(1), kept)
    assert torch.equal(result.values_FK, torch.where(result.mask_FK, weight, torch.zeros(())))
    for i, row in enumerate(effective(weight, sensitivity)):
        assert result.eps_F[i].item() == pytest.approx(oracle.eps_det(row, int(kept[i]), 3.0), rel=1e-12, abs=1e-300)
        assert set(result.mask_FK[i].nonzero()[:, 0].tolist()) == set(np.argsort(-row, kind="stable")[: int(kept[i])])
    n_positive = (torch.from_numpy(effective(weight, sensitivity)) > 0).sum(1)
    assert torch.equal(result.strategy_F, torch.where(kept >= n_positive, WHOLE, DET).to(torch.int8))
    assert (result.n_draws_F == 0).all()


def test_det_breaks_ties_by_column() -> None:
    result = run(torch.ones(1, 6), torch.tensor([[0.5, 1.0, 0.5, 0.5, 0.0, 0.5]]), torch.tensor([3]), "det")
    assert result.mask_FK.tolist() == [[True, True, True, False, False, False]]


@pytest.mark.parametrize("method", ["rand", "hybrid"])
def test_until_keeps_exactly_the_number_asked_for(method: str) -> None:
    weight, sensitivity = rows(1)
    caps = (torch.from_numpy(effective(weight, sensitivity)) > 0).sum(1)
    for kept in (torch.arange(24), torch.full((24,), 1), caps - 1, caps):
        for seed in range(5):
            result = run(weight, sensitivity, kept.minimum(caps), method, seed=seed)
            assert torch.equal(result.mask_FK.sum(1), kept.minimum(caps))


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_a_sample_is_weighted_by_its_counts(draws: Draws) -> None:
    weight, sensitivity = rows(2)
    weight, sensitivity = weight.double(), torch.from_numpy(effective(weight, sensitivity))
    kept = torch.full((24,), 15)
    result = run(weight, sensitivity, kept, "rand", draws)
    assert (result.strategy_F == RAND).all()
    share = sensitivity / sensitivity.sum(1, keepdim=True)
    counts = torch.where(weight != 0, result.values_FK * result.n_draws_F[:, None] * share / weight, 0.0)
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-6)
    torch.testing.assert_close(counts.sum(1), result.n_draws_F, rtol=1e-9, atol=0)
    assert torch.equal(result.mask_FK, counts > 0.5)
    assert (result.mask_FK == (result.values_FK != 0)).all()
    if draws == "fixed":
        expected = [math.floor(oracle.draws_for(row, 15)) for row in sensitivity.numpy()]
        assert result.n_draws_F.tolist() == expected


def test_fixed_draws_of_one_weight_are_one_draw() -> None:
    weight, sensitivity = rows(3)
    result = run(weight, sensitivity, torch.ones(24, dtype=torch.int64), "rand", "fixed")
    assert (result.n_draws_F == 1).all()  # N(1) = 1 exactly; rounding it up to 2 would break the budget
    assert (result.mask_FK.sum(1) == 1).all()


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_what_is_worth_nothing_is_never_drawn(draws: Draws) -> None:
    weight, sensitivity = rows(4)
    caps = (torch.from_numpy(effective(weight, sensitivity)) > 0).sum(1)
    for seed in range(20):
        for kept in (torch.full((24,), 20), caps - 1, caps, torch.full((24,), 50)):
            result = run(weight, sensitivity, kept, "rand", draws, seed)
            assert not (result.mask_FK & ((weight == 0) | (sensitivity == 0))).any()


@pytest.mark.parametrize("method", ["det", "rand", "hybrid"])
def test_a_row_that_may_keep_all_is_kept_whole(method: str) -> None:
    weight, sensitivity = rows(5)
    positive = torch.from_numpy(effective(weight, sensitivity)) > 0
    result = run(weight, sensitivity, positive.sum(1), method)
    assert (result.strategy_F == WHOLE).all()
    assert torch.equal(result.mask_FK, positive)
    assert torch.equal(result.values_FK, torch.where(positive, weight, torch.zeros(())))
    assert (result.eps_F == 0).all()
    one_less = run(weight, sensitivity, positive.sum(1) - 1, method)
    assert (one_less.strategy_F != WHOLE).all()
    assert (one_less.eps_F > 0).all()


def test_an_empty_row_errs_by_all_of_itself() -> None:
    weight, sensitivity = rows(6, n_rows=2)
    sensitivity[1] = 0.0
    nothing = torch.zeros(2, dtype=torch.int64)
    for method in ("rand", "hybrid"):
        result = run(weight, sensitivity, nothing, method)
        assert not result.mask_FK.any()
        assert result.strategy_F.tolist() == [DET, WHOLE]  # a row without sensitivity has nothing to lose
        assert result.eps_F.tolist() == [1.0, 0.0]
    det = run(weight, sensitivity, nothing, "det")
    assert det.eps_F[0].item() == pytest.approx(3.0 * effective(weight, sensitivity)[0].sum())  # T5 as it stands
    weak = run(weight, sensitivity * 1e-3, nothing, "hybrid")
    assert weak.eps_F[0] == 1.0  # C S < 1 would claim less than the error that is certain


def test_hybrid_takes_the_smaller_bound_row_by_row() -> None:
    weight = torch.rand(16, 150, generator=torch.Generator().manual_seed(7)) + 0.1
    sensitivity = 0.1 * torch.rand(16, 150, generator=torch.Generator().manual_seed(8)) + 0.1
    sensitivity[:, 20:] *= torch.logspace(0, -4, 16)[:, None]  # from no leaders to rows led by a few weights
    options = {"n_outputs": 2, "delta": 0.3, "c_constant": 1.0}
    kept = torch.full((16,), 30)
    kept[::3] = 70
    result = sparsify(
        weight, sensitivity, kept, method="hybrid", draws="fixed", generator=torch.Generator().manual_seed(0), **options
    )
    rand_rows = []
    for i, row in enumerate(sensitivity.numpy()):
        n_draws = math.floor(oracle.draws_for(row, int(kept[i])))
        sampled = oracle.eps_rand(float(row.astype(np.float64).sum()), n_draws, **options)
        sorted_out = oracle.eps_det(row, int(kept[i]), 1.0)
        rand_rows.append(not sampled > sorted_out)
        assert result.eps_F[i].item() == pytest.approx(sampled if rand_rows[-1] else sorted_out, rel=1e-9)
    assert (result.strategy_F == RAND).tolist() == rand_rows
    assert 4 <= sum(rand_rows) <= 12
    assert torch.equal(result.values_FK[~torch.tensor(rand_rows)], (weight * result.mask_FK)[~torch.tensor(rand_rows)])


def test_luck_never_tightens_the_claim_of_until() -> None:
    weight, sensitivity = rows(9, n_rows=200)
    kept = torch.full((200,), 12)
    result = run(weight, sensitivity, kept, "rand", "until")
    share = torch.from_numpy(effective(weight, sensitivity))
    expected = draws_for(share, kept)
    at_expected = eps_rand(share.sum(1), expected, **BOUND)
    assert (result.n_draws_F > expected).any() and (result.n_draws_F < expected).any()
    assert (result.eps_F >= at_expected * (1 - 1e-12)).all()
    unlucky = result.n_draws_F < expected
    assert (result.eps_F[unlucky] > at_expected[unlucky]).all()


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_the_same_seed_gives_the_same_bits(draws: Draws) -> None:
    weight, sensitivity = rows(10)
    given = weight.clone(), sensitivity.clone()
    kept = torch.full((24,), 9)
    first, again, other = (run(weight, sensitivity, kept, "rand", draws, seed) for seed in (1, 1, 2))
    assert torch.equal(first.values_FK, again.values_FK) and torch.equal(first.n_draws_F, again.n_draws_F)
    assert not torch.equal(first.values_FK, other.values_FK)
    assert torch.equal(weight, given[0]) and torch.equal(sensitivity, given[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_keep_the_type_of_the_weights(dtype: torch.dtype) -> None:
    weight, sensitivity = rows(11)
    result = run(weight.to(dtype), sensitivity, torch.full((24,), 9), "hybrid")
    assert result.values_FK.dtype == dtype
    assert result.eps_F.dtype == result.n_draws_F.dtype == torch.float64
    assert result.strategy_F.dtype == torch.int8
    assert result.mask_FK.dtype == torch.bool


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_sensitivities_far_apart_make_many_draws_but_no_nonsense(draws: Draws) -> None:
    rare = torch.tensor([1e-14, 1e-30, 1e-290, 1e-312], dtype=torch.float64)
    sensitivity = torch.stack([torch.ones(4), rare, rare, rare, torch.zeros(4)], dim=1)
    result = run(torch.ones(4, 5, dtype=torch.float64), sensitivity, torch.full((4,), 3), "rand", draws)
    assert result.values_FK.isfinite().all() and result.eps_F.isfinite().all() and (result.eps_F > 0).all()
    assert (result.n_draws_F > 1e13).all() and result.n_draws_F.isfinite().all()
    assert result.values_FK[:, 0].tolist() == pytest.approx([1.0] * 4, rel=1e-6)
    if draws == "until":
        assert result.mask_FK.sum(1).tolist() == [3] * 4


def test_a_value_out_of_range_is_refused() -> None:
    weight = torch.full((1, 2), 60000.0)
    counts, share = torch.tensor([[9.0, 1.0]]).double(), torch.tensor([[0.95, 0.05]]).double()
    assert reweighted(weight, counts, share).isfinite().all()
    with pytest.raises(DataError, match=r"leaves the range of torch\.float16"):
        reweighted(weight.half(), counts, share)


def test_rows_of_one_and_of_many_columns_can_be_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    one = draw_fixed(torch.ones(3, 1, dtype=torch.float64), torch.tensor([0.0, 1.0, 5.0]).double(), generator)
    assert one.tolist() == [[0.0], [1.0], [5.0]]
    share = torch.rand(4, 3000, dtype=torch.float64, generator=generator)
    share /= share.sum(1, keepdim=True)
    n_draws = torch.tensor([1.0, 100.0, 1e6, 1e15], dtype=torch.float64)
    counts = draw_fixed(share, n_draws, generator)
    assert torch.equal(counts.sum(1), n_draws)
    assert torch.equal(
        draw_until(share, torch.tensor([1, 10, 1000, 2999]), generator).gt(0).sum(1), torch.tensor([1, 10, 1000, 2999])
    )


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_many_layers_are_drawn_in_parts_of_bounded_size(draws: Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [rows(20 + i, n_rows=9 + i, fan_in=30 + i) for i in range(4)]
    kept = [torch.full((9 + i,), 12) for i in range(4)]
    for limit in (10**6, 100, 1):
        monkeypatch.setattr(sampling, "_BATCH", limit)
        options = {"is_hybrid": False, "draws": draws, "generator": torch.Generator().manual_seed(0)}
        weights, sensitivities = zip(*layers)
        results = sparsify_layers(weights, sensitivities, kept, **options, **BOUND)
        for (weight, sensitivity), m, result in zip(layers, kept, results):
            assert (result.strategy_F == RAND).all()
            assert draws == "fixed" or torch.equal(result.mask_FK.sum(1), m)
            share = torch.from_numpy(effective(weight, sensitivity))
            share /= share.sum(1, keepdim=True)
            counts = torch.where(weight != 0, result.values_FK * result.n_draws_F[:, None] * share / weight, 0.0)
            torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-3)
            torch.testing.assert_close(counts.sum(1), result.n_draws_F, rtol=1e-5, atol=0)
