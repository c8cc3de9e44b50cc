"""T5, T6, T8, T9 on single rows: what is kept, how it is weighted, what is claimed."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from one_layer import draws_for, eps_rand, sparsify
from oracles import budget as oracle
from torch import Tensor

from sipp.errors import DataError
from sipp.pruning import budgets, sampling
from sipp.pruning.rows import DET, RAND, WHOLE, SparseRows
from sipp.pruning.sampling import sparsify as sparsify_groups
from sipp.results.options import Draws

SCORES = [0.0, 0.25, 0.25, 0.3, 0.7, 1.0, 1e-3, 1e-30, 1e-300]
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
    return sparsify(weight, sensitivity, kept, method=method, draws=draws, seed=seed, **BOUND)


def effective(weight: Tensor, sensitivity: Tensor) -> np.ndarray:
    return torch.where(weight != 0, sensitivity, 0.0).double().numpy()


@settings(max_examples=30, deadline=None)
@given(
    arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 19)), elements=st.sampled_from(SCORES)),
    st.data(),
)
def test_a_row_is_settled_as_the_oracle_says(rows: np.ndarray, data: st.DataObject) -> None:
    """T9 row by row: which rows are whole, which are drawn, and what the others keep, with ties in their order."""
    rows = np.hstack([rows, np.full((len(rows), 2), 0.7)])  # company: no weight has all of a row
    kept = [data.draw(st.integers(0, rows.shape[1])) for _ in rows]
    tensor = torch.from_numpy(rows)
    found = sparsify(torch.ones_like(tensor), tensor, torch.tensor(kept), method="hybrid", **BOUND)
    for i, (row, m) in enumerate(zip(rows, kept)):
        if m >= (row > 0).sum():
            assert found.strategy_FS[i, 0] == WHOLE and found.eps_F[i] == 0
            assert np.array_equal(found.mask_FK[i].numpy(), row > 0)
            continue
        if m == 0:
            assert found.strategy_FS[i, 0] == DET and found.eps_F[i] == 1
            continue
        sorted_out = oracle.eps_det(row, m, BOUND["c_constant"])
        sampled = oracle.eps_kept(row, m, **BOUND)
        if abs(sampled - sorted_out) > 1e-9 * sorted_out:  # else either is right
            assert (found.strategy_FS[i, 0] == RAND) == (sampled < sorted_out)
        if found.strategy_FS[i, 0] == DET:
            assert found.eps_F[i].item() == pytest.approx(sorted_out, rel=1e-13)
            assert set(found.mask_FK[i].nonzero()[:, 0].tolist()) == set(np.argsort(-row, kind="stable")[:m])


@pytest.mark.parametrize("method", ["rand", "hybrid"])
def test_until_keeps_exactly_the_number_asked_for(method: str) -> None:
    weight, sensitivity = rows(1)
    caps = (torch.from_numpy(effective(weight, sensitivity)) > 0).sum(1)
    for kept in (torch.arange(24), torch.full((24,), 1), caps - 1, caps):
        for seed in range(5):
            result = run(weight, sensitivity, kept.minimum(caps), method, seed=seed)
            assert torch.equal(result.mask_FK.sum(1), kept.minimum(caps))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Filled with how often each weight was drawn, by each call of a function that draws."""
    found: list[Tensor] = []

    def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            drawn = draw(*given)
            found.append(torch.from_numpy(drawn.copy()))
            return drawn

        return noted

    monkeypatch.setattr(sampling, "draw_until", noting(sampling.draw_until))
    monkeypatch.setattr(sampling, "draw_fixed", noting(sampling.draw_fixed))
    return found


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_a_sample_is_weighted_by_its_counts(draws: Draws, counts: list[Tensor]) -> None:
    weight, sensitivity = rows(2)
    weight, sensitivity = weight.double(), torch.from_numpy(effective(weight, sensitivity))
    kept = torch.full((24,), 15)
    result = run(weight, sensitivity, kept, "rand", draws)
    assert (result.strategy_FS[:, 0] == RAND).all()
    share = sensitivity / sensitivity.sum(1, keepdim=True)
    (drawn,) = counts
    by_values = torch.where(weight != 0, result.values_FK * drawn.sum(1, keepdim=True) * share / weight, 0.0)
    torch.testing.assert_close(by_values, drawn, rtol=1e-9, atol=1e-6)
    assert torch.equal(drawn, drawn.round()) and torch.equal(result.mask_FK, drawn > 0)
    assert (result.mask_FK == (result.values_FK != 0)).all()
    if draws == "fixed":
        expected = [math.floor(oracle.draws_for(row, 15)) for row in sensitivity.numpy()]
        assert drawn.sum(1).tolist() == expected


