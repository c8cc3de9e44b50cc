"""The schemas of records: what training writes comes back as it was, and what is wrong is said in plain words."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from report.synthetic import big_run, certificate
from torch import nn

import sipp
from sipp.errors import DataError
from sipp.experiments.runs.reading import read_run
from sipp.results.schemas import (
    Accuracy,
    BoundRecord,
    CertificateRecord,
    EpochRow,
    Manifest,
    NetworkRecord,
    PrunedRecord,
    checked,
    given_values,
)
from sipp.results.serialising import pruned_values, pruning_values
from sipp.storage.files import read_json

RESULTS = sorted((Path(__file__).parents[2] / "results").glob("*/*/manifest.json"))


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("manifest", RESULTS, ids=lambda path: path.parent.name)
def test_what_was_run_for_real_is_read_and_written_as_it_is(manifest: Path) -> None:
    values = read_json(manifest)
    assert json.dumps(given_values(checked(Manifest, values, manifest)), sort_keys=True) == json.dumps(
        values, sort_keys=True
    )
    records = records_in(manifest.parent)
    for record in records:
        again = given_values(checked(NetworkRecord, record, "here"))
        assert json.dumps(again, sort_keys=True) == json.dumps(record, sort_keys=True)
    assert len(read_run(manifest.parent).records) == len(records) >= 3


def test_every_folder_of_results_is_looked_at() -> None:
    assert len(RESULTS) >= 3


@pytest.fixture
def record(tmp_path: Path) -> dict[str, Any]:
    folder = big_run(tmp_path / "run", methods=("sipp-det",), n_levels=1, n_seeds=1, n_layers=2)
    return records_in(folder)[1]


def test_unknown_keys_are_kept(record: dict[str, Any]) -> None:
    record["layers"][0]["later"] = {"a": [1, 2.5, None]}
    assert given_values(checked(NetworkRecord, {**record, "of_a_later_version": "x"}, "here")) == {
        **record,
        "of_a_later_version": "x",
    }


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("seed",), "0", "'seed' must be a whole number, found '0'"),
        (("seed",), -1, "'seed' must be at least 0, found -1"),
        (("level",), 1.5, "'level' must be a whole number, found 1.5"),
        (("keep",), True, "'keep' must be a number, found True"),
        (("seconds",), float("nan"), "'seconds' must be a finite number, found nan"),
        (("after",), [], "'after' must be an object, found []"),
        (("after", "top1"), None, "'top1' in after must be a number, found None"),
        (("layers",), {}, "'layers' must be a list"),
        (("layers", 1, "kept"), "many", "'kept' in layers.1 must be a whole number, found 'many'"),
        (("guarantee",), 3, "'guarantee' must be text, found 3"),
        (("certificate", "n"), "many", "'certificate': certificate key 'n' "),
    ],
)
def test_what_is_wrong_is_said_in_plain_words(
    record: dict[str, Any], place: tuple[Any, ...], value: Any, words: str
) -> None:
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(DataError) as caught:
        checked(NetworkRecord, record, "runs/x/records.jsonl line 2")
    assert str(caught.value).startswith(f"runs/x/records.jsonl line 2: {words}")


@pytest.mark.parametrize("key", ["seed", "after", "seconds", "keep", "method"])
def test_a_key_that_is_missing(record: dict[str, Any], key: str) -> None:
    del record[key]
    with pytest.raises(DataError, match=f"'{key}' is missing"):
        checked(NetworkRecord, record, "here")


def test_a_bound_is_a_promise_only_with_a_number() -> None:
    held = [BoundRecord(epsilon=0.5, met=True), BoundRecord(epsilon=None, met=True), BoundRecord(epsilon=0.5)]
    assert [bound.holds for bound in held] == [True, False, False]
    assert checked(BoundRecord, {"epsilon": "inf", "met": True}, "here").epsilon is None


def test_certificates_of_a_run_and_refusals() -> None:
    found = checked(CertificateRecord, certificate("inf", verdict="not certified"), "here")
    assert found.limit is None and found.epsilon == "inf" and found.sentence.startswith("Not certified")
    refusal = checked(CertificateRecord, {"verdict": "refused: copies"}, "here")
    assert (
        refusal.is_refusal
        and refusal.sentence == "refused: copies"
        and given_values(refusal) == {"verdict": "refused: copies"}
    )
    with pytest.raises(DataError, match="a certificate is of kind output or accuracy"):
        checked(CertificateRecord, {"verdict": "certified"}, "here")


def test_rows_of_epochs_come_back() -> None:
    test = Accuracy(n=10, n_top1=7, n_top5=9, loss=0.25)
    row = EpochRow(epoch=1, rate=0.1, train_loss=2.0, train_top1=0.5, test=test)
    assert checked(EpochRow, json.loads(json.dumps(given_values(row))), "here") == row and test.top1 == 0.7
    with pytest.raises(DataError, match="'epoch' must be a whole number"):
        checked(EpochRow, {**given_values(row), "epoch": "1"}, "here")
    with pytest.raises(DataError, match="'more' is not known here"):
        checked(EpochRow, {**given_values(row), "more": 1}, "here")


def test_the_record_of_a_network_of_prune_needs_its_layers() -> None:
    values = {"method": "wt", "keep": 1.0, "kept": 0, "n_weights": 0, "dead_rows": 0, "layers": []}
    with pytest.raises(DataError, match="'layers' must hold at least 1"):
        checked(PrunedRecord, {**values, "dense_hash": "", "pruned_hash": ""}, "here")


def test_a_pruned_network_is_written_as_the_schema_reads_it() -> None:
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    points = torch.rand(200, 8, generator=torch.Generator().manual_seed(0))
    pruned = sipp.prune(net, points, keep=0.5, repair=True)
    values = pruned_values(pruned)
    assert given_values(checked(PrunedRecord, values, "here")) == values == json.loads(json.dumps(values))
    assert set(values).issuperset(PrunedRecord.model_fields) and set(values["layers"][0]) >= {"n_rows", "dead_rows"}
    assert values["bound"]["words"] == str(pruned.bound)
    for one in (pruned, sipp.repair(net, pruned, points, steps=2)):  # the second with a polish
        assert checked(PrunedRecord, pruned_values(one), "here").repaired == one.repair
    assert pruning_values(pruned).items() <= values.items()
    assert values["conditions"]["n_refuting"] == pruned.guarantee.n_never_above  # the key that files have


def test_an_infinite_bound_is_no_promise_in_a_record() -> None:
    pruned = sipp.prune(nn.Linear(8, 4), torch.rand(50, 8), keep=0.5, method="sipp-det")
    endless = replace(pruned, bound=replace(pruned.bound, epsilon=math.inf, reason=""))
    said = pruning_values(endless)["bound"]
    assert endless.bound.met and (said["epsilon"], said["met"], said["reason"]) == (None, False, "epsilon is infinite")
