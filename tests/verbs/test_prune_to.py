"""T15: the sparsest certified network, on a grid fixed in advance, and a clear word where none is."""

import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sipp.errors import DataError, OptionError
from sipp.pruning import cut, rank
from sipp.results import numerics
from sipp.results.binomial import k_allowed
from sipp.results.options import Method, PruneOptions
from sipp.scoring.task import task_of
from sipp.verbs.prune_to import N_LEVELS, levels_of, prune_to


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows die on sparse levels
        yield


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))
    with torch.no_grad():
        for parameter in model.parameters():  # heavy tails: something to prune
            parameter.mul_(parameter.abs() * 20)
    return model


def given_levels(monkeypatch: pytest.MonkeyPatch, *levels: float) -> None:
    """Levels in place of the usual ones."""
    monkeypatch.setattr("sipp.verbs.prune_to.levels_of", lambda n: levels)


def points(n: int, seed: int) -> Tensor:
    return torch.rand(n, 12, generator=torch.Generator().manual_seed(seed))


def test_the_last_passing_level_is_returned_and_the_walk_stops_at_the_first_failure() -> None:
    model = net()
    best = prune_to(model, points(100, 1), points(400, 2), epsilon=0.3, method="sipp-det")
    assert best.pruned is not None and best.certificate is not None
    assert [level.passed for level in best.path[:-1]] == [True] * (len(best.path) - 1)
    last = [level for level in best.path if level.passed][-1]
    assert best.pruned.budget == last.budget and best.keep == best.pruned.keep < 1
    assert best.model is best.pruned.model
    assert best.certificate.verdict == "certified"
    assert best.certificate.violations == last.count
    assert best.certificate.calibration_checked
    levels, keeps = levels_of(N_LEVELS), [level.keep for level in best.path]
    start = levels.index(keeps[3])
    assert keeps[:3] == [levels[start * k // 4] for k in (1, 2, 3)]
    assert keeps[3:] == list(levels[start : start + len(keeps) - 3])
    assert (len(levels), levels[0], levels[-1]) == (30, 1.0, 0.02) and sorted(levels, reverse=True) == list(levels)


def test_a_network_that_was_changed_since_is_not_called_certified() -> None:
    best = prune_to(net(), points(100, 1), points(300, 2), epsilon=0.3, method="magnitude")
    assert (
        "certified at keep" in str(best) and "95 % confidence" in str(best) and "95 % confidence" in best._repr_html_()
    )
    with torch.no_grad():
        next(best.model.parameters()).mul_(1.5)
    for text in (str(best), best._repr_html_()):
        assert "changed after it was certified" in text and "certified at" not in text and "confidence" not in text


@pytest.mark.parametrize(
    "method", ["magnitude", "wanda", "erk", "obs", "sipp-blend", "sipp-det", "sipp-rand", "sipp-hybrid"]
)
def test_a_level_of_a_walk_has_the_bits_of_a_cut(method: Method) -> None:
    ranking = rank(task_of(net(), points(100, 1)), PruneOptions(method=method))
    shared = net()
    for budget in (300, 40, 170, 11, 40, 384):
        walked = cut(ranking, budget, seed=5, into=shared)
        alone = cut(rank(task_of(net(), points(100, 1)), PruneOptions(method=method)), budget, seed=5)
        assert walked.model is shared and all(map(torch.equal, shared.parameters(), alone.model.parameters()))
        for row, other, mask in zip(walked.rows, alone.rows, alone.masks.values()):
            assert torch.equal(row.mask_FK, mask)
            assert torch.equal(row.eps_F, other.eps_F)


def test_the_start_comes_from_the_calibration_data_alone() -> None:
    model = net()
    starts = {
        prune_to(model, points(200, 1), points(300, seed), epsilon=0.5, method="magnitude").path[0].keep
        for seed in (2, 3, 4)
    }
    assert len(starts) == 1 and starts.pop() < 1
    one_shot = prune_to(model, iter([points(200, 1)]), points(300, 2), epsilon=0.5, method="sipp-det")
    assert one_shot.path[0].keep == 1 and one_shot.certificate.calibration_checked  # the record knows what was read


def axis_points(counts: dict[int, int], seed: int) -> Tensor:
    """So many points on each axis: a network of one weight an axis is wrong on those whose weight is gone."""
    axes = torch.tensor([axis for axis, n in counts.items() for _ in range(n)])
    scale = 1 + torch.rand(len(axes), 1, generator=torch.Generator().manual_seed(seed))
    return nn.functional.one_hot(axes, 8) * scale


def axis_net() -> nn.Module:
    model = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(1.0, 9.0)[None])  # magnitudes: axis 0 goes first
    return model


def test_one_violation_more_than_allowed_fails_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    given_levels(monkeypatch, 1.0, 0.875, 0.75)
    allowed = k_allowed(100, 0.1, 0.05)
    holdout = axis_points({0: allowed, 1: 1, 7: 99 - allowed}, 2)
    options = {"epsilon": 0.5, "share": 0.1, "method": "magnitude"}
    best = prune_to(axis_net(), axis_points({7: 100}, 1), holdout, **options)
    assert [(level.count, level.passed) for level in best.path] == [(0, True), (allowed, True), (allowed + 1, False)]
    assert best.keep == 0.875 and best.certificate is not None and best.certificate.violations == allowed


def test_every_level_is_tested_from_three_before_the_sparsest_that_passes_on_the_calibration_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    levels = tuple(1 - i / 40 for i in range(35))
    given_levels(monkeypatch, *levels)
    data, holdout = axis_points({5: 50, 7: 50}, 1), axis_points({7: 100}, 2)  # without axis 5 half of the data is wrong
    best = prune_to(axis_net(), data, holdout, epsilon=0.5, method="magnitude")
    sparsest = max(i for i, keep in enumerate(levels) if numerics.budget_of(keep, 8) >= 3)
    denser = [levels[(sparsest - 3) * k // 4] for k in (1, 2, 3)]
    assert [level.keep for level in best.path] == [*denser, *levels[sparsest - 3 :]]


def test_a_promise_that_the_holdout_breaks_costs_sparsity_not_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calibration data have one axis only, so they promise the sparsest level; the holdout has others."""
    levels = tuple(1 - i / 8 for i in range(8))
    given_levels(monkeypatch, *levels)
    data, holdout = axis_points({7: 100}, 1), axis_points({2: 50, 7: 50}, 2)
    best = prune_to(axis_net(), data, holdout, epsilon=0.5, method="magnitude")
    assert [(level.keep, level.passed) for level in best.path] == [(0.875, True), (0.75, True), (0.625, False)]
    assert best.keep == 0.75 and best.certificate is not None


def test_no_level_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    given_levels(monkeypatch, 0.5, 0.25)
    model = net()
    best = prune_to(model, points(50, 1), points(300, 2), epsilon=0.0, method="sipp-det")
    assert best.pruned is None and best.certificate is None and best.model is model and best.keep == 1.0
    assert "not certified: keep 50.00%, the first level tested, does not pass" in str(best) and "dense" in str(best)
    assert len(best.path) == 1 and not best.path[0].passed


def test_a_holdout_too_small_is_refused_with_the_number_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["sipp.verbs.prune_to"], "_Levels")  # no level is tried for it
    best = prune_to(net(), points(50, 1), points(58, 2), epsilon=0.5, method="magnitude")
    assert best.pruned is None and "needs n >= 59" in best.verdict and best.path == ()


def test_accuracy_drop_with_and_without_labels() -> None:
    model, holdout = net(), points(500, 2)
    labels = model(holdout).argmax(1)
    labelled = prune_to(model, points(100, 1), [(holdout, labels)], max_accuracy_drop=0.1, method="sipp-det")
    free = prune_to(model, points(100, 1), holdout, max_accuracy_drop=0.1, method="sipp-det")
    for best, mode in ((labelled, "labels"), (free, "label-free")):
        assert best.certificate.mode == mode and best.certificate.drop_upper <= 0.1
        assert best.path[-1].passed or best.path[-1].limit > 0.1
        assert best.keep < 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "exactly one"),
        ({"epsilon": 0.1, "max_accuracy_drop": 0.1}, "exactly one"),
        ({"epsilon": -0.1}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": 0.1, "share": 0.0}, "share"),
        ({"max_accuracy_drop": 0.1, "share": 0.05}, "an accuracy drop leaves none out; leave share out"),
        ({"epsilon": 0.1, "confidence": 1.0}, "confidence"),
        ({"max_accuracy_drop": 0.0}, "max_accuracy_drop"),
    ],
)
def test_options_out_of_range_are_named(options: dict, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        prune_to(net(), points(20, 1), points(100, 2), **options)


@pytest.mark.parametrize("goal", [{"max_accuracy_drop": 0.1}, {"epsilon": 0.5}])
def test_a_shuffling_loader_gives_the_result_of_a_list(goal: dict) -> None:
    x, y = points(510, 2), torch.arange(510) % 4
    shuffling = {"batch_size": 50, "shuffle": True}
    data, holdout = DataLoader(points(100, 1), **shuffling), DataLoader(TensorDataset(x, y), **shuffling)
    fixed = prune_to(net(), points(100, 1), [(x, y)], method="magnitude", **goal)
    moving = prune_to(net(), data, holdout, method="magnitude", **goal)
    assert moving.path == fixed.path and moving.keep == fixed.keep < 1
    assert moving.certificate.data_hash == fixed.certificate.data_hash


def test_dense_outputs_are_computed_again_only_where_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, paths = net(), [], []
    model.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    for most in (0, 1 << 20):
        monkeypatch.setattr("sipp.inputs.outputs.OUTPUT_BYTES", most)
        calls.clear()
        found = prune_to(model, points(100, 1), points(300, 2), epsilon=0.5, method="magnitude")
        paths.append((found.path, len(calls)))
    (path, n_without), (same, n_with) = paths
    assert path == same and n_with < n_without


class Tokens(nn.Module):
    """A linear layer of every token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.linear(self.embedding(input_ids))


class Repadded:
    """Different sequences, padded to another length in every pass."""

    def __init__(self, n: int, seed: int) -> None:
        ids = torch.randint(0, 9, (n, 6), generator=torch.Generator().manual_seed(seed))
        self.rows, self.n_passes = ids.unique(dim=0), 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.n_passes += 1
        for row in self.rows.split(1):
            padding = torch.zeros(1, self.n_passes, dtype=torch.int64)
            mask = torch.cat([torch.ones_like(row), padding], 1)
            yield {"input_ids": torch.cat([row, padding], 1), "attention_mask": mask}


def test_a_holdout_may_be_padded_to_another_length_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    given_levels(monkeypatch, 1.0, 0.9, 0.5)
    holdout = Repadded(80, 2)
    best = prune_to(Tokens(), list(Repadded(12, 1)), holdout, epsilon=0.9, method="magnitude")
    assert holdout.n_passes > 1
    assert best.certificate is not None and len(best.path) == 3


def test_an_iterator_as_holdout_is_refused() -> None:
    with pytest.raises(DataError, match="iterator"):
        prune_to(net(), points(20, 1), iter([points(100, 2)]), epsilon=0.1)


def test_nan_in_a_pruned_output_counts_as_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    given_levels(monkeypatch, 0.9, 0.5)
    holdout = points(200, 2)
    holdout[:20] = float("nan")  # 10 % of the points cannot be certified at share = 5 %
    best = prune_to(net(), points(50, 1), holdout, epsilon=10.0, method="magnitude")
    assert best.pruned is None and best.path[0].count >= 20


def test_a_holdout_larger_than_the_calibration_data_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        prune_to(net(), points(100, 1), points(400, 2), epsilon=0.5, method="magnitude")
    assert not [one for one in told if "were asked for" in str(one.message)]
