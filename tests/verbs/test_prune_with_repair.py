"""`repair=True` finds mask and weights together (T21), `sipp.repair` keeps the mask."""

import importlib
from typing import Any

import pytest
import torch
from oracles.patterns import obeys
from torch import Tensor, nn

import sipp
from sipp.inputs.data import data_of
from sipp.pruning import blending
from sipp.repairing import split_data, walk
from sipp.results import numerics

walking = importlib.import_module("sipp.verbs.prune_to")  # the file: the name is that of the function too


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5)).eval()


def points(n: int = 300, seed: int = 1) -> Tensor:
    """Inputs whose coordinates depend on each other: only then can other weights make up for one that goes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(12, 12, generator=torch.Generator().manual_seed(7))
    return torch.randn(n, 12, generator=generator) @ mixing


def moved_by(model: nn.Module, other: nn.Module) -> float:
    x = points(500, 9)
    with torch.no_grad():
        return float((other(x) - model(x)).norm() / model(x).norm())


def test_a_search_is_compared_with_the_network_it_was_given() -> None:
    """Not with dense weights under its masks, which a network that was sampled, repaired or trained does not have."""
    model, data = net(), points()
    parts = split_data(data_of(data))
    sampled, fixed = (
        sipp.prune(model, data, keep=0.4, method="sipp-rand", repair=repair, progress=False) for repair in (False, True)
    )
    assert fixed.repair is not None
    assert fixed.repair.output_before == pytest.approx(parts.test_error(model, sampled.model), rel=1e-6)
    polished = sipp.repair(model, sipp.prune(model, None, keep=0.4, method="magnitude"), points(2000, 3), steps=200)
    again = sipp.repair(model, polished, data, moves_mask=True)
    assert again.repair is not None
    assert again.repair.output_before == pytest.approx(parts.test_error(model, polished.model), rel=1e-6)
    worse = sipp.repair(model, polished, points(60, 5), moves_mask=True)  # far fewer than it was fitted to
    assert worse.repair is not None and worse.repair.undone and "undone" in worse.repair.sentence
    assert all(
        torch.equal(value, polished.model.state_dict()[name]) for name, value in worse.model.state_dict().items()
    )
    assert all(torch.equal(mask, polished.masks[name]) for name, mask in worse.masks.items())
    plain = sipp.repair(model, sipp.prune(model, None, keep=0.4, method="magnitude"), data, moves_mask=True)
    assert plain.repair is not None and all(layer.error_before is not None for layer in plain.repair.layers)


@pytest.mark.parametrize("method", ["sipp-blend", "magnitude", "wanda", "sipp-hybrid"])
def test_mask_and_weights_are_found_together(method: str) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cut, joint = (
        sipp.prune(model, points(), keep=0.3, method=method, repair=repair, floor=0.1, progress=False)
        for repair in (False, True)
    )
    refit = sipp.repair(model, cut, points(), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert joint.kept == cut.kept == joint.budget == sum(int(mask.sum()) for mask in joint.masks.values())
    assert all(torch.equal(refit.masks[name], mask) for name, mask in cut.masks.items())
    assert any(not torch.equal(joint.masks[name], mask) for name, mask in cut.masks.items())
    for pruned in (refit, joint):
        assert not any(layer.dead_rows for layer in pruned.layers)
        assert all(bool((pruned.model.get_parameter(n)[~mask] == 0).all()) for n, mask in pruned.masks.items())
    assert refit.repair is not None and joint.repair is not None
    assert (refit.repair.method, joint.repair.method) == ("refit", "joint")
    assert sum(layer.n_moved for layer in joint.repair.layers) > 0
    assert "found together" in str(joint) and "found together" not in str(refit)
    assert moved_by(model, joint.model) < 0.9 * moved_by(model, refit.model) < 0.9 * moved_by(model, cut.model)


def test_a_pattern_is_obeyed() -> None:
    joint = sipp.prune(net(), points(), pattern="2:4", method="wanda", repair=True, progress=False)
    weights = {name: joint.model.get_parameter(name) for name in joint.masks}
    assert all(obeys(tensor.tolist(), 2, 4) for tensor in (*joint.masks.values(), *weights.values()))
    assert joint.pattern == "2:4" and joint.repair is not None and joint.repair.method == "joint"


class Counted(nn.Module):
    """A network that counts the points it is given, together with all its copies."""

    n_points = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        Counted.n_points += len(x)
        return self.net(x)  # type: ignore[no-any-return]


def test_a_walk_fits_each_level_once_and_chooses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work is counted, so that it cannot grow unseen."""
    fits, budgets, blends = list[int](), list[int](), list[int]()
    fitted, repaired, choose = walk.fit_parts, walking.repaired_cut, blending.choose_blend

    def counted_fit(way: Any, *more: Any) -> Any:
        fits.append(sum(batch.n_points for batch in way.dense.batches[: way.n_fit_batches]))
        return fitted(way, *more)

    def counted_level(ranking: Any, masks: Any, *more: Any, **options: Any) -> Any:
        budgets.append(sum(int(mask.sum()) for mask in masks.values()))
        return repaired(ranking, masks, *more, **options)

    def counted_blends(*given: Any) -> Any:
        masks, choice = choose(*given)
        blends.append(len(choice.tried))
        return masks, choice

    monkeypatch.setattr(walk, "fit_parts", counted_fit)
    monkeypatch.setattr(walking, "repaired_cut", counted_level)
    monkeypatch.setattr(blending, "choose_blend", counted_blends)
    monkeypatch.setattr(Counted, "n_points", 0)
    best = sipp.prune_to(Counted(), points(600), points(400, 5), epsilon=0.3, repair=True, progress=False)
    assert best.pruned is not None and len(best.path) <= 10
    assert len(set(budgets)) == len(budgets) <= 6 + len(best.path)  # bisection of 59 levels, and the walk
    assert fits == [540] * len(budgets)
    assert max(blends) == blends[0] > 1 and set(blends[1:]) == {1}
    assert Counted.n_points <= 60_000  # 168,172 when every level chose and was fitted twice, on a grid half as fine