@pytest.mark.parametrize("method", ["det", "rand", "hybrid"])
def test_a_row_that_may_keep_all_is_kept_whole(method: str) -> None:
    weight, sensitivity = rows(5)
    positive = torch.from_numpy(effective(weight, sensitivity)) > 0
    result = run(weight, sensitivity, positive.sum(1), method)
    assert (result.strategy_FS[:, 0] == WHOLE).all()
    assert torch.equal(result.mask_FK, positive)
    assert torch.equal(result.values_FK, torch.where(positive, weight, torch.zeros(())))
    assert (result.eps_F == 0).all()
    one_less = run(weight, sensitivity, positive.sum(1) - 1, method)
    assert (one_less.strategy_FS[:, 0] != WHOLE).all()
    assert (one_less.eps_F > 0).all()


def test_an_empty_row_errs_by_all_of_itself() -> None:
    weight, sensitivity = rows(6, n_rows=2)
    sensitivity[1] = 0.0
    nothing = torch.zeros(2, dtype=torch.int64)
    for method in ("rand", "hybrid"):
        result = run(weight, sensitivity, nothing, method)
        assert not result.mask_FK.any()
        assert result.strategy_FS[:, 0].tolist() == [DET, WHOLE]  # a row without sensitivity has nothing to lose
        assert result.eps_F.tolist() == [1.0, 0.0]
    det = run(weight, sensitivity, nothing, "det")
    assert det.eps_F[0].item() == pytest.approx(3.0 * effective(weight, sensitivity)[0].sum())  # T5 as it stands
    weak = run(weight, sensitivity * 1e-3, nothing, "hybrid")
    assert weak.eps_F[0] == 1.0  # C S < 1 would claim less than the error that is certain


def test_luck_never_tightens_the_claim_of_until(counts: list[Tensor]) -> None:
    weight, sensitivity = rows(9, n_rows=200)
    kept = torch.full((200,), 12)
    result = run(weight, sensitivity, kept, "rand", "until")
    share = torch.from_numpy(effective(weight, sensitivity))
    expected = draws_for(share, kept)
    at_expected = eps_rand(share.sum(1), expected, **BOUND)
    made = counts[0].sum(1)
    assert (made > expected).any() and (made < expected).any()
    assert (result.eps_F >= at_expected * (1 - 1e-12)).all()
    unlucky = made < expected
    assert (result.eps_F[unlucky] > at_expected[unlucky]).all()


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_sensitivities_far_apart_make_many_draws_but_no_nonsense(draws: Draws, counts: list[Tensor]) -> None:
    rare = torch.tensor([1e-14, 1e-30, 1e-290, 1e-312], dtype=torch.float64)
    sensitivity = torch.stack([torch.ones(4), rare, rare, rare, torch.zeros(4)], dim=1)
    result = run(torch.ones(4, 5, dtype=torch.float64), sensitivity, torch.full((4,), 3), "rand", draws)
    assert result.values_FK.isfinite().all() and result.eps_F.isfinite().all() and (result.eps_F > 0).all()
    assert (counts[0].sum(1) > 1e11).all() and counts[0].isfinite().all()
    assert result.values_FK[:, 0].tolist() == pytest.approx([1.0] * 4, rel=1e-6)
    if draws == "until":
        assert result.mask_FK.sum(1).tolist() == [3] * 4


def test_a_value_out_of_range_is_refused() -> None:
    weight, sensitivity = torch.full((1, 3), 60000.0), torch.tensor([[0.6, 0.3, 0.1]])
    assert run(weight, sensitivity, torch.tensor([1]), "rand").values_FK.isfinite().all()
    with pytest.raises(DataError, match=r"leaves the range of torch\.float16"):
        run(weight.half(), sensitivity, torch.tensor([1]), "rand")


# ----------------------------------------------------------------------------------- the weights of each sign of a row


