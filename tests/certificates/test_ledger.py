"""Every use of a holdout reads the same points, and is in the ledger whatever its result."""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sipp
from sipp.errors import DataError, HoldoutReusedWarning, OptionError
from sipp.inputs.point_keys import SKETCH_SIZE
from sipp.results.pruned_to import PrunedTo
from sipp.verbs import prune_to as tolerance
from sipp.verbs.certify import certify, certify_accuracy
from sipp.verbs.prune_to import prune_to
from sipp.verbs.verify import verify


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows die on sparse levels
        yield


def points(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))


@functools.cache  # trained where a test needs it, not by every process that lists the tests
def classifier() -> nn.Module:
    """A network whose class is the largest of the first four inputs: pruning it hard loses nearly everything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    x = points(4000, seed=99)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(150):
        part = x[step % 8 * 500 :][:500]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(part), part[:, :4].argmax(1)).backward()
        optimizer.step()
    return model


def loader(x: Tensor, **options: Any) -> DataLoader:
    """A shuffling loader with a generator of its own."""
    labels = x[:, :4].argmax(1)
    return DataLoader(TensorDataset(x, labels), 50, shuffle=True, generator=torch.Generator().manual_seed(0), **options)


def accuracy(model: nn.Module, seed: int = 7) -> float:
    x = points(5000, seed)
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == x[:, :4].argmax(1)).float().mean())


def walk(holdout: Any, data: Any = None, **options: Any) -> PrunedTo:
    data = points(100, 1) if data is None else data
    return prune_to(classifier(), data, holdout, **{"max_accuracy_drop": 0.05, "method": "wt", **options})


# ---- the same points in every pass


@pytest.mark.parametrize("goal", [{"max_accuracy_drop": 0.05}, {"max_accuracy_drop": None, "epsilon": 0.5}])
def test_a_shuffling_loader_gives_the_result_of_a_list(goal: dict[str, Any]) -> None:
    x = points(510, 2)
    fixed = walk([(x, x[:, :4].argmax(1))], **goal)
    moving = walk(loader(x), data=loader(points(100, 1)), **goal)
    assert moving.path == fixed.path and moving.keep == fixed.keep < 1
    assert moving.certificate.data_hash == fixed.certificate.data_hash
    if "epsilon" not in goal:
        assert accuracy(classifier()) - accuracy(moving.model) <= 0.05 and moving.certificate.drop_upper <= 0.05


def test_matching_outputs_by_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk then passes nearly every level, but the certificate contradicts it: nothing is certified."""
    tests = tolerance._LevelTests
    rows: list[Tensor] = []

    def by_position(self: Any, batch: Any, keys: list[bytes]) -> Tensor:
        if batch.where.startswith("calibration"):
            return original(self, batch, keys)
        while len(rows) <= batch.index:
            rows.append(original(self, batch, keys))
        return rows[batch.index]

    original = tests._dense
    monkeypatch.setattr(tests, "_dense", by_position)
    best = walk(loader(points(500, 2)))
    assert best.path[-2].passed and best.path[-2].keep < 0.1  # with other labels the dense network seems worthless
    assert best.pruned is None and best.certificate is None and "contradicts" in best.verdict
    assert "dense network is returned" in " ".join(str(best).split())


class Augmented(Dataset):
    """Points that come with fresh noise each time they are read, or with fresh labels."""

    def __init__(self, x: Tensor, labels: bool) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if self.labels:
            return self.x[i], int(torch.randint(0, 4, ()))
        return self.x[i] + 0.01 * torch.randn(16), 0


class Counted:
    """Gives so many batches more (or fewer) every time it is read."""

    def __init__(self, x: Tensor, step: int) -> None:
        self.batches, self.step, self.n = list(x.split(20)), step, 12

    def __iter__(self) -> Iterator[Tensor]:
        self.n += self.step
        return iter(self.batches[: self.n])


CHANGING: dict[str, Any] = {
    "augmented": lambda x: Augmented(x, labels=False),
    "labels drawn anew": lambda x: Augmented(x, labels=True),
    "shuffled, last batch dropped": lambda x: loader(x, drop_last=True),
    "fewer each time": lambda x: Counted(x, -1),
    "more each time": lambda x: Counted(x, 1),
}


@pytest.mark.parametrize("case", CHANGING)
def test_data_that_changes_between_two_passes_is_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the holdout data changed between two passes.*shuffling alone is fine"):
        walk(CHANGING[case](points(520, 2)), ledger=tmp_path / "uses")
    with pytest.raises(DataError, match=r"the calibration data changed between two passes"):
        walk(points(300, 2), data=CHANGING[case](points(520, 1)), ledger=tmp_path / "uses")
    assert len((tmp_path / "uses").read_text().splitlines()) == 1  # the second had not got that far


