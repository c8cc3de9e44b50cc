"""ERK: the counts of its definition for every budget, random within a layer, zeros last."""

import math

import torch
from hypothesis import given, settings, strategies as st
from oracles import scores as oracle
from torch import nn

import sipp
from sipp.pruning.rows import largest
from sipp.scoring.erk import erk
from sipp.scoring.task import task_of

LAYERS = st.one_of(
    st.builds(nn.Linear, st.integers(1, 30), st.integers(1, 30)),
    st.builds(nn.Conv2d, st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 3, (2, 5)])),
    st.builds(lambda n: nn.Conv1d(4 * n, 8, 3, groups=4), st.integers(1, 3)),
    st.builds(nn.LSTM, st.integers(1, 6), st.integers(1, 4)),
)


@given(st.lists(LAYERS, min_size=1, max_size=5), st.floats(0, 1), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_budget_has_the_counts_of_the_definition(layers: list[nn.Module], keep: float, seed: int) -> None:
    scores = erk(task_of(nn.Sequential(*layers), seed=seed))
    shapes = [tuple(score.shape) for score in scores.values()]
    budget = round(keep * sum(map(math.prod, shapes)))
    kept = [int(mask.sum()) for mask in largest(list(scores.values()), budget)]
    assert sum(kept) == budget
    most = 0.5 + len(shapes) / 2 + 1e-9  # each is rounded, and the total exact: the others may have to make room
    for found, expected in zip(kept, oracle.erk_counts(shapes, budget)):
        assert abs(found - expected) <= most


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 64))


def test_a_small_layer_stays_whole_and_the_large_one_pays() -> None:
    for keep in (0.2, 0.5):
        pruned = sipp.prune(net(), None, keep=keep, method="erk", floor=0.001)
        shares = {layer.name: layer.keep for layer in pruned.layers}
        assert shares["0.weight"] > shares["2.weight"] > shares["4.weight"] and pruned.kept == pruned.budget
        shapes = [tuple(mask.shape) for mask in pruned.masks.values()]
        free = sipp.prune(net(), None, keep=keep, method="erk", floor=0)
        counts = zip(free.layers, oracle.erk_counts(shapes, pruned.budget))
        assert all(abs(layer.kept - expected) < 1 for layer, expected in counts)
    assert shares["0.weight"] == 1.0


def test_places_within_a_layer_are_drawn_by_the_seed() -> None:
    first, again, other = (erk(task_of(net(), seed=seed))["2.weight"] for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first.flatten().sort().values, other.flatten().sort().values)
    top = first.flatten().argsort(descending=True)[:144].double() / first.numel()  # not the first ones, nor the last
    assert 0.4 < float(top.mean()) < 0.6


def test_what_was_pruned_stays_pruned_with_another_seed() -> None:
    model = net()
    first = sipp.prune(model, None, keep=0.3, method="erk", seed=1)
    second = sipp.prune(first.model, None, keep=0.1, method="erk", seed=2)
    assert all(bool((first.masks[name] | ~mask).all()) for name, mask in second.masks.items())
    direct = sipp.prune(model, None, keep=0.1, method="erk", seed=2)
    assert [layer.kept for layer in second.layers] == [layer.kept for layer in direct.layers]
