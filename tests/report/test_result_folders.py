"""Folders that are whole, unfinished, broken or something else."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from report.synthetic import STAND_IN, STAND_IN_HASH, big_run, certificate, facts, layer

from sipp.errors import DataError
from sipp.report import PrunedModel, read_pruned_result
from sipp.results import Certificate, SavedNetwork
from sipp.storage import write_pruned
from sipp_lab.page import read_results
from sipp_lab.runs.folder import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return big_run(tmp_path / "runs" / "one", methods=("sipp-det", "magnitude"), n_levels=2, n_seeds=1, n_layers=2)


def pruned_folder(
    folder: Path, *, kept: tuple[int, int] = (9, 20), certificate: Certificate | None = None, kind: str = "pruned",
    model: str = "", weights: str | None = None, rest: Mapping[str, Any] = MappingProxyType({}), **changes: Any,
) -> Path:  # fmt: skip
    """A folder as `sipp prune` leaves it, of a network that stands in for the one that is told of."""
    layers = [
        replace(layer("0.weight", 36, kept[0], eps=1.5, dead=2), n_rows=4, fan_in=9),
        replace(layer("1.weight", 100, kept[1], eps=None, dead=0), n_rows=10, fan_in=10),
    ]
    known = facts(**{"layers": layers, "method": "sipp-hybrid", "epsilon": 12.5, "seed": 3, **changes})
    record = SavedNetwork(
        model=model, pruned_hash=STAND_IN_HASH, dense_hash="0" * 64 if certificate is None else certificate.dense_hash,
        certificate=certificate, weights=weights, pruned=known, rest=rest,
    )  # fmt: skip
    write_pruned(folder, STAND_IN, {**record.values, "kind": kind})
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
    (pruned_folder(tmp_path / "alone") / "model.safetensors").unlink()
    with pytest.raises(
        DataError, match=r"alone: contains report\.json, but no model\.safetensors; copy the whole folder"
    ):
        read_results([tmp_path / "alone"])
