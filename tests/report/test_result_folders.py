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
from sipp.report.networks import PrunedModel, read_pruned_result
from sipp.results.bounds import NetworkBound
from sipp.results.certificate import Certificate
from sipp.results.jsonio import to_json
from sipp.results.stored import Report
from sipp_lab.page import read_results
from sipp_lab.runs.folder import Run


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
    identity = Report(
        model=model, pruned_hash=hashes[0], dense_hash=hashes[1], certificate=certificate, weights=weights
    )
    folder.mkdir(parents=True)
    values = {"kind": kind, **to_json(identity), **to_json(known), **rest}
    (folder / "report.json").write_text(json.dumps(seal(values)))
    return folder


def test_a_folder_of_runs_and_no_run_twice(folder: Path) -> None:
    pruned_folder(folder.parent / "net", certificate=certificate(0.25))
    found = read_results([folder.parent, folder])
    assert [type(one) for one in found] == [PrunedModel, Run]


def test_a_pruned_model(tmp_path: Path) -> None:
    pruned = read_pruned_result(pruned_folder(tmp_path / "net"))
    assert [one.dead_rows for one in pruned.pruned.layers] == [2, 0]
    assert [one.n_weights for one in pruned.pruned.layers] == [36, 100]
    assert not pruned.pruned.bound.holds and pruned.report.certificate is None and pruned.pruned.seed == 3


def change(record: dict[str, Any], key: str, value: Any) -> str:
    *path, last = key.split(".")
    place: Any = record
    for part in path:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return json.dumps(record)


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
        bound = NetworkBound("paper", epsilon, 0.1, None, reason)
        read = read_pruned_result(pruned_folder(tmp_path / str(index), bound=bound)).pruned.bound
        assert read == bound and read.holds is expected
    infinite = replace(bound, epsilon=math.inf, reason="")
    read = read_pruned_result(pruned_folder(tmp_path / "inf", bound=infinite)).pruned.bound
    assert read == infinite and not read.holds