def test_repair_changes_the_mask_only_with_moves_mask() -> None:
    model = net()
    pruned = sipp.prune(model, points(), keep=0.3, method="magnitude", progress=False)
    stays, moves = (
        sipp.repair(model, pruned, points(), moves_mask=moves, steps=20, progress=False) for moves in (False, True)
    )
    assert all(torch.equal(stays.masks[name], mask) for name, mask in pruned.masks.items())
    assert any(not torch.equal(moves.masks[name], mask) for name, mask in pruned.masks.items())
    assert moves.kept == pruned.kept == sum(layer.kept for layer in moves.layers)
    assert moves.repair is not None and moves.repair.polish is not None and moves.repair.method == "joint"
    assert moves.repair.n_fit == 270  # of 300: those that stop the polish are not fitted
    assert moved_by(model, moves.model) < moved_by(model, stays.model)


@pytest.mark.parametrize("statements", [False, True])
def test_in_a_language_model_a_search_starts_from_one_mask(monkeypatch: pytest.MonkeyPatch, statements: bool) -> None:
    """The others would each cost passes of the whole network. Nothing is scored where no statement is asked for."""
    options: dict[str, Any] = {"keep": 0.4, "statements": statements, "progress": False}
    small = sipp.prune(net(), points(), repair=True, **options)
    monkeypatch.setattr(numerics, "MOST_WEIGHTS_OF_SMALL", 1000)
    large = sipp.prune(net(), points(), repair=True, **options)
    alone = sipp.prune(net(), points(), **options)
    assert small.choice is not None and large.choice is not None and alone.choice is not None
    assert [one.by_rows for one in large.choice.tried] == [True]
    assert len(small.choice.tried) == len(alone.choice.tried) == 12
    assert large.method == "sipp-blend" and large.kept == small.kept == alone.kept
    assert (large.guarantee is not None) == statements and alone.guarantee is not None
    assert large.repair is not None and large.repair.output_after is not None
    assert large.repair.output_before is not None and large.repair.output_after < large.repair.output_before


class WithZeros(nn.Module):
    """A network whose second branch has zero weights, as the offsets of deformable attention before training."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = net(), nn.Linear(12, 5)
        nn.init.zeros_(self.branch.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.branch(x)


def test_a_layer_of_zeros_does_not_stop_the_others() -> None:
    model, data = WithZeros().eval(), points()
    pruned, repaired = (sipp.prune(model, data, keep=0.3, repair=repair, progress=False) for repair in (False, True))
    assert repaired.kept == repaired.budget
    assert moved_by(model, repaired.model) < 0.9 * moved_by(model, pruned.model)
