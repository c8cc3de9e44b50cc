"""A comparison equals pruning by hand, on points that chose nothing, and its words say no more than its rows."""

from dataclasses import replace

import pytest
import torch
from draws import scored_and_held_back
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.results.comparison import is_level
from sipp.verbs.compare import LABELLED, USUAL


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))


def points(n: int = 200, seed: int = 1) -> Tensor:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))


def labels(x: Tensor) -> Tensor:
    """The class that the network would say, but for every fifth point."""
    with torch.no_grad():
        found = net()(x).argmax(1)
    found[::5] = (found[::5] + 1) % 4
    return found


def by_hand(dense: nn.Module, pruned: nn.Module, x: Tensor) -> tuple[float, float, Tensor]:
    """Error, share of unchanged answers, and the answers."""
    with torch.no_grad():
        f, g = dense(x).double(), pruned(x).double()
    return float((g - f).norm() / f.norm()), float((f.argmax(1) == g.argmax(1)).double().mean()), g.argmax(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("with_holdout", [False, True])
def test_every_row_is_a_pruning_by_hand(with_holdout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = points(), labels(points())
    fresh = points(80, seed=2)
    holdout = [(fresh, labels(fresh))] if with_holdout else None
    found = sipp.compare(net(), [(x, y)], keeps=[0.3, 0.6][: 2 - with_holdout], repair=True, holdout=holdout)
    chosen, test = ((x, y), (fresh, labels(fresh))) if with_holdout else scored_and_held_back(x, y)
    assert {row.method for row in found.rows} == {*USUAL, *LABELLED}
    assert (found.n_calibration, found.n_test) == (len(chosen[0]), len(test[0]))
    assert found.keeps == ((0.3,) if with_holdout else (0.6, 0.3)) and len(found.rows) == 2 * 7 * len(found.keeps)
    for row in found.rows:
        if row.is_repaired and row.keep == 0.6:  # as at 0.3
            continue
        pruned = sipp.prune(net(), [tuple(chosen)], keep=row.keep, method=row.method, repair=row.is_repaired)
        error, same, answers = by_hand(net(), pruned.model, test[0])
        assert row.error == pytest.approx(error, rel=1e-5), row.name
        assert row.same == pytest.approx(same) and row.kept == pruned.kept
        assert row.accuracy == pytest.approx(float((answers == test[1]).double().mean()))
        assert row.dead_rows == sum(layer.dead_rows for layer in pruned.layers)
    with torch.no_grad():
        right = (net()(test[0]).argmax(1) == test[1]).double().mean()
    assert found.dense_accuracy == pytest.approx(float(right))


def test_the_test_points_choose_nothing() -> None:
    """Other held-back points leave every choice as it was; points in the holdout and the data are refused."""
    x, other = points(), points()
    (chosen,), (held_back,) = scored_and_held_back(x)
    is_test = (x[:, None] == held_back).all(-1).any(1)
    other[is_test] = points(50, seed=7) * 3
    first, second = (sipp.compare(net(), data, keeps=[0.4], repair=True) for data in (x, other))
    for one, two in zip(first.rows, second.rows):
        assert (one.method, one.kept, one.dead_rows) == (two.method, two.kept, two.dead_rows)
    assert [row.error for row in first.rows] != [row.error for row in second.rows]
    tested = sipp.compare(net(), chosen, keeps=[0.4], repair=True, holdout=other[is_test])
    assert [row.error for row in tested.rows] == [row.error for row in second.rows]
    with pytest.raises(DataError, match="calibration"):
        sipp.compare(net(), x, keeps=[0.4], holdout=x[:50])


def test_data_sorted_by_class_is_tested_on_every_class() -> None:
    """The last quarter of it would be one class, of which this network is always right."""
    model = nn.Linear(8, 4)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 100.0]))
    found = sipp.compare(model, [(points(), torch.arange(200) // 50)], keeps=[0.5], methods=["magnitude"])
    assert found.n_test == 50 and found.dense_accuracy == pytest.approx(0.25, abs=0.03)


def test_the_table_marks_the_best_and_the_sentence_names_it() -> None:
    found = sipp.compare(net(), points(), keeps=(0.9, 0.8, 0.7, 0.02), methods=("magnitude", "random"))
    text = str(found)
    assert text.count("magnitude ") >= 2 and text.count("0.9:") == 1 and text.count("0.02:") == 1
    for keep in found.keeps:
        column = [row.error for row in found.rows if row.keep == keep]
        assert found.best(keep).error == min(column)
        assert f"{found.best(keep).error:.3g}*" in text
    usable = [keep for keep in found.keeps if found.best(keep).error <= 0.5]
    assert usable and len(usable) < 4
    assert found.sentence.startswith(
        f"Use {found.best(usable[-1]).name} at keep {usable[-1]:g}: on 50 held-back inputs"
    )
    assert found.sentence.endswith("certify it on others.") and "accuracy" not in found.sentence


def test_methods_that_points_cannot_tell_apart_are_named() -> None:
    x = points()
    twice = sipp.compare(net(), x, keeps=(0.9,), methods=("magnitude", "random"))
    twin = replace(twice.rows[0], method="lamp")
    assert "On these inputs, lamp cannot be told apart from it." in replace(twice, rows=(twice.rows[0], twin)).sentence
    assert "do not tell" not in twice.sentence
    assert is_level((1.0,), (9.0,)) and is_level((1.0, 1.0, 1.0), (0.0, 3.0, 1.5))
    assert not is_level((1.0, 1.0, 1.0), (2.0, 2.1, 1.9)) and not is_level((1.0, 1.0), (float("inf"), 1.0))


class Pair(nn.Module):
    """Two outputs, one of which must be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x), "map": self.net(x)[:, :, None] * x[:, None]}


def test_the_output_is_chosen_as_for_a_certificate() -> None:
    with pytest.raises(ModelError, match="output="):
        sipp.compare(Pair(), points(), keeps=(0.5,), methods=("magnitude",))
    scores = sipp.compare(Pair(), points(), keeps=(0.5,), methods=("magnitude",), output="logits").rows[0]
    other = sipp.compare(Pair(), points(), keeps=(0.5,), methods=("magnitude",), output="map").rows[0]
    assert scores.same is not None and other.same is None and scores.error != other.error
