"""What a `Data` answers: can it be read again, how many points, its first batch, points held back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sipp.inputs.data import AnyData, data_of

X = torch.arange(40.0).view(20, 2)
# what is given, whether it can be read again, how many points are known without reading
GIVEN: dict[str, tuple[Callable[[], Any], bool, int | None]] = {
    "tensor": (lambda: X, True, 20),
    "dataset": (lambda: TensorDataset(X), True, 20),
    "list": (lambda: [X[:12], X[12:]], True, None),
    "loader": (lambda: DataLoader(TensorDataset(X), batch_size=8), True, None),
    "iterator": (lambda: iter([X[:12], X[12:]]), False, None),
    "generator": (lambda: (part for part in X.split(8)), False, None),
}


def points(given: AnyData) -> Tensor:
    return torch.cat([batch.args[0] for batch in data_of(given).batches()])


@pytest.mark.parametrize("case", GIVEN)
def test_data_knows_its_length_and_whether_it_can_be_read_again(case: str) -> None:
    make, again, n_known = GIVEN[case]
    data = data_of(make())
    assert data_of(data) is data
    assert (data.can_be_read_again, data.n_points_known, data_of(data, n_points=7).n_points_known) == (
        again,
        n_known,
        7,
    )
    assert torch.equal(points(data), X)
    assert data.can_be_read_again is False or torch.equal(points(data), X)


@pytest.mark.parametrize("case", GIVEN)
def test_the_last_quarter_is_held_back_and_both_parts_stay_in_memory(case: str) -> None:
    scored, held_back = data_of(GIVEN[case][0]()).hold_back()
    for _ in range(2):
        assert torch.equal(points(scored), X[:15]) and torch.equal(points(held_back), X[15:])
    assert len(scored.hashes()) == 15 and set(scored.hashes()).isdisjoint(held_back.hashes())
    assert data_of([X[:3]]).hold_back()[1].is_empty


def test_in_memory_only_as_many_as_are_taken() -> None:
    kept = data_of(iter([X[:12], X[12:]]), n_points=14).in_memory()
    assert torch.equal(points(kept), X[:14]) and torch.equal(points(kept), X[:14])