@pytest.mark.parametrize("draws", ["until", "fixed"])
def test_the_signs_of_a_row_are_sampled_as_if_they_were_rows(draws: Draws) -> None:
    """Each sign alone, as a row of its own, has the same sample and bound; the row's is the larger of both."""
    weight, sensitivity = rows(12, n_rows=30)
    worth, rng = budgets.groups_of(weight, sensitivity, 2), np.random.default_rng(0)
    kept = np.minimum(np.arange(60).reshape(30, 2) % 17, (worth > 0).sum(1).reshape(30, 2))
    options = {"is_hybrid": False, "draws": draws, "scale": 0.3, "c_constant": 3.0}
    found = sparsify_groups(weight, worth, kept, rng=rng, **options)
    if draws == "until":
        for s, is_sign in enumerate((weight > 0, weight < 0)):
            assert (found.mask_FK & is_sign).sum(1).tolist() == kept[:, s].tolist()
    assert (found.values_FK * weight >= 0).all()
    alone = sparsify_groups(
        weight.repeat_interleave(2, 0), worth, kept.reshape(60, 1), rng=np.random.default_rng(0), **options
    )
    assert torch.equal(alone.strategy_FS.view(30, 2), found.strategy_FS)
    assert torch.equal(alone.eps_F.view(30, 2).amax(1), found.eps_F)
    assert torch.equal(alone.values_FK.view(30, 2, -1).sum(1), found.values_FK)


Cut = Callable[..., SparseRows]


def sign_by_sign(weight: Tensor, worth: np.ndarray, kept: np.ndarray, **options: Any) -> SparseRows:
    """Hybrid as it must not be: each sign of a row chooses for itself."""
    alone = sparsify_groups(weight.repeat_interleave(2, 0), worth, kept.reshape(-1, 1), **options)
    return replace(alone, strategy_FS=alone.strategy_FS.view(-1, 2), eps_F=alone.eps_F.view(-1, 2).amax(1))


def chooses_once_a_row(cut: Cut) -> bool:
    """T9: whether each row of two signs is sampled or sorted as both ways written out say, with that bound."""
    generator = torch.Generator().manual_seed(13)
    weight = torch.randn(72, 150, dtype=torch.float64, generator=generator)
    sensitivity = 0.1 * torch.rand(72, 150, dtype=torch.float64, generator=generator) + 0.1
    leads = torch.logspace(0, -2, 144, dtype=torch.float64)[torch.randperm(144, generator=generator)].view(72, 2)
    sensitivity[:, 8:] *= torch.where(weight > 0, leads[:, :1], leads[:, 1:])[:, 8:]  # by sign: led by a few, or not
    worth = budgets.groups_of(weight, sensitivity, 2)
    caps = (worth > 0).sum(1).reshape(72, 2)
    kept = np.minimum(np.tile([[20, 20], [0, 20], [99, 20], [10, 30], [0, 0], [0, 99]], (12, 1)), caps)
    bound = {"n_outputs": 1, "delta": 0.9, "c_constant": 1.0}
    scale, rng = budgets.sampling_constant(**bound), np.random.default_rng(0)
    found = cut(weight, worth, kept, is_hybrid=True, draws="fixed", scale=scale, c_constant=1.0, rng=rng)
    is_cut = (kept > 0) & (kept < caps)
    ways = []
    for i in np.flatnonzero(is_cut.any(1)):
        is_sampled, eps = oracle.hybrid_row(worth[2 * i : 2 * i + 2], kept[i], **bound)
        ways.append(is_sampled)
        chosen = found.strategy_FS[i].numpy()[is_cut[i]] == (RAND if is_sampled else DET)
        if not chosen.all() or found.eps_F[i].item() != pytest.approx(eps, rel=1e-9):
            return False
    assert 10 < sum(ways) < len(ways) - 10  # both ways occur
    return bool((found.eps_F.numpy()[~is_cut.any(1)] == (kept < caps)[~is_cut.any(1)].any(1)).all())


def test_hybrid_chooses_once_for_both_signs_of_a_row() -> None:
    assert chooses_once_a_row(sparsify_groups)
    assert not chooses_once_a_row(sign_by_sign)


def test_an_empty_sign_leaves_the_choice_to_the_other_one() -> None:
    """It has the bound 1 either way, which would hide that one way is worse for the weights that are left."""
    worth = np.array([[0.01, 0.3, 0.3, 0.01, 0, 0], [0, 0, 0, 0, 0.2, 0.2]])
    kept, rng = np.array([[2, 0]]), np.random.default_rng(0)
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0, -5.0, -6.0]])
    found = sparsify_groups(weight, worth, kept, is_hybrid=True, draws="until", scale=0.1, c_constant=1.0, rng=rng)
    assert found.strategy_FS.tolist() == [[DET, DET]] and found.eps_F.tolist() == [1.0]
    assert found.values_FK.tolist() == [[0, 2.0, 3.0, 0, 0, 0]]
