"""Folders that are whole, unfinished, broken or something else."""

import json
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
    found, _ = read_results([folder.parent, folder])
    assert [type(one) for one in found] == [PrunedModel, Run]


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
