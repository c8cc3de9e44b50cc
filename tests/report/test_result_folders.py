"""Folders that are whole, unfinished, broken or something else."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from report.synthetic import big_run, certificate, facts, layer

from sipp.errors import DataError
from sipp.files import seal
from sipp.report.results import PrunedModel, read_pruned_result
from sipp.results.bounds import NetworkBound
from sipp.results.certificate import Certificate
from sipp.results.jsonio import to_json
from sipp.results.stored import Identity
from sipp_lab.page import read_results
from sipp_lab.runs.folder import Run, read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return big_run(tmp_path / "runs" / "one", methods=("sipp-det", "magnitude"), n_levels=2, n_seeds=1, n_layers=2)


def pruned_folder(
    folder: Path, *, kept: tuple[int, int] = (9, 20), certificate: Certificate | None = None, kind: str = "pruned",
    model: str = "", weights: str | None = None, rest: Mapping[str, Any] = MappingProxyType({}), **changes: Any,
) -> Path:  # fmt: skip
    """A report as `sipp prune` leaves it, without its network."""
    layers = [
        replace(layer("0.weight", 36, kept[0], eps=1.5, dead=2), n_rows=4, fan_in=9),
        replace(layer("1.weight", 100, kept[1], eps=None, dead=0), n_rows=10, fan_in=10),
    ]
    known = facts(**{"layers": layers, "method": "sipp-hybrid", "epsilon": 12.5, "seed": 3, **changes})
    hashes = ("0" * 64, "0" * 64) if certificate is None else (certificate.pruned_hash, certificate.dense_hash)
    identity = Identity(
        model=model, pruned_hash=hashes[0], dense_hash=hashes[1], certificate=certificate, weights=weights
    )
    folder.mkdir(parents=True)
    values = {"kind": kind, **to_json(identity), **to_json(known), **rest}
    (folder / "report.json").write_text(json.dumps(seal(values)))
    return folder


def test_a_finished_run_is_read(folder: Path) -> None:
    run = read_run(folder)
    assert run.finished and run.n_stages == len(run.records) == 5
    assert run.records[0].method is None and run.records[0].keep == 1.0
    assert run.records[1].pruned.layers[0].n_weights == 432 and run.records[1].certificate is not None


def test_a_folder_of_runs_and_no_run_twice(folder: Path) -> None:
    pruned_folder(folder.parent / "net", certificate=certificate(0.25))
    found = read_results([folder.parent, folder])
    assert [type(one) for one in found] == [PrunedModel, Run]


def test_an_unfinished_run(folder: Path) -> None:
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:2]))
    assert not read_run(folder).finished and len(read_run(folder).records) == 2
    (folder / "records.jsonl").unlink()
    assert read_run(folder).records == ()


def test_a_pruned_model(tmp_path: Path) -> None:
    pruned = read_pruned_result(pruned_folder(tmp_path / "net"))
    assert [one.dead_rows for one in pruned.pruned.layers] == [2, 0]
    assert [one.n_weights for one in pruned.pruned.layers] == [36, 100]
    assert not pruned.pruned.bound.holds and pruned.identity.certificate is None and pruned.pruned.seed == 3


def change(record: dict[str, Any], key: str, value: Any) -> str:
    *path, last = key.split(".")
    place: Any = record
    for part in path:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("after.n_top1", "high", "n_top1"),
        ("after", None, "after"),
        ("pruned.layers.0.kept", "all", "kept"),
        ("method", 7, "method"),
        ("pruned.bound", [], "bound"),
        ("pruned.bound.epsilon", "many", "epsilon"),
        ("certificate.violations", "40", "violations"),
        ("seconds", None, "seconds"),
        ("part_seconds.train", "1", "train"),
    ],
)
def test_a_broken_record_is_named_by_file_and_line(folder: Path, key: str, value: Any, word: str) -> None:
    path = folder / "records.jsonl"
    lines = path.read_text().splitlines()
    lines[1] = change(json.loads(lines[1]), key, value)
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        read_run(folder)
    assert "records.jsonl line 2" in str(caught.value) and word in str(caught.value)


def test_a_cut_line(folder: Path) -> None:
    path = folder / "records.jsonl"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(DataError, match=r"is not whole \(line 5"):
        read_run(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"values": {"config": {}}}', "\xff"])
def test_a_broken_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"manifest\.json"):
        read_run(folder)


def test_other_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither a run .* give a folder written by sipp prune"):
        read_results([tmp_path])
    with pytest.raises(DataError, match="nothing: there is no such folder"):
        read_results([tmp_path / "nothing"])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be read as a folder"):
        read_results([tmp_path / "file"])
    with pytest.raises(DataError, match="not a report of"):
        read_pruned_result(pruned_folder(tmp_path / "net", kind="other"))


def test_a_bound_promises_something_only_if_it_is_met_and_finite(tmp_path: Path) -> None:
    for index, (reason, epsilon, expected) in enumerate([("", 0.5, True), ("", None, False), ("few", 0.5, False)]):
        bound = NetworkBound("paper", epsilon, 0.1, None, reason, {})
        read = read_pruned_result(pruned_folder(tmp_path / str(index), bound=bound)).pruned.bound
        assert read == bound and read.holds is expected
    infinite = replace(bound, epsilon=math.inf, reason="")
    read = read_pruned_result(pruned_folder(tmp_path / "inf", bound=infinite)).pruned.bound
    assert read == infinite and not read.holds
