"""Properties of ranking, allocation and sparsification on arbitrary rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from one_layer import allocate, draws_for, expected_kept, sparsify
from oracles import budget as oracle

from sipp.allocation.largest_scores import largest, sorted_scores
from sipp.allocation.rows import smallest_of
from sipp.allocation.sparse_rows import DET, RAND, WHOLE

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
    assert all(map(torch.equal, largest(tensors, budget, ascending=sorted_scores(tensors)), masks))
    fewer = largest(tensors, data.draw(st.integers(0, budget)))
    assert all(not (less & ~more).any() for less, more in zip(fewer, masks))


@settings(max_examples=30, deadline=None)
@given(layers(st.floats(0.0, 1.0, width=32)), st.data())
def test_allocation_is_exact_and_within_caps(scores: list[np.ndarray], data: st.DataObject) -> None:
    tensors = [torch.from_numpy(layer) for layer in scores]
    caps = torch.cat([(layer > 0).sum(1) for layer in tensors])
    budget = data.draw(st.integers(0, int(caps.sum()) + 2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    kept = allocate(tensors, budget, generator=generator, **OPTIONS)
    flat = torch.cat(kept)
    assert int(flat.sum()) == min(budget, int(caps.sum()))
    assert ((flat >= 0) & (flat <= caps)).all()
    for layer, numbers in zip(tensors, kept):
        for method in ("det", "rand", "hybrid"):
            weight = torch.ones_like(layer)
            rows = sparsify(weight, layer, numbers, method=method, draws="until", generator=generator, **OPTIONS)
            assert torch.equal(rows.mask_FK.sum(1), numbers)
            assert not rows.eps_F.isnan().any()
            assert rows.values_FK.isfinite().all()
            assert ((rows.eps_F > 0) | (numbers >= (layer > 0).sum(1))).all()  # nothing but a whole row claims 0


@settings(max_examples=30, deadline=None)
@given(arrays(np.float64, (3, 8), elements=st.floats(1e-6, 1.0)), st.floats(0.05, 0.95))
def test_draws_and_kept_invert_each_other(row: np.ndarray, share: float) -> None:
    sensitivity = torch.from_numpy(row)
    kept = torch.full((3,), 8 * share, dtype=torch.float64)
    torch.testing.assert_close(expected_kept(sensitivity, draws_for(sensitivity, kept)), kept, rtol=1e-10, atol=0)


WORTH = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 5e-324, 1e-308]),
    st.floats(1e-6, 1.0),
    st.integers(-290, 0).map(lambda e: 10.0**e),
)


def with_company(rows: np.ndarray) -> np.ndarray:
    """The rows with two more columns, so that no weight has all of a row's sensitivity: log(1 - q) stays finite."""
    return np.hstack([rows, np.full((len(rows), 2), 0.7)])


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 19)).flatmap(lambda shape: arrays(np.float64, shape, elements=WORTH)),
    st.sampled_from([1e-12, 1.0, 1e12]),
    st.one_of(st.floats(0.0, 1e6), st.integers(-20, 300).map(lambda e: 10.0**e)),
)
def test_expected_kept_is_the_oracle_s(rows: np.ndarray, scale: float, n_draws: float) -> None:
    rows = with_company(rows) * scale
    found = expected_kept(torch.from_numpy(rows), torch.full((len(rows),), n_draws, dtype=torch.float64))
    for row, kept in zip(rows, found.tolist()):
        assert kept == pytest.approx(oracle.expected_kept(row, n_draws), rel=2e-14, abs=1e-300)


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
    options = {"method": "hybrid", "draws": "until", "generator": torch.Generator().manual_seed(0)}
    tensor = torch.from_numpy(rows)
    found = sparsify(torch.ones_like(tensor), tensor, torch.tensor(kept), **options, **OPTIONS)
    for i, (row, m) in enumerate(zip(rows, kept)):
        if m >= (row > 0).sum():
            assert found.strategy_F[i] == WHOLE and found.eps_F[i] == 0
            assert np.array_equal(found.mask_FK[i].numpy(), row > 0)
            continue
        if m == 0:
            assert found.strategy_F[i] == DET and found.eps_F[i] == 1
            continue
        sorted_out = oracle.eps_det(row, m, OPTIONS["c_constant"])
        sampled = oracle.eps_kept(row, m, **OPTIONS)
        if abs(sampled - sorted_out) > 1e-9 * sorted_out:  # else either is right
            assert (found.strategy_F[i] == RAND) == (sampled < sorted_out)
        if found.strategy_F[i] == DET:
            assert found.eps_F[i].item() == pytest.approx(sorted_out, rel=1e-13)
            assert set(found.mask_FK[i].nonzero()[:, 0].tolist()) == set(np.argsort(-row, kind="stable")[:m])


@settings(max_examples=40, deadline=None)
@given(arrays(np.int64, st.integers(1, 40), elements=st.integers(-(2**61), 2**61) | st.integers(-2, 2)), st.data())
def test_the_smallest_numbers_are_those_of_a_stable_sort(keys: np.ndarray, data: st.DataObject) -> None:
    n_wanted = data.draw(st.integers(1, len(keys)))
    edge, room = smallest_of(keys, n_wanted)
    chosen = set(np.flatnonzero(keys < edge)) | set(np.flatnonzero(keys == edge)[:room])
    assert chosen == set(np.argsort(keys, kind="stable")[:n_wanted])