# ---- the ledger


def lines(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()]


def test_prune_to_counts_as_a_use_even_if_it_certifies_nothing(tmp_path: Path) -> None:
    ledger, x = tmp_path / "uses", points(300, 2)
    failed = walk(x, max_accuracy_drop=0.001, levels=(0.5, 0.1), ledger=ledger)
    assert failed.pruned is None and len(lines(ledger)) == 1
    assert certify(classifier(), classifier(), x, ledger=ledger).prior_uses == 1


def test_prune_to_and_its_certificate_count_as_one_use(tmp_path: Path) -> None:
    ledger, x = tmp_path / "uses", points(300, 2)
    first = walk(x, ledger=ledger).certificate
    assert (first.ledger_kept, first.prior_uses, first.marked) == (True, 0, False) and len(lines(ledger)) == 1
    second = walk(loader(x), ledger=ledger).certificate
    assert second.prior_uses == 1 and "this claim alone" in second.sentence
    assert certify_accuracy(classifier(), classifier(), x, ledger=ledger).prior_uses == 2
    assert walk(points(300, 5), ledger=ledger).certificate.prior_uses == 0


@pytest.mark.parametrize("n_first", [300, 120])
def test_a_comparison_counts_as_one_use(n_first: int, tmp_path: Path) -> None:
    ledger, x = tmp_path / "uses", points(300, 2)
    options: dict[str, Any] = {"keeps": (0.9, 0.5), "methods": ("wt", "random"), "ledger": ledger}
    sipp.compare(classifier(), points(100, 1), holdout=x[:n_first], **options)
    assert [(use["claim"], use["n"]) for use in lines(ledger)] == [("compare", n_first)]
    cert = certify(classifier(), classifier(), x, ledger=ledger)
    assert cert.marked and "this claim alone" in cert.sentence
    assert walk(x, ledger=ledger).certificate.prior_uses == 2


def test_a_comparison_that_fails_half_way_is_recorded(tmp_path: Path) -> None:
    ledger, x = tmp_path / "uses", points(300, 2)
    options: dict[str, Any] = {"keeps": (0.9,), "methods": ("wt", "snip")}  # and there are no labels
    with pytest.raises(DataError):
        sipp.compare(classifier(), points(100, 1), holdout=x, ledger=ledger, **options)
    assert certify(classifier(), classifier(), x, ledger=ledger).prior_uses == 1
    with pytest.raises(OptionError, match="uses of a holdout"):
        sipp.compare(classifier(), points(100, 1), ledger=ledger, **options)


def test_too_few_points_are_refused_before_scoring_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tolerance, "rank", lambda *args, **options: pytest.fail("it was scored"))
    best = walk(points(20, 2), max_accuracy_drop=None, epsilon=0.1, ledger=tmp_path / "uses")
    assert "needs n >=" in best.verdict and lines(tmp_path / "uses") == []


def test_an_output_function_counts_as_one_use(tmp_path: Path) -> None:
    ledger = tmp_path / "uses"
    first = certify(classifier(), classifier(), points(300, 2), output=lambda y: y, ledger=ledger)
    assert first.prior_uses == 0 and [use["claim"] for use in lines(ledger)] == ["output"]


class Raises(nn.Module):
    """Raises after a number of calls."""

    def __init__(self, error: BaseException, n_calls: int) -> None:
        super().__init__()
        self.net, self.error, self.left = classifier(), error, n_calls

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return self.net(x)


