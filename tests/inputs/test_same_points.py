"""Which draws are equal and which points were seen before, however they are written and passed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import DataError
from sipp.inputs import point_keys
from sipp.inputs.data import data_of
from sipp.inputs.point_keys import draw_keys_of, ledger_keys_of
from sipp.results.batches import Batch
from sipp.verbs.certify import certify

N = 100


def n_distinct(batches: Iterable[Batch]) -> int:
    """How many different points there are, as T18 counts them."""
    return len({key for batch in batches for key in draw_keys_of(batch)})


def points(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys(data: Any) -> set[bytes]:
    return {key for batch in data_of(data).batches() for key in draw_keys_of(batch)}


# ---- draws that count once (T18)

X = points(24, 3, 2, 4).relu()
WRITTEN: dict[str, list[Any]] = {
    "float64": [X.double()],
    "minus zero": [torch.where(X == 0, -0.0, X)],
    "another shape": [X.flatten(1)],
    "channels last": [X.to(memory_format=torch.channels_last)],
    "by name": [{"x": X}],
}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_draw_that_is_written_otherwise_is_the_same_draw(case: str) -> None:
    other = WRITTEN[case]
    assert keys(other) == keys([X])
    assert n_distinct(data_of([X, *other]).batches()) == 24


def test_different_draws_all_count() -> None:
    for dtype in (torch.float32, torch.float64):
        line = torch.linspace(1, 2, 5000, dtype=dtype)[:, None]  # many agree as bfloat16
        assert n_distinct(data_of([line]).batches()) == 5000
        assert len(keys([line]) - keys([line[::2]])) == 2500
    a, b = points(60, 8).half(), points(60, 8, seed=1)
    assert len(keys([a]) - keys([b])) == 60
    assert n_distinct(data_of([torch.arange(30_000)[:, None]]).batches()) == 30_000
    with_token = [((torch.zeros(500, 2).half(), torch.arange(30_000, 30_500)[:, None]), None)]
    assert n_distinct(data_of(with_token).batches()) == 500  # rounded to half precision they would not be


def test_one_bit_or_another_order_makes_another_draw() -> None:
    point = points(1, 64)
    others = [point, point.flip(1), point.roll(1, 1), torch.cat((point, torch.zeros(1, 1)), 1)]
    for place in range(64):
        changed = point.clone()
        changed.view(torch.int32)[0, place] ^= 1 << (place % 32)
        others.append(changed)
    found = [key for one in others for key in keys([one.nan_to_num()])]
    assert len(set(found)) == len(others)


@pytest.mark.parametrize("change", ["float64", "minus zero", "shape"])
def test_points_that_chose_the_pruning_do_not_speak_for_new_ones(change: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    calibration = points(N, 4).relu()
    again = {
        "float64": calibration.double(),
        "minus zero": torch.where(calibration == 0, -0.0, calibration),
        "shape": calibration.view(N, 2, 2),
    }[change]
    pruned = sipp.prune(net, calibration, keep=0.8, method="sipp-det")
    bound = sipp.assess(net, pruned.model, calibration, bound="sound", holdout=again).bound
    assert bound.coverage is not None and bound.coverage.n == 0
    new = sipp.assess(net, pruned.model, calibration, bound="sound", holdout=points(N, 4, seed=1)).bound
    assert new.coverage is not None and new.coverage.n == N


# ---- points that are in two sets


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x, self.cond = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, cond: Tensor | None = None, kind: Tensor | None = None) -> Tensor:
        return self.x(x.float()) + (0 if cond is None else self.cond(cond.float()))


IMAGE, COND = points(N, 6), points(N, 3, seed=1)
PASSED: dict[str, tuple[Any, Any]] = {
    "by position, by name": ({"x": IMAGE, "cond": COND}, ((IMAGE, COND), None)),
    "another order": ({"cond": COND, "x": IMAGE}, ((IMAGE, COND), None)),
    "another dtype": ({"x": IMAGE.double(), "cond": COND}, ((IMAGE, COND.double()), None)),
}
APART: dict[str, tuple[Any, Any]] = {
    "one condition for all": (
        {"x": IMAGE, "cond": COND[:1].expand(N, 3)},
        ((points(N, 6, seed=2), COND[:1].expand(N, 3)), None),
    ),
    "another condition": ({"x": IMAGE, "cond": COND}, ((IMAGE, COND + 1), None)),
    "a black image": (
        {"x": torch.zeros(N, 6), "cond": COND[:1].expand(N, 3)},
        ((points(N, 6, seed=2), COND[:1].expand(N, 3)), None),
    ),
    "single numbers": ({"x": torch.zeros(N, 6), "cond": torch.zeros(N, 3)}, torch.ones(N, 6)),
    "one input more": ({"x": IMAGE, "cond": COND}, IMAGE),
    "half precision": (IMAGE.half(), IMAGE),
}


@pytest.mark.parametrize("case", PASSED)
def test_a_point_is_found_however_it_is_passed(case: str, tmp_path: Path) -> None:
    net = Conditional()
    for a, b in (PASSED[case], PASSED[case][::-1]):
        with pytest.raises(DataError, match=f"{N} of {N} holdout inputs are also calibration inputs"):
            certify(net, net, [a], calibration=[b])
        with pytest.raises(DataError, match="also calibration inputs"):
            sipp.prune_to(net, [b], [a], epsilon=0.5, method="wt")


@pytest.mark.parametrize("case", APART)
def test_points_that_share_a_part_are_different(case: str) -> None:
    net = Conditional()
    for a, b in (APART[case], APART[case][::-1]):
        assert certify(net, net, [a], calibration=[b]).calibration_checked


@pytest.mark.parametrize("case", list(PASSED))
def test_the_ledger_knows_points_however_they_are_passed(case: str, tmp_path: Path) -> None:
    net = Conditional()
    uses = [certify(net, net, [data], ledger=tmp_path / "uses").prior_uses for data in PASSED[case]]
    assert uses == [0, 1]
    assert certify(net, net, [points(N, 6, seed=9)], ledger=tmp_path / "uses").prior_uses == 0


def test_a_ledger_of_single_inputs_keeps_its_meaning() -> None:
    x = points(2, 3)
    by_hand = [hashlib.sha256(b"[3]" + row.numpy().tobytes()).digest() for row in x]
    assert ledger_keys_of(next(data_of([x]).batches())) == by_hand


@pytest.mark.parametrize("n_threads", [1, 2])
def test_keys_of_many_numbers_are_those_of_few(n_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code and torch agree on every word: zeros of both signs, the smallest numbers, NaN of all kinds."""
    points = torch.randn(96, 4_000, generator=torch.Generator().manual_seed(0))
    words = points.view(torch.int32)
    odd = [0, 1, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    words[1, :6] = torch.tensor(odd, dtype=torch.int32)
    words[2, :6] = torch.tensor([word - 2**31 for word in odd], dtype=torch.int32)
    assert points.numel() >= point_keys.COMPILED_FROM
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        found = point_keys.content_keys(points)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(point_keys, "COMPILED_FROM", points.numel() + 1)
    for flushes in (False, True):  # the smallest numbers become 0 in torch's operations
        torch.set_flush_denormal(flushes)
        try:
            by_torch = point_keys.content_keys(points)
            one_by_one = [key for point in points for key in point_keys.content_keys(point[None])]
        finally:
            torch.set_flush_denormal(False)
        assert found == by_torch == one_by_one


def test_keys_of_many_numbers_that_are_shown_negated_are_those_of_the_numbers() -> None:
    shown = torch._neg_view(torch.randn(40, 4_000, generator=torch.Generator().manual_seed(0)))
    assert shown.is_neg() and shown.numel() >= point_keys.COMPILED_FROM
    assert point_keys.content_keys(shown) == point_keys.content_keys(shown.clone())
