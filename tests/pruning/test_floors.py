"""Floors under rows and layers: exact budgets, no row dies that has a weight, and otherwise the largest scores."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from one_layer import allocate, problem, relax
from torch import Tensor, nn

import sipp
from sipp.errors import OptionError
from sipp.pruning.rows import best_within
from sipp.scoring.methods import NAMES

OPTIONS = {"n_outputs": 40, "delta": 1e-3, "c_constant": 3.0}


def layers_of(seed: int, n_layers: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(int(a), int(b)) for a, b in torch.randint(1, 7, (n_layers, 2), generator=generator)]
    return [
        torch.rand(shape, generator=generator, dtype=torch.float64) ** (6 * i + 1) for i, shape in enumerate(shapes)
    ]


@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.5, 0.99]))
@settings(max_examples=60, deadline=None)
def test_the_budget_is_exact_and_the_floor_holds(seed: int, keep: float, share: float) -> None:
    scores = layers_of(seed)
    weights = [torch.where(layer > 0.05, layer, 0.0) for layer in scores]
    n_weights, n_rows = sum(layer.numel() for layer in scores), sum(len(layer) for layer in scores)
    budget = round(keep * n_weights)
    masks = best_within(scores, weights, budget, floor=share)
    assert sum(int(mask.sum()) for mask in masks) == budget
    n_alive = sum(int((weight != 0).any(1).sum()) for weight in weights)
    if budget >= n_alive:
        assert all(
            bool((mask & (weight != 0)).any(1)[(weight != 0).any(1)].all()) for mask, weight in zip(masks, weights)
        )
    if budget >= n_rows + sum(int(share * budget * layer.numel() / n_weights) for layer in scores):
        least = [int(share * budget * layer.numel() / n_weights) for layer in scores]
        assert all(int(mask.sum()) >= n for mask, n in zip(masks, least))


def test_what_is_kept_beyond_the_floor_is_the_largest() -> None:
    scores = [torch.tensor([[9.0, 8.0, 7.0], [1.0, 2.0, 3.0]]), torch.tensor([[0.1, 0.2, 0.0]])]
    masks = best_within(scores, scores, 4, floor=0.0)
    assert masks[0].tolist() == [[True, True, False], [False, False, True]] and masks[1].tolist() == [
        [False, True, False]
    ]
    few = best_within(scores, scores, 2, floor=0.0)  # not one for each row: the best rows
    assert [int(mask.sum()) for mask in few] == [2, 0] and few[0].tolist() == [
        [True, False, False],
        [False, False, True],
    ]


def test_both_floors_hold_wherever_the_budget_reaches_for_both() -> None:
    """The best of rows count for the floor of their layer, whose largest scores may all lie in one row."""
    scores = [torch.tensor([[9.0, 8, 7, 6], [1, 0.5, 0.4, 0.3]]), torch.rand(2, 4) + 10]
    masks = best_within(scores, scores, 6, floor=0.99)  # 2 for each layer, or 3 with the best of both rows
    assert [int(mask.sum()) for mask in masks] == [3, 3]
    masks = best_within(scores, scores, 4, floor=0.99)  # 1 of each; here too few for 3
    assert [mask.sum(1).tolist() for mask in masks] == [[1, 1], [1, 1]]
    scores = [torch.cat([torch.full((1, 9), 5.0), torch.full((3, 9), 0.1)]), torch.full((1, 9), 10.0)]
    masks = best_within(scores, scores, 10, floor=0.9)  # 7 and 1; the 7 largest and 3 more rows would be 11
    assert [int(mask.sum()) for mask in masks] == [7, 3] and masks[0].any(1).all()


def test_a_row_without_scores_keeps_its_largest_weight() -> None:
    scores, weight = (
        torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]),
        torch.tensor([[1.0, -3.0], [1.0, 1.0], [0.0, 0.0]]),
    )
    (mask,) = best_within([scores], [weight], 2, floor=0.0)
    assert mask.tolist() == [[False, True], [False, True], [False, False]]


@pytest.mark.parametrize("allocation", ["layers", "paper"])
@pytest.mark.parametrize("seed", range(4))
def test_sampled_groups_have_a_lower_limit_and_the_others_share_the_rest(seed: int, allocation: str) -> None:
    posed = problem(layers_of(seed, n_layers=4), allocation, **OPTIONS)
    least, n_some = [(worth.max(1) > 0).astype(float) for worth in posed.worths], int((posed.caps_R > 0).sum())
    budget = n_some + (int(posed.caps_R.sum()) - n_some) // 3
    kept = allocate(posed, budget, least=least)
    assert sum(int(layer.sum()) for layer in kept) == budget
    assert all((layer.ravel() >= one).all() for layer, one in zip(kept, least))
    if (relax(posed, budget) >= np.concatenate(least)).all():  # nothing binds: the plain optimum
        assert all(map(np.array_equal, allocate(posed, budget), kept))
    assert sum(int(layer.sum()) for layer in allocate(posed, n_some // 2, least=least)) == n_some // 2
    each_its_own = allocate(posed, n_some, least=least)
    assert all(np.array_equal(layer.ravel(), one) for layer, one in zip(each_its_own, least))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draws", ["until", "fixed"])
@pytest.mark.parametrize("method", ["sipp-rand", "sipp-hybrid"])
def test_no_sampled_row_dies_at_any_budget_that_reaches_for_all(method: str, draws: str) -> None:
    x = torch.rand(60, 30, generator=torch.Generator().manual_seed(0))
    x[:, 3] = 0.0
    model = net()
    with torch.no_grad():
        model[0].weight[7] = 0.0
        model[0].weight[7, 3] = 2.0  # meets nothing but zeros: no sensitivity, and yet a weight
    for seed in range(3):
        for budget in (64, 65, 70, 200):
            pruned = sipp.prune(model, x, budget=budget, method=method, draws=draws, floor=0.1, seed=seed)
            assert not any(layer.dead_rows for layer in pruned.layers), (budget, seed)
            assert pruned.kept == budget or draws == "fixed"
            assert bool(pruned.masks["0.weight"][7, 3])


def net() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 4))
    with torch.no_grad():
        model[2].weight.mul_(1e-3)  # magnitude alone would take all of it
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", NAMES)
def test_no_row_dies_with_a_floor_whatever_the_method(method: str) -> None:
    x = torch.rand(60, 30, generator=torch.Generator().manual_seed(0))
    data = [(x, torch.arange(60) % 4)]
    pruned = sipp.prune(net(), data, keep=0.033, method=method, floor=0.001)  # 69 weights for 64 rows
    assert pruned.kept == round(0.033 * pruned.n_weights) and not any(layer.dead_rows for layer in pruned.layers)
    assert any(layer.dead_rows for layer in sipp.prune(net(), data, keep=0.02, method="magnitude", floor=0).layers)


@pytest.mark.filterwarnings("ignore")
def test_the_default_method_has_a_floor_of_its_own() -> None:
    data = torch.rand(60, 30, generator=torch.Generator().manual_seed(0))
    own, given, off = (sipp.prune(net(), data, keep=0.05, floor=floor) for floor in (None, 0.1, 0))
    assert all(torch.equal(own.masks[name], mask) for name, mask in given.masks.items())
    assert not any(layer.dead_rows for layer in own.layers) and any(layer.dead_rows for layer in off.layers)


@pytest.mark.parametrize("floor", [-0.1, 1.0, float("nan"), "off", "on"])
def test_floors_that_mean_nothing_are_refused(floor: object) -> None:
    with pytest.raises(OptionError, match="floor"):
        sipp.prune(net(), None, keep=0.5, method="magnitude", floor=floor)
