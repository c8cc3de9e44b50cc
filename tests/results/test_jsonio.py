"""A record as JSON and back: whatever a dataclass holds comes back, and what is wrong is said by its key."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, strategies as st

from sipp.errors import DataError
from sipp.results.jsonio import NOT_JSON, from_json, to_json
from sipp_lab.runs.folder import read_run
from sipp_lab.runs.records import Manifest, NetworkRecord

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*/*/manifest.json"))


@dataclass(frozen=True)
class Part:
    name: str
    size: float

    ALSO_IN_JSON = ("twice",)

    @property
    def twice(self) -> float:
        return 2 * self.size


@dataclass(frozen=True)
class Other:
    count: int


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    pair: tuple[int, str]
    either: Part | Other | None
    way: Literal["one", "two"]
    by_name: dict[str, float | None]
    place: Path
    words: frozenset[str]
    is_done: bool = False
    secret: object = field(default=None, metadata=NOT_JSON)


NUMBERS = st.floats(allow_nan=False)
PARTS = st.builds(Part, st.text(), NUMBERS)
WHOLES = st.builds(
    Whole,
    parts=st.lists(PARTS).map(tuple),
    pair=st.tuples(st.integers(), st.text()),
    either=st.none() | PARTS | st.builds(Other, st.integers()),
    way=st.sampled_from(["one", "two"]),
    by_name=st.dictionaries(st.text(), st.none() | NUMBERS),
    place=st.text("ab/", min_size=1).map(Path),
    words=st.frozensets(st.text()),
    is_done=st.booleans(),
)


@given(WHOLES)
def test_what_is_written_comes_back(whole: Whole) -> None:
    text = json.dumps(to_json(whole), allow_nan=False)
    assert from_json(Whole, json.loads(text), "here") == whole


def test_nan_and_infinity_are_texts_and_come_back_as_numbers() -> None:
    values = [to_json(Part("x", size))["size"] for size in (math.inf, -math.inf, math.nan)]
    assert values == ["inf", "-inf", "nan"]
    read = [from_json(Part, {"name": "x", "size": size}, "here").size for size in values]
    assert read[:2] == [math.inf, -math.inf] and math.isnan(read[2])


def test_what_follows_is_written_and_what_is_not_json_is_not() -> None:
    whole = Whole((Part("a", 1.5),), (1, "b"), None, "one", {}, Path("p"), frozenset(), secret=object())
    values = to_json(whole)
    assert values["parts"] == [{"name": "a", "size": 1.5, "twice": 3.0}] and "secret" not in values
    assert from_json(Whole, values | {"secret": 5, "of_a_later_version": 1}, "here").secret is None


GOOD: dict[str, Any] = {
    "parts": [{"name": "a", "size": 1}], "pair": [1, "b"], "either": {"count": 3}, "way": "one", "by_name": {"x": None},
    "place": "p", "words": ["w"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parts": [{"name": "a", "size": "1"}]}, "'size' in parts.0 must be a number, found '1'"),
        ({"parts": [{"name": "a"}]}, "'size' in parts.0 is missing"),
        ({"parts": {"name": "a"}}, "'parts' must be a list"),
        ({"parts": ["a"]}, "'0' in parts must be an object, found 'a'"),
        ({"pair": [1.5, "b"]}, "'0' in pair must be a whole number, found 1.5"),
        ({"pair": [True, "b"]}, "'0' in pair must be a whole number, found True"),
        ({"pair": [1]}, "'pair' must be a list of 2"),
        ({"either": {"count": "3"}}, "'count' in either must be a whole number, found '3'"),
        ({"way": "three"}, "'way' must be one of 'one', 'two', found 'three'"),
        ({"way": ["one"]}, "'way' must be one of 'one', 'two'"),
        ({"by_name": []}, "'by_name' must be an object"),
        ({"by_name": {"x": "far"}}, "'x' in by_name must be a number, found 'far'"),
        ({"place": 1}, "'place' must be text, found 1"),
        ({"is_done": 1}, "'is_done' must be true or false, found 1"),
    ],
)
def test_a_wrong_value_is_named_by_its_key_and_file(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=r"net\.json") as caught:
        from_json(Whole, GOOD | change, "net.json")
    assert words in str(caught.value)


def agree(one: Any, other: Any) -> bool:
    """Whether all that both hold is the same: a record of an earlier version may hold less, or more."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(agree(one[key], other[key]) for key in one.keys() & other.keys())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(agree, one, other))
    return bool(one == other)


@pytest.mark.parametrize("manifest", RESULTS, ids=lambda path: path.parent.name)
def test_what_was_run_for_real_is_read_as_it_is(manifest: Path) -> None:
    values = json.loads(manifest.read_text())
    assert to_json(from_json(Manifest, values, manifest)) == values
    records = [json.loads(line) for line in (manifest.parent / "records.jsonl").read_text().splitlines()]
    for record in records:
        written = to_json(from_json(NetworkRecord, record, "here"))
        assert agree(record, written) and to_json(from_json(NetworkRecord, written, "here")) == written
        assert written["after"] == record["after"]
    assert len(read_run(manifest.parent).records) == len(records) >= 2
