"""Properties of ranking, allocation and sparsification on arbitrary rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from one_layer import allocate, draws_for, problem, sparsify
from oracles import budget as oracle

from sipp.pruning.rows import DET, RAND, WHOLE, largest

OPTIONS = {"n_outputs": 20, "delta": 1e-3, "c_constant": 3.0}
SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 0.5, 1.0]),
    st.floats(0.0, 1.0),
    st.integers(-300, 0).map(lambda e: 10.0**e),
)


@st.composite
def layers(draw: st.DrawFn, elements: st.SearchStrategy[float] = SCORES) -> list[np.ndarray]:
    shapes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4))
    return [draw(arrays(np.float64, shape, elements=elements)) for shape in shapes]


@settings(max_examples=40, deadline=None)
@given(layers(st.one_of(SCORES, st.floats(-1.0, 0.0))), st.data())
def test_largest_is_a_stable_sort_and_masks_are_nested(scores: list[np.ndarray], data: st.DataObject) -> None:
    n_scores = sum(layer.size for layer in scores)
    budget = data.draw(st.integers(0, n_scores))
    tensors = [torch.from_numpy(layer) for layer in scores]
    masks = largest(tensors, budget)
    assert all(np.array_equal(mask.numpy(), right) for mask, right in zip(masks, oracle.largest(scores, budget)))
    fewer = largest(tensors, data.draw(st.integers(0, budget)))
    assert all(not (less & ~more).any() for less, more in zip(fewer, masks))


@settings(max_examples=30, deadline=None)
@given(layers(st.floats(0.0, 1.0, width=32)), st.sampled_from(["layers", "paper"]), st.data())
def test_allocation_is_exact_and_within_caps(scores: list[np.ndarray], allocation: str, data: st.DataObject) -> None:
    tensors = [torch.from_numpy(layer) for layer in scores]
    posed = problem(tensors, allocation, **OPTIONS)
    budget, seed = data.draw(st.integers(0, int(posed.caps_R.sum()) + 2)), data.draw(st.integers(0, 2**31))
    kept = allocate(posed, budget, seed)
    flat = np.concatenate([layer.ravel() for layer in kept])
    assert int(flat.sum()) == min(budget, int(posed.caps_R.sum()))
    assert ((flat >= 0) & (flat <= posed.caps_R)).all()
    for layer, numbers in zip(tensors, kept):
        kept_F = torch.from_numpy(numbers.sum(1))  # all weights are positive
        for method in ("det", "rand", "hybrid"):
            rows = sparsify(torch.ones_like(layer), layer, kept_F, method=method, seed=seed, **OPTIONS)
            assert torch.equal(rows.mask_FK.sum(1), kept_F)
            assert not rows.eps_F.isnan().any()
            assert rows.values_FK.isfinite().all()
            assert ((rows.eps_F > 0) | (kept_F >= (layer > 0).sum(1))).all()  # nothing but a whole row claims 0


@settings(max_examples=30, deadline=None)
@given(arrays(np.float64, (3, 8), elements=st.floats(1e-6, 1.0)), st.floats(0.05, 0.95))
def test_draws_and_kept_invert_each_other(rows: np.ndarray, share: float) -> None:
    draws = draws_for(torch.from_numpy(rows), torch.full((3,), 8 * share, dtype=torch.float64))
    for row, n_draws in zip(rows, draws.tolist()):
        assert oracle.expected_kept(row, n_draws) == pytest.approx(8 * share, rel=1e-9)


def with_company(rows: np.ndarray) -> np.ndarray:
    """The rows with two more columns, so that no weight has all of a row's sensitivity: log(1 - q) stays finite."""
    return np.hstack([rows, np.full((len(rows), 2), 0.7)])


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 19)).flatmap(
        lambda shape: arrays(np.float64, shape, elements=st.one_of(st.sampled_from([0.0, 0.25, 1.0]), SCORES.map(abs)))
    ),
    st.data(),
)
def test_a_row_is_settled_as_the_oracle_says(rows: np.ndarray, data: st.DataObject) -> None:
    """T9 row by row: which rows are whole, which are drawn, and what the others keep, with ties in their order."""
    rows = with_company(rows)
    kept = [data.draw(st.integers(0, rows.shape[1])) for _ in rows]
    tensor = torch.from_numpy(rows)
    found = sparsify(torch.ones_like(tensor), tensor, torch.tensor(kept), method="hybrid", **OPTIONS)
    for i, (row, m) in enumerate(zip(rows, kept)):
        if m >= (row > 0).sum():
            assert found.strategy_FS[i, 0] == WHOLE and found.eps_F[i] == 0
            assert np.array_equal(found.mask_FK[i].numpy(), row > 0)
            continue
        if m == 0:
            assert found.strategy_FS[i, 0] == DET and found.eps_F[i] == 1
            continue
        sorted_out = oracle.eps_det(row, m, OPTIONS["c_constant"])
        sampled = oracle.eps_kept(row, m, **OPTIONS)
        if abs(sampled - sorted_out) > 1e-9 * sorted_out:  # else either is right
            assert (found.strategy_FS[i, 0] == RAND) == (sampled < sorted_out)
        if found.strategy_FS[i, 0] == DET:
            assert found.eps_F[i].item() == pytest.approx(sorted_out, rel=1e-13)
            assert set(found.mask_FK[i].nonzero()[:, 0].tolist()) == set(np.argsort(-row, kind="stable")[:m])
