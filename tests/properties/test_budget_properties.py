"""Properties of ranking, allocation and sparsification on arbitrary rows."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracles import budget as oracle

from sipp.budget import allocate, draws_for, expected_kept, largest, order_of
from sipp.sparsify import sparsify

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


@settings(max_examples=80, deadline=None)
@given(layers(st.one_of(SCORES, st.floats(-1.0, 0.0))), st.data())
def test_largest_is_a_stable_sort_and_masks_are_nested(scores: list[np.ndarray], data: st.DataObject) -> None:
    n_scores = sum(layer.size for layer in scores)
    budget = data.draw(st.integers(0, n_scores))
    tensors = [torch.from_numpy(layer) for layer in scores]
    masks = largest(tensors, budget)
    assert all(np.array_equal(mask.numpy(), right) for mask, right in zip(masks, oracle.largest(scores, budget)))
    assert all(map(torch.equal, largest(tensors, budget, order=order_of(tensors)), masks))
    fewer = largest(tensors, data.draw(st.integers(0, budget)))
    assert all(not (less & ~more).any() for less, more in zip(fewer, masks))


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(arrays(np.float64, (3, 8), elements=st.floats(1e-6, 1.0)), st.floats(0.05, 0.95))
def test_draws_and_kept_invert_each_other(row: np.ndarray, share: float) -> None:
    sensitivity = torch.from_numpy(row)
    kept = torch.full((3,), 8 * share, dtype=torch.float64)
    torch.testing.assert_close(expected_kept(sensitivity, draws_for(sensitivity, kept)), kept, rtol=1e-10, atol=0)
