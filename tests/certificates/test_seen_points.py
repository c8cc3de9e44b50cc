"""The record of a pruning knows which points chose it: `certify` refuses them, whether calibration= is given or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import sipp
from sipp import certify_accuracy
from sipp.errors import DataError
from sipp.inputs import data_of
from sipp.results import Method, NetworkLike

WORD = "the inputs used for pruning are unknown"
pytestmark = pytest.mark.filterwarnings("ignore::sipp.errors.DeadRowsWarning")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def points(seed: int, n: int = 120) -> Tensor:
    return torch.rand(n, 8, generator=torch.Generator().manual_seed(seed))


def shares(pruned: NetworkLike, x: Tensor, seed: int = 9) -> bool:
    """Whether a holdout with one of these points among new ones is refused."""
    try:
        sipp.certify(net(), pruned, torch.cat([points(seed).to(x), x]))
    except DataError as error:
        return "also calibration inputs" in str(error)
    return False


@pytest.mark.parametrize("method", ["sipp-blend", "sipp-det", "sipp-rand"])
@pytest.mark.parametrize("at", [0, 100, 119])  # scored first, held back for T19, held back for the blend
def test_points_that_chose_weights_are_refused_without_calibration(method: Method, at: int) -> None:
    data = points(1)
    pruned = sipp.prune(net(), data, keep=0.8, method=method)
    assert shares(pruned, data[at : at + 1])
    for cert in (sipp.certify(net(), pruned, points(9)), certify_accuracy(net(), pruned, points(9))):
        assert cert.calibration_checked and WORD not in cert.sentence  # the record knows them: they were compared
    with pytest.raises(DataError, match="also calibration inputs"):
        certify_accuracy(net(), pruned, data[at:])


def test_a_certificate_of_a_bare_network_says_that_calibration_was_not_checked() -> None:
    data = points(1)
    pruned = sipp.prune(net(), data, keep=0.8)
    for cert in (sipp.certify(net(), pruned.model, data), certify_accuracy(net(), pruned.model, data)):
        assert not cert.calibration_checked and cert.sentence.count(WORD) == 1
    assert WORD not in sipp.certify(net(), pruned.model, points(9), calibration=data).sentence
    with pytest.raises(DataError, match="also calibration inputs"):
        sipp.certify(net(), pruned.model, data, calibration=data)


def test_points_of_a_repair_count_whenever_it_was_made() -> None:
    pruned = sipp.prune(net(), points(1), keep=0.8, method="sipp-det")
    assert not shares(pruned, points(2)[7:8])
    fixed = sipp.repair(net(), pruned, points(2))
    assert shares(fixed, points(2)[7:8]) and shares(fixed, points(1)[7:8])
    assert shares(sipp.prune(net(), points(1), keep=0.8, method="magnitude", repair=True), points(1)[7:8])


def test_points_that_chose_no_weights_may_certify() -> None:
    """`magnitude` uses its data only for statements; of 40 points, 40 chose weights."""
    by_magnitude = sipp.prune(net(), points(1), keep=0.8, method="magnitude")
    assert not shares(by_magnitude, points(1))
    for record in (by_magnitude, sipp.prune(net(), None, keep=0.8, method="magnitude")):
        cert = sipp.certify(net(), record, points(1))
        assert cert.calibration_checked and WORD not in cert.sentence  # no input can be shared
    few = sipp.prune(net(), points(1)[:40], keep=0.8, method="sipp-det")
    assert sum(shares(few, point[None]) for point in points(1)) == 40


def test_only_points_that_are_known_count_as_checked() -> None:
    """The record knows nothing of what was done to its weights afterwards, nor what chose the masks to stay within."""
    data, holdout = points(1), points(9)
    pruned = sipp.prune(net(), data, keep=0.8)
    with torch.no_grad():
        pruned.model.get_parameter("0.weight").mul_(1.01)  # as training on the holdout would
    by_magnitude = sipp.prune(net(), None, keep=0.8, method="magnitude")
    inside = sipp.prune(net(), None, keep=0.5, method="magnitude", within=pruned.masks)
    with torch.no_grad():
        by_magnitude.model.get_parameter("0.weight").mul_(1.01)
    own = sipp.prune(net(), None, keep=0.8, method=lambda task: {n: w.abs() for n, w in task.parameters().items()})
    for record in (pruned, by_magnitude, inside, own):
        cert = sipp.certify(net(), record, holdout)
        assert not cert.calibration_checked and WORD in cert.sentence
        assert sipp.certify(net(), record, holdout, calibration=data).calibration_checked


def test_repairing_or_shrinking_leaves_unknown_points_unknown() -> None:
    """A repair or `shrink` knows its own points; those that chose what it was given stay unknown, and can be any."""
    masks = sipp.prune(net(), points(9), keep=0.8, method="sipp-det").masks  # chosen on the holdout itself
    trained = sipp.prune(net(), points(1), keep=0.8, method="sipp-det")
    with torch.no_grad():
        trained.model.get_parameter("0.weight").mul_(1.01)
    given = sipp.assess(net(), masks, points(1))
    for record in (sipp.repair(net(), given, points(2)), sipp.repair(net(), trained, points(2))):
        assert shares(record, points(2)[:1])
        assert not sipp.certify(net(), record, points(9)).calibration_checked
    for small in (sipp.shrink(trained, points(3)[:2]), sipp.shrink(given, points(3)[:2])):
        assert not sipp.certify(net(), small, points(9)).calibration_checked
    known = sipp.repair(net(), sipp.prune(net(), points(1), keep=0.8), points(2))
    for one in (known, sipp.shrink(known, points(3)[:2])):
        assert sipp.certify(net(), one, points(9)).calibration_checked


class _Logged(Dataset[tuple[Tensor, int]]):
    def __init__(self) -> None:
        self.inputs, self.read = points(1, 1000), set[int]()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read.add(i)
        return self.inputs[i], i % 4


@pytest.mark.parametrize("method", ["wanda", "snip", "obs", "sipp-det", "sipp-blend"])
@pytest.mark.parametrize("statements", [True, False])
def test_all_points_of_a_loader_that_shuffles_are_known(method: Method, statements: bool) -> None:
    """Every pass begins with other points, so weights and statements may come from different ones."""
    logged = _Logged()
    pruned = sipp.prune(
        net(), DataLoader(logged, batch_size=20, sampler=RandomSampler(logged, num_samples=40)), keep=0.8,
        method=method, statements=statements,
    )  # fmt: skip
    at = sorted(logged.read)
    known = set(data_of(logged.inputs[at]).hashes())
    n_passes = 2 if statements and method in ("wanda", "snip", "obs") else 1
    assert 40 * n_passes >= len(pruned.seen.hashes) >= 40 * n_passes - 15  # the first points of a pass may come again
    seen = pruned.seen.hashes
    assert seen <= known and (seen == known or not statements)  # without, some measured the output alone
    assert sipp.certify(net(), pruned, points(9)).calibration_checked


def test_prune_to_records_the_points_it_was_given() -> None:
    best = sipp.prune_to(net(), points(1), points(5, 300), epsilon=0.9)
    assert best.pruned is not None and shares(best.pruned, points(1)[:1]) and not shares(best.pruned, points(5)[:1])
    assert sipp.certify(net(), best, points(9)).calibration_checked and shares(best, points(1)[:1])
