"""A score of the user's own: registered by name, or given as a function for once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.scoring import methods


@pytest.fixture(autouse=True)
def own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_ROWS", {row.name: row for row in methods.METHODS})


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train()


def squares(task: Any) -> dict[str, Tensor]:
    return {name: weight**2 for name, weight in task.parameters().items()}


def data(n: int = 40) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.rand(n // 2, 6), torch.randint(3, (n // 2,))) for _ in range(2)]


def masks(pruned: sipp.Pruned) -> list[Tensor]:
    return list(pruned.masks.values())


def test_a_score_of_squares_gives_the_masks_of_magnitude(net: nn.Module) -> None:
    """By name and as a function, alone, in a ladder and beside others: the masks of magnitude."""
    sipp.register_method("squares", squares, about="keeps the largest squares")
    expected = sipp.prune(net, data(), keep=0.3, method="magnitude")
    for method in ("squares", squares):
        found = sipp.prune(net, data(), keep=0.3, method=method)
        assert all(map(torch.equal, masks(found), masks(expected)))
        assert found.method == "squares" and "squares" in str(found)
        assert bool(found.seen.hashes) == callable(method)  # nobody knows whether a function looked at the points
    assert (
        sipp.prune(net, None, keep=0.3, method=squares).kept == expected.kept
    )  # and it needs no data if it takes none
    both = sipp.compare(net, data(), keeps=(0.5,), methods=("magnitude", squares))
    assert [row.method for row in both.rows] == ["magnitude", "squares"] and both.rows[0].error == both.rows[1].error
    best = sipp.prune_to(net, data(), torch.rand(100, 6), epsilon=1.0, method="squares")
    assert best.pruned is not None and best.pruned.method == "squares"


def test_gradients_and_labels(net: nn.Module) -> None:
    """SNIP written by a user is SNIP; modes, buffers and .grad are as before, also after backward()."""

    def mine(task: Any) -> dict[str, Tensor]:
        assert not task.model.training
        for batch in task.batches():
            loss = F.cross_entropy(task.model(*batch.args, **batch.kwargs), batch.labels) * batch.n_points
            loss.backward()
        return {name: (weight * weight.grad).abs() for name, weight in task.parameters().items()}

    before = {name: value.clone() for name, value in net.state_dict().items()}
    sipp.register_method("mine", mine, needs=["labels"])
    found, expected = (sipp.prune(net, data(), keep=0.4, method=one) for one in ("mine", "snip"))
    assert all(map(torch.equal, masks(found), masks(expected)))
    assert net.training and all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with pytest.raises(OptionError, match="'mine' needs data"):
        sipp.prune(net, None, keep=0.4, method="mine")
    with pytest.raises(DataError, match="needs data, and there is none"):
        sipp.prune(net, None, keep=0.4, method=mine)


def test_negative_scores_are_an_order(net: nn.Module) -> None:
    found = sipp.prune(
        net, None, keep=0.5, method=lambda task: {n: w.abs() - 5.0 for n, w in task.parameters().items()}
    )
    expected = sipp.prune(net, None, keep=0.5, method="magnitude")
    assert all(map(torch.equal, masks(found), masks(expected))) and found.method == "own score"


def emptied(task: Any) -> dict[str, Tensor]:
    scores = squares(task)
    task.parameters()["3.weight"].data = torch.zeros(1)
    with torch.no_grad():
        task.parameters()["0.weight"].zero_()
        task.model[1].running_mean += 1.0
    return scores


def test_a_score_may_write_to_its_model(net: nn.Module) -> None:
    before = {name: (value.clone(), value.data_ptr()) for name, value in net.state_dict().items()}
    found, expected = (sipp.prune(net, None, keep=0.5, method=one) for one in (emptied, "magnitude"))
    assert all(map(torch.equal, masks(found), masks(expected)))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name][0]) and value.data_ptr() == before[name][1]


@pytest.mark.parametrize(
    ("score", "error", "words"),
    [
        (lambda task: None, OptionError, "NoneType in place of a dictionary"),
        (lambda task: {}, OptionError, "a NoneType for 0.weight"),
        (lambda task: {n: w[:1] for n, w in task.parameters().items()}, OptionError, r"\(1, 6\) for 0.weight"),
        (lambda task: {n: w / 0 for n, w in task.parameters().items()}, ModelError, "0.weight: .*not finite"),
        (lambda task: 1 / 0, OptionError, "raised ZeroDivisionError"),
    ],
)
def test_what_a_score_may_not_do(score: Any, error: type[Exception], words: str, net: nn.Module) -> None:
    with pytest.raises(error, match=words):
        sipp.prune(net, None, keep=0.5, method=score)


@pytest.mark.parametrize(
    "options",
    [{"name": "magnitude"}, {"name": "given"}, {"name": "a b"}, {"name": "../x"}, {"name": 3}, {"score": 3},
     {"needs": ["gpu"]}, {"needs": 3}, {"about": "a\nb"}],
)  # fmt: skip
def test_what_cannot_be_registered(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        sipp.register_method(**{"name": "mine", "score": squares, **options})
    assert list(sipp.methods()) == list(methods.NAMES)


def test_registered_methods_are_suggested_and_name_clashes_refused(net: nn.Module) -> None:
    sipp.register_method("mine", squares)
    with pytest.raises(OptionError, match="mine; did you mean 'mine'"):
        sipp.prune(net, None, keep=0.5, method="mines")
    sipp.register_method("squares", squares)
    with pytest.raises(OptionError, match="two methods are called 'squares'"):
        sipp.compare(net, data(), keeps=(0.5,), methods=("squares", squares))
