"""Which weights stay, with a floor or a pattern or the same share everywhere, and T5's bound of a row."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from one_layer import eps_det
from oracles import budget as oracle, patterns as pattern_oracle
from torch import Tensor

from sipp.errors import DataError, OptionError
from sipp.pruning.rows import best_within, eps_given, even_layers, even_rows, largest_in_groups
from sipp.results.options import Pattern

SCORES = st.one_of(st.sampled_from([0.0, -0.0, 0.5, 1.0]), st.floats(-1.0, 1.0), st.sampled_from([1e-300, 5e-324]))
SHAPES = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4)


@st.composite
def layers(draw: st.DrawFn) -> list[np.ndarray]:
    return [draw(arrays(np.float64, shape, elements=SCORES)) for shape in draw(SHAPES)]


# --- The largest, perhaps above a floor -------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(layers(), st.data())
def test_the_largest_are_those_of_a_stable_sort(scores: list[np.ndarray], data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, sum(layer.size for layer in scores)))
    tensors = [torch.from_numpy(layer) for layer in scores]
    masks = best_within(tensors, tensors, budget, floor=None)
    assert all(np.array_equal(mask.numpy(), right) for mask, right in zip(masks, oracle.largest(scores, budget)))


def test_what_cannot_be_ranked_is_refused() -> None:
    nan = [torch.ones(2, 1), torch.tensor([[1.0, math.nan]])]
    with pytest.raises(DataError, match="layer 1"):
        best_within(nan, nan, 1, floor=None)
    for budget in (-1, 3):
        with pytest.raises(OptionError, match="between 0 and the number of weights, 2"):
            best_within([torch.ones(1, 2)], [torch.ones(1, 2)], budget, floor=None)


@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.5, 0.99]))
@settings(max_examples=60, deadline=None)
def test_the_budget_is_exact_and_the_floor_holds(seed: int, keep: float, floor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.randint(1, 7, (3, 2), generator=generator).tolist()
    scores = [
        torch.rand(shape, generator=generator, dtype=torch.float64) ** (6 * i + 1) for i, shape in enumerate(shapes)
    ]
    weights = [torch.where(layer > 0.05, layer, 0.0) for layer in scores]
    n_weights, n_rows = sum(layer.numel() for layer in scores), sum(len(layer) for layer in scores)
    budget = round(keep * n_weights)
    masks = best_within(scores, weights, budget, floor=floor)
    assert sum(int(mask.sum()) for mask in masks) == budget
    alive = [(weight != 0).any(1) for weight in weights]
    if budget >= sum(int(one.sum()) for one in alive):
        assert all(bool((m & (w != 0)).any(1)[one].all()) for m, w, one in zip(masks, weights, alive))
    least = [int(floor * budget * layer.numel() / n_weights) for layer in scores]
    if budget >= n_rows + sum(least):
        assert all(int(mask.sum()) >= n for mask, n in zip(masks, least))


def test_beyond_the_floor_the_largest_are_kept() -> None:
    scores = [torch.tensor([[9.0, 8.0, 7.0], [1.0, 2.0, 3.0]]), torch.tensor([[0.1, 0.2, 0.0]])]
    masks = best_within(scores, scores, 4, floor=0.0)
    assert [mask.int().tolist() for mask in masks] == [[[1, 1, 0], [0, 0, 1]], [[0, 1, 0]]]
    few = best_within(scores, scores, 2, floor=0.0)  # not one for each row: the best rows
    assert [mask.int().tolist() for mask in few] == [[[1, 0, 0], [0, 0, 1]], [[0, 0, 0]]]
    # the best of rows count for the floor of their layer, whose largest scores may all lie in one row
    scores = [torch.cat([torch.full((1, 9), 5.0), torch.full((3, 9), 0.1)]), torch.full((1, 9), 10.0)]
    masks = best_within(scores, scores, 10, floor=0.9)  # 7 and 1; the 7 largest and 3 more rows would be 11
    assert [int(mask.sum()) for mask in masks] == [7, 3] and masks[0].any(1).all()
    blind, weight = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]), torch.tensor([[1.0, -3.0], [1.0, 1.0], [0, 0]])
    (mask,) = best_within([blind], [weight], 2, floor=0.0)  # a row without scores keeps its largest weight
    assert mask.int().tolist() == [[0, 1], [0, 1], [0, 0]]


def test_where_a_budget_is_too_small_for_rows_and_floor_rows_come_first() -> None:
    scores = [torch.arange(2.0, 10.0)[None], torch.tensor([[1.0, 0.5]]).expand(4, 2)]
    masks = best_within(scores, scores, 5, floor=0.99)  # 2 and 2, and 4 rows of the second
    assert [int(mask.sum()) for mask in masks] == [1, 4] and masks[1].any(1).all()


# --- The same share for every row -------------------------------------------------------------------------------------


@given(SHAPES, st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_rows_keep_the_nearest_whole_number_at_one_share(shapes: list[tuple[int, int]], keep: float) -> None:
    """The definition: a share x with |kept - x size| <= 1/2 for every row."""
    sizes = torch.cat([torch.full((rows,), fan_in) for rows, fan_in in shapes]).double()
    budget = round(keep * int(sizes.sum()))
    kept = torch.cat(even_rows(shapes, budget)).double()
    assert int(kept.sum()) == budget
    assert float(((kept - 0.5) / sizes).max()) <= float(((kept + 0.5) / sizes).min()) + 1e-12
    of_layers = even_layers(shapes, budget)  # the same, a layer counting as one row
    assert of_layers == [int(n) for n in even_rows([(1, rows * fan_in) for rows, fan_in in shapes], budget)]


@given(SHAPES, st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_with_a_larger_budget_no_row_gets_less(shapes: list[tuple[int, int]], least: int) -> None:
    n_weights, n_rows = sum(rows * fan_in for rows, fan_in in shapes), sum(rows for rows, _ in shapes)
    before = torch.zeros(n_rows)
    for budget in range(least * n_rows, n_weights + 1):
        kept = torch.cat(even_rows(shapes, budget, least=least))
        assert int(kept.sum()) == budget and bool((kept >= before).all())
        before = kept
    assert [layer.tolist() for layer in even_rows([(3, 2), (1, 100)], 6, least=1)] == [[1, 1, 1], [3]]


# --- Patterns n:m -----------------------------------------------------------------------------------------------------


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Tensor, Pattern]:
    shape, m = (draw(st.integers(0, 4)), draw(st.integers(0, 13))), draw(st.integers(1, 9))
    elements = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3e-20, 2e18, 7.0])  # ties, zeros, negative ones
    values = draw(arrays(draw(st.sampled_from([np.float32, np.float64])), shape, elements=elements))
    return torch.from_numpy(values), Pattern(draw(st.integers(1, m)), m)


@given(grouped())
@settings(max_examples=60, deadline=None)
def test_masks_of_patterns_are_their_definition(case: tuple[Tensor, Pattern]) -> None:
    score_FK, pattern = case
    mask_FK = largest_in_groups(score_FK, pattern)
    assert mask_FK.tolist() == pattern_oracle.largest_in_groups(score_FK.tolist(), pattern.n, pattern.m)
    assert int(mask_FK.sum()) == len(score_FK) * pattern.kept(score_FK.shape[1])


@pytest.mark.parametrize("text", ["", "2", ":4", "0:4", "5:4", "2:4:8", " 2:4", "-1:4", "2.0:4", 2, 0.5, [2]])
def test_what_is_no_pattern(text: object) -> None:
    with pytest.raises(OptionError, match="is not a pattern n:m"):
        Pattern.of(text)


# --- T5 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eps_det_is_the_tail_of_the_sorted_row(dtype: torch.dtype) -> None:
    rows = (torch.rand(12, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 3).to(dtype)
    rows[0], rows[1, 1:] = 0.0, 0.0
    for kept in (0, 1, 7, 39, 40):
        found = eps_det(rows, torch.full((12,), kept), c_constant=3.0)
        expected = [oracle.eps_det(row, kept, 3.0) for row in rows.numpy()]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)


def test_the_bound_of_a_long_row_does_not_depend_on_threads() -> None:
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    weight, factor, sensitivity = torch.rand(3, 1, 300_000, generator=generator, dtype=torch.float64)
    found = []
    try:
        for n_threads in (1, 3):
            torch.set_num_threads(n_threads)
            found.append(eps_given(weight, factor * weight, sensitivity, c_constant=3.0).item())
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == pytest.approx(3 * float(((1 - factor) * sensitivity).sum()), rel=1e-12)
