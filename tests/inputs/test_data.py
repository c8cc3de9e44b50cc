"""What a `Data` answers: can it be read again, how many points, its first batch, points held back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from sipp.errors import DataError
from sipp.inputs.data import AnyData, as_batch, data_of

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
def test_one_of_four_is_held_back_and_both_parts_stay_in_memory(case: str) -> None:
    scored, held_back = data_of(GIVEN[case][0]()).hold_back()
    for _ in range(2):
        places = points(held_back)[:, 0].div(2).long().tolist()
        assert [place // 4 for place in places] == [0, 1, 2, 3, 4]
        assert torch.equal(points(scored), X[[i for i in range(20) if i not in places]])
    assert places == points(data_of(X).hold_back()[1])[:, 0].div(2).long().tolist()  # however the data comes
    assert data_of([X[:3]]).hold_back()[1].is_empty


def test_data_that_repeats_its_classes_in_turn_has_every_class_on_both_sides() -> None:
    """With a period of four, one of every four at a fixed place would be one class."""
    classes = torch.arange(80.0) % 4
    x = torch.stack([torch.arange(80.0), classes], 1)
    assert all(len(points(part)[:, 1].unique()) == 4 for part in data_of(x).hold_back())


def test_data_sorted_by_class_has_every_class_on_both_sides_with_its_labels() -> None:
    classes = torch.arange(100) // 10
    x = torch.stack([classes.float(), torch.arange(100.0)], 1)
    for labels in (classes, classes.tolist()):
        scored, held_back = data_of([(x[:70], labels[:70]), (x[70:], labels[70:])]).hold_back()
        for part, n_batches in ((scored, 2), (held_back, 1)):
            batches = list(part.batches())
            assert len(batches) == n_batches  # small ones are joined
            found = [int(label) for batch in batches for label in batch.labels]
            assert set(found) == set(range(10)) and found == points(part)[:, 0].tolist()


def test_the_copies_of_a_point_are_on_one_side() -> None:
    x = X.repeat_interleave(3, dim=0)
    scored, held_back = (part.hashes() for part in data_of(x).hold_back())
    assert set(scored).isdisjoint(held_back)
    assert (len(scored), len(held_back), len(set(held_back))) == (45, 5, 5)


def test_in_memory_only_as_many_as_are_taken() -> None:
    kept = data_of(iter([X[:12], X[12:]]), n_points=14).in_memory()
    assert torch.equal(points(kept), X[:14]) and torch.equal(points(kept), X[:14])


def test_a_pair_of_inputs_and_labels_is_a_data_set_and_two_inputs_are_not() -> None:
    inputs, labels = torch.rand(20, 3), torch.arange(20)
    batches = list(data_of((inputs, labels)).batches(8))
    assert [batch.n_points for batch in batches] == [8, 8, 4]
    assert torch.equal(torch.cat([batch.labels for batch in batches]), labels)
    for pair in ((inputs, inputs), (labels, labels), (inputs, labels[:5]), (inputs, labels, labels)):
        with pytest.raises(DataError, match="wrap it in a list"):
            list(data_of(pair).batches())


def test_batches_are_joined_only_if_what_they_hold_has_one_form() -> None:
    ids, labels = torch.zeros(3, 5), torch.arange(3)
    one = as_batch(({"a": ids, "attention_mask": torch.ones(3, 5)}, labels), 0, "data")
    joined = one.joined(one)
    assert joined is not None and joined.n_points == 6 and joined.kwargs["a"].shape == (6, 5)
    assert joined.real_BT is not None and joined.real_BT.shape == (6, 5) and joined.labels.tolist() == [0, 1, 2] * 2
    others = (
        ({"a": ids[:, :4], "attention_mask": torch.ones(3, 4)}, labels),
        ({"a": ids.double(), "attention_mask": torch.ones(3, 5)}, labels),
        ({"b": ids, "attention_mask": torch.ones(3, 5)}, labels),
        ({"a": ids, "attention_mask": torch.ones(3, 5)}, None),
        ({"a": ids, "attention_mask": torch.ones(3, 5)}, labels.tolist()),
        ({"a": ids, "attention_mask": torch.ones(3, 5)}, labels[:2]),
        ({"a": ids}, labels),
        ((ids,), labels),
    )
    assert [one.joined(as_batch(other, 1, "data")) for other in others] == [None] * len(others)
