"""The same share for every row: exact in total, rounded where it is lost most, with a lower limit where asked for."""

import torch
from hypothesis import given, settings, strategies as st

from sipp.pruning.rows import even_rows

SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4)
FEW = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 7)), min_size=1, max_size=3)  # where all budgets are tried


@given(SHAPES, st.floats(0, 1), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_rows_get_their_share_and_the_total_is_exact(shapes: list[tuple[int, int]], keep: float, least: int) -> None:
    n_weights, n_rows = sum(rows * fan_in for rows, fan_in in shapes), sum(rows for rows, _ in shapes)
    budget = round(keep * n_weights)
    kept = even_rows(shapes, budget, least=least)
    assert [len(layer) for layer in kept] == [rows for rows, _ in shapes]
    assert sum(int(layer.sum()) for layer in kept) == budget
    for layer, (_, fan_in) in zip(kept, shapes):
        assert int(layer.min()) >= 0 and int(layer.max()) <= fan_in
        if least == 0:
            assert int(layer.max()) - int(layer.min()) <= 1
        elif least * n_rows <= budget:
            assert int(layer.min()) >= min(least, fan_in)


def test_a_row_too_short_for_its_share_still_has_its_limit() -> None:
    shapes = [(3, 2), (1, 100)]
    assert [layer.tolist() for layer in even_rows(shapes, 6)] == [[0, 0, 0], [6]]
    assert [layer.tolist() for layer in even_rows(shapes, 6, least=1)] == [[1, 1, 1], [3]]
    assert sum(int(layer.sum()) for layer in even_rows(shapes, 2, least=1)) == 2  # not one for each: no limit


@given(SHAPES, st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_all_are_the_nearest_whole_number_at_one_share(shapes: list[tuple[int, int]], keep: float) -> None:
    """The definition: a share x with |kept - x size| <= 1/2 for every row."""
    sizes = torch.cat([torch.full((rows,), fan_in) for rows, fan_in in shapes]).double()
    kept = torch.cat(even_rows(shapes, round(keep * int(sizes.sum())))).double()
    least, most = ((kept - 0.5) / sizes).max(), ((kept + 0.5) / sizes).min()
    assert float(least) <= float(most) + 1e-12


@given(FEW, st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_with_a_larger_budget_no_row_gets_less(shapes: list[tuple[int, int]], least: int) -> None:
    n_weights, n_rows = sum(rows * fan_in for rows, fan_in in shapes), sum(rows for rows, _ in shapes)
    before = None
    for budget in range(least * n_rows, n_weights + 1):
        kept = torch.cat(even_rows(shapes, budget, least=least))
        assert int(kept.sum()) == budget and (before is None or bool((kept >= before).all()))
        before = kept