@pytest.mark.parametrize("error", [RuntimeError("odd"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_interrupted_use_is_recorded_with_the_points_it_read(error: BaseException, tmp_path: Path) -> None:
    ledger, x = tmp_path / "uses", points(300, 2)
    for call in (certify, certify_accuracy):
        with pytest.raises((DataError, KeyboardInterrupt)):
            call(classifier(), Raises(error, 3), list(x.split(50)), ledger=ledger)  # two batches and a half one alone
    assert [use["n"] for use in lines(ledger)] == [150, 150]
    assert all("interrupted" in use["claim"] for use in lines(ledger))
    assert certify(classifier(), classifier(), x, ledger=ledger).prior_uses == 2
    with pytest.raises((DataError, KeyboardInterrupt)):
        certify(classifier(), Raises(error, 0), x, ledger=ledger)
    is_ours = isinstance(error, RuntimeError)  # then the first batch failed, and nothing could be seen
    assert len(lines(ledger)) == (3 if is_ours else 4)


@pytest.mark.parametrize("error", [RuntimeError("odd"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_walk_that_fails_half_way_is_recorded(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = tolerance._LevelTests
    original = tests.test

    def fails(self: Any, given: Any, *rest: Any) -> Any:
        if given.role == "holdout":
            raise error
        return original(self, given, *rest)

    monkeypatch.setattr(tests, "test", fails)
    with pytest.raises(type(error)):
        walk(points(300, 2), ledger=tmp_path / "uses")
    assert [use["claim"] for use in lines(tmp_path / "uses")] == ["prune_to"]


def test_refusing_shared_points_does_not_count_as_a_use(tmp_path: Path) -> None:
    x = points(300, 2)
    with pytest.raises(DataError, match="also calibration inputs"):
        certify(classifier(), classifier(), x, calibration=x[:5], ledger=tmp_path / "uses")
    assert lines(tmp_path / "uses") == []


@pytest.mark.parametrize(
    "again",
    [
        lambda x: x[:30],
        lambda x: x[torch.randperm(1000)[:500]],
        lambda x: torch.cat((x[20:], points(20, 8))),
        lambda x: x.double(),
        lambda x: DataLoader(TensorDataset(x), 64, shuffle=True, drop_last=True),
    ],
    ids=["a part", "half", "some exchanged", "another dtype", "shuffled, last batch dropped"],
)
def test_points_that_overlap_an_earlier_use_are_marked(again: Any, tmp_path: Path) -> None:
    ledger, x = tmp_path / "uses", points(1000, 2)
    assert certify(nn.Identity(), nn.Identity(), x, ledger=ledger).prior_uses == 0
    torch.manual_seed(0)
    second = certify(nn.Identity(), nn.Identity(), again(x), ledger=ledger)
    assert second.prior_uses == 1 and second.marked
    assert certify(nn.Identity(), nn.Identity(), points(1000, 3), ledger=ledger).prior_uses == 0
    assert all(len(use["sketch"]) == min(use["n"], SKETCH_SIZE) for use in lines(ledger))


@pytest.mark.parametrize("sketch", ["abc", [3], ["xyz"], None])
def test_a_damaged_sketch_is_refused(sketch: Any, tmp_path: Path) -> None:
    (tmp_path / "uses").write_text(json.dumps({"data_hash": "0" * 64, "sketch": sketch}) + "\n")
    with pytest.raises(DataError, match="line 1 is not an entry"):
        walk(points(300, 2), ledger=tmp_path / "uses")


def test_of_eight_claims_on_the_same_points_only_the_first_is_unmarked(tmp_path: Path) -> None:
    ledger, x = tmp_path / "uses", points(300, 2)
    for n_before in range(8):
        sipp.prune_to(
            classifier(), points(50, n_before + 10), x, epsilon=1e-3, levels=(0.1,), method="random", ledger=ledger
        )
        assert len(lines(ledger)) == n_before + 1
    assert certify(classifier(), classifier(), x, ledger=ledger).prior_uses == 8


def test_refused_points_count_as_a_use_if_an_output_function_saw_them(tmp_path: Path) -> None:
    ledger, x = tmp_path / "uses", points(60, 2)
    for output, n_looks in ((None, 0), (lambda found: found, 1)):
        with pytest.raises(DataError, match="calibration"):
            certify(classifier(), classifier(), x, calibration=x[:5], output=output, ledger=ledger)
        assert len(lines(ledger)) == n_looks


# ---- without a ledger


def test_a_second_claim_in_one_session_is_warned_of_and_a_repeated_one_is_not() -> None:
    net, x = classifier(), points(300, 77)
    pruned = sipp.prune(net, None, keep=0.9, method="wt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        certificate = sipp.certify(net, pruned, x)
        sipp.certify(net, pruned, x.flip(0))  # the same claim
        assert verify(certificate, net, pruned.model, x).ok
        sipp.certify_accuracy(net, pruned, points(300, 78))  # other inputs
        prune_to(net, points(300, 1), points(300, 79), epsilon=0.9, levels=(0.9,), method="wt")  # one claim
    with pytest.warns(HoldoutReusedWarning, match="already used for another certificate") as caught:
        sipp.certify_accuracy(net, pruned, x)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="already used for another certificate"):
        sipp.certify(net, sipp.prune(net, None, keep=0.8, method="wt"), x)


def warned(claim: Callable[[], object]) -> list[str]:
    """The files whose lines are named by warnings of a second use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HoldoutReusedWarning)
        claim()
    return [one.filename for one in caught if one.category is HoldoutReusedWarning]


def test_a_walk_with_a_ledger_is_not_warned_of_and_one_without_names_the_line_that_called(tmp_path: Path) -> None:
    net, x, data = classifier(), points(300, 81), points(300, 1)
    walk: dict[str, Any] = {"epsilon": 0.9, "levels": (0.9,), "method": "wt", "progress": False}
    sipp.certify_accuracy(net, net, x)
    assert warned(lambda: sipp.prune_to(net, data, x, ledger=tmp_path / "uses", **walk)) == []
    assert warned(lambda: sipp.prune_to(net, data, x, **walk)) == [__file__]
    assert warned(lambda: sipp.certify(net, net, x)) == [__file__]
    assert warned(lambda: sipp.certify_accuracy(net, net, x, labels="ignore")) == [__file__]


def test_verifying_a_certificate_does_not_count_as_a_use() -> None:
    net, x = classifier(), points(300, 82)
    labelled = [(x, x[:, :4].argmax(1))]
    first = certify_accuracy(net, net, labelled)
    certify(net, net, x)
    assert warned(lambda: verify(first, net, net, labelled)) == []


def test_every_other_claim_on_the_same_points_is_warned_of_and_a_repeated_one_is_not() -> None:
    net, labels = classifier(), points(300, 83)[:, :4].argmax(1)
    claims: dict[str, Callable[[Any], object]] = {
        "as it is": lambda x: sipp.certify(net, net, x),
        "delta": lambda x: sipp.certify(net, net, x, delta=0.1),
        "confidence": lambda x: sipp.certify(net, net, x, confidence=0.9),
        "epsilon": lambda x: sipp.certify(net, net, x, epsilon=0.2),
        "another epsilon": lambda x: sipp.certify(net, net, x, epsilon=0.3),
        "another output": lambda x: sipp.certify(net, net, x, output=first_two),
        "class": lambda x: sipp.certify_accuracy(net, net, x),
        "class, confidence": lambda x: sipp.certify_accuracy(net, net, x, confidence=0.9),
        "class, labels": lambda x: sipp.certify_accuracy(net, net, [(x, labels)]),
        "class, labels ignored": lambda x: sipp.certify_accuracy(net, net, [(x, labels)], labels="ignore"),
    }
    seeds = itertools.count(200)
    for one, other in itertools.combinations(claims, 2):
        x = points(300, next(seeds))
        assert warned(lambda one=one, x=x: [claims[one](x), claims[one](x)]) == [], one
        assert warned(lambda other=other, x=x: claims[other](x)) == [__file__], (one, other)


def test_another_measure_is_another_claim() -> None:
    torch.manual_seed(0)
    net, tokens = nn.Embedding(50, 50), torch.randint(0, 50, (300, 5))
    for measure, n_warned in (("kl", 0), ("kl", 0), ("next-token", 1)):
        assert len(warned(lambda measure=measure: sipp.certify(net, net, tokens, measure=measure))) == n_warned


def first_two(found: Tensor) -> Tensor:
    return found[:, :2]


def test_a_different_prune_to_on_the_same_points_warns_even_if_the_first_failed() -> None:
    net, data, seeds = classifier(), points(300, 1), iter(range(100, 200))
    first: dict[str, Any] = {"epsilon": 1e-6, "levels": (0.3,), "method": "wt", "progress": False}
    others = ({"epsilon": 0.9}, {"levels": (0.9,)}, {"method": "random"}, {"delta": 0.1}, {"confidence": 0.9})
    for other in (*others, {"seed": 3}, {"output": first_two}):
        x = points(300, next(seeds))
        assert warned(lambda x=x: [prune_to(net, data, x, **first), prune_to(net, data, x, **first)]) == []
        assert warned(lambda x=x, other=other: prune_to(net, data, x, **first | other)), other
    x = points(300, next(seeds))
    assert prune_to(net, data, x, **first).certificate is None
    assert warned(lambda: prune_to(net, points(300, 2), x, **first))  # chosen on other inputs
    x = points(300, next(seeds))
    drop = {**first, "epsilon": None, "max_accuracy_drop": 0.01}
    assert warned(lambda: [prune_to(net, data, x, **drop), prune_to(net, data, x, **drop)]) == []
    assert warned(lambda: prune_to(net, data, [(x, x[:, :4].argmax(1))], **drop))


def test_a_certificate_after_a_comparison_warns_and_a_comparison_never_does(tmp_path: Path) -> None:
    net, data = classifier(), points(300, 1)
    asked: dict[str, Any] = {"methods": ("wt",), "progress": False}
    for seed, ledger in ((84, None), (85, tmp_path / "uses")):
        x = points(300, seed)
        for keeps in ((0.9,), (0.5,)):
            assert warned(lambda x=x, keeps=keeps: sipp.compare(net, data, holdout=x, keeps=keeps, **asked)) == []
        assert len(warned(lambda x=x: sipp.certify(net, net, x))) == 1
        more = {**asked, "ledger": ledger}
        assert warned(lambda x=x, more=more: sipp.compare(net, data, holdout=x, keeps=(0.9,), **more)) == []
