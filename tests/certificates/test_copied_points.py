"""Copies among the holdout's points prove nothing: only different points count, and a violation counts with its copies.

tests/validity/test_certificates.py shows by simulation why simpler rules would be wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp import certify_accuracy
from sipp.errors import DataError
from sipp.results import binomial


class Net(nn.Module):
    """The classes (x, 0), but with its weight pruned away (x, x + 1) where the second column says so."""

    def __init__(self, *, is_pruned: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[2.0, 0.0 if is_pruned else 1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        is_bad = (x[:, 1:] > 0).to(x.dtype)
        value = self.linear(torch.cat((torch.ones_like(is_bad), is_bad), dim=1)) - 2.5 * is_bad
        return torch.cat((value, 0.1 * torch.ones_like(value)), dim=1)


def points(n: int, n_bad: int = 0) -> Tensor:
    x = torch.arange(1.0, n + 1)[:, None].repeat(1, 2)
    x[:, 1] = -1.0
    x[n - n_bad :, 1] = 1.0
    return x


DENSE, PRUNED = Net(), Net(is_pruned=True)


def test_many_copies_of_too_few_points_are_refused() -> None:
    x = points(20)[torch.randint(0, 20, (2000,), generator=torch.Generator().manual_seed(0))]
    cert = sipp.certify(DENSE, PRUNED, x)
    assert (cert.n, cert.n_duplicates, cert.verdict) == (20, 1980, "refused: needs n >= 59")
    assert cert.sentence.startswith("No claim: 2,000 holdout inputs, 20 of them distinct, are too few")
    asked = sipp.certify(DENSE, PRUNED, x, epsilon=0.5)
    assert asked.verdict == cert.verdict and asked.proved_share == pytest.approx(1 - 0.05 ** (1 / 20))
    walk = sipp.prune_to(DENSE, iter([points(5)]), x, epsilon=0.5, method="magnitude")
    assert walk.certificate is None and "needs n >= 59, the holdout has 20 different inputs" in walk.verdict
    drop = certify_accuracy(DENSE, PRUNED, x)
    assert (drop.n, drop.n_duplicates) == (20, 1980) and drop.drop_upper == pytest.approx(1 - 0.05 ** (1 / 20))


def test_a_violation_counts_with_every_copy() -> None:
    once = points(200, n_bad=2)
    cert = sipp.certify(DENSE, PRUNED, once, epsilon=0.01)
    assert (cert.violations, cert.verdict) == (2, "certified")
    good = sipp.certify(DENSE, PRUNED, torch.cat([once, once[:100]]), epsilon=0.01)
    assert (good.n, good.violations, good.proved_share) == (200, 2, cert.proved_share)
    bad = sipp.certify(DENSE, PRUNED, torch.cat([once, once[-1:].repeat(9, 1)]), epsilon=0.01)
    assert (bad.n, bad.n_duplicates, bad.violations, bad.verdict) == (200, 9, 11, "not certified")
    assert (
        "Not certified at 1 % error (11 of 209 holdout inputs, 200 of them distinct, were further off, 4"
        in bad.sentence
    )
    smallest = sipp.certify(DENSE, PRUNED, torch.cat([once, once[-1:].repeat(9, 1)]))
    assert smallest.epsilon > 0.1 and cert.k_allowed == smallest.k_allowed == binomial.k_allowed(200, 0.05, 0.05)


def labelled(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x, y)]


def test_what_was_gained_counts_once_and_only_where_every_copy_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    x = points(100, n_bad=10)
    y = torch.zeros(100, dtype=torch.int64)
    y[90:95] = 1  # dense says 0 and pruned 1 there: five gained, five lost
    plain = certify_accuracy(DENSE, PRUNED, labelled(x, y))
    assert (plain.n_lost, plain.n_gained, plain.n_differ, plain.n) == (5, 5, 10, 100)
    again = torch.cat([x, x[90:93], x[90:91], x[95:97]])
    labels = torch.cat([y, torch.tensor([1, 1, 0, 1, 0, 0])])  # a copy of one that gained has the other label
    cert = certify_accuracy(DENSE, PRUNED, labelled(again, labels))
    assert (cert.n_lost, cert.n_gained, cert.n_differ, cert.n, cert.n_duplicates) == (8, 4, 16, 100, 6)
    limit = binomial.upper_limit(8, 100, 0.025) - binomial.lower_limit(4, 106, 0.025)
    assert cert.drop_upper == pytest.approx(limit) and cert.drop_upper > plain.drop_upper
    monkeypatch.setattr("sipp.verbs.prune_to.levels_of", lambda n: (1.0, 0.5))
    tested = labelled(again, labels)
    walk = sipp.prune_to(DENSE, iter([points(5)]), tested, method="magnitude", max_accuracy_drop=0.9)
    assert walk.path[1].limit == pytest.approx(limit) and walk.certificate is not None
    assert walk.certificate.n_duplicates == 6  # type: ignore[union-attr]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_a_comparison_counts_different_points() -> None:
    net = small()
    data = torch.randn(60, 4)
    few = torch.randn(12, 4)
    options: dict[str, Any] = {"keeps": (0.6,), "methods": ("magnitude", "lamp")}
    once, often = (sipp.compare(net, data, holdout=x, **options) for x in (few, few.repeat(200, 1)))
    assert once.n_test == often.n_test == 12 and "tested on 12 holdout inputs" in str(often)
    assert [row.error for row in once.rows] == pytest.approx([row.error for row in often.rows])
    best = once.best(0.6)
    assert [r.name for r in once.level_with(best)] == [r.name for r in often.level_with(often.best(0.6))]


def test_copies_tell_no_two_methods_apart() -> None:
    net, data, few = small(), torch.randn(60, 4), torch.randn(12, 4)
    options: dict[str, Any] = {"keeps": (0.6,), "methods": ("magnitude", "lamp", "random"), "progress": False}
    for holdout in (few, few.repeat(20, 1)):
        found = sipp.compare(net, data, holdout=holdout, **options)
        assert [row.name for row in found.level_with(found.best(0.6))] == ["random"]


def test_a_held_back_point_has_no_copy_among_the_others_and_counts_once() -> None:
    net = small()
    x = torch.randn(32, 4)
    options: dict[str, Any] = {"keeps": (0.6,), "methods": ("magnitude",)}
    with pytest.raises(DataError, match="too few different inputs"):
        sipp.compare(net, x[:3].repeat(20, 1), **options)
    found = sipp.compare(net, x.repeat(2, 1), **options)
    assert found.n_test == 8 and found.n_calibration == 48
