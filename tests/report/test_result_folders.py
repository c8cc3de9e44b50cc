"""Folders that are whole, unfinished, broken or something else."""

import json
from pathlib import Path
from typing import Any

import pytest
from report.synthetic import big_run, certificate

from sipp.errors import DataError
from sipp.experiments.runs.reading import Run, read_run
from sipp.report.results import PrunedModel, read_pruned_result, read_results
from sipp.storage.files import seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return big_run(tmp_path / "runs" / "one", methods=("sipp-det", "wt"), n_levels=2, n_seeds=1, n_layers=2)


def pruned_folder(folder: Path, *, kept: tuple[int, int] = (9, 20), **changes: Any) -> Path:
    """A record as `sipp prune` leaves it, without its network."""
    layers = [
        {"name": "0.weight", "n_rows": 4, "fan_in": 9, "n_weights": 36, "kept": kept[0], "eps": 1.5, "dead_rows": 2},
        {
            "name": "1.weight",
            "n_rows": 10,
            "fan_in": 10,
            "n_weights": 100,
            "kept": kept[1],
            "eps": None,
            "dead_rows": 0,
        },
    ]
    layers = [{**layer, "keep": layer["kept"] / layer["n_weights"]} for layer in layers]  # type: ignore[operator]
    bound = {"epsilon": 12.5, "delta": 1e-16, "met": False, "reason": "too few points"}
    counts = {"kept": sum(kept), "n_weights": 136, "dead_rows": 2, "keep": sum(kept) / 136}
    values = {"kind": "pruned", "format": 2, "method": "sipp-hybrid", "layers": layers, "bound": bound, "seed": 3}
    certified = changes.get("certificate") or {}
    hashes = {key: certified.get(key, "0" * 64) for key in ("dense_hash", "pruned_hash")}
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(seal({**values, **counts, **hashes, **changes})))
    return folder


def test_a_finished_run_is_read(folder: Path) -> None:
    run = read_run(folder)
    assert run.finished and run.n_stages == len(run.records) == 5
    assert run.records[0].method is None and run.records[0].keep == 1.0
    assert run.records[1].layers[0].n_weights == 432 and run.records[1].certificate is not None


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
    assert [layer.dead_rows for layer in pruned.record.layers] == [2, 0]
    assert [layer.n_weights for layer in pruned.record.layers] == [36, 100]
    assert pruned.record.bound is not None and not pruned.record.bound.holds and pruned.record.certificate is None
    assert pruned.record.model_extra is not None and pruned.record.model_extra["seed"] == 3


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
        ("after.top1", "high", "top1"),
        ("after", None, "after"),
        ("keep", True, "keep"),
        ("level", 3, "no network of this run"),
        ("layers.0.kept", -1, "kept"),
        ("method", 7, "method"),
        ("bound", [], "bound"),
        ("bound.epsilon", "many", "epsilon"),
        ("certificate.violations", None, "certificate"),
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
    with pytest.raises(DataError, match="not a record of"):
        read_pruned_result(pruned_folder(tmp_path / "net", kind="other"))


def test_a_bound_is_met_only_where_the_record_says_so_and_gives_it(tmp_path: Path) -> None:
    for index, (met, epsilon, expected) in enumerate([(True, 0.5, True), (True, None, False), ("yes", 0.5, False)]):
        bound = {"epsilon": epsilon, "delta": 0.1, "met": met, "reason": ""}
        read = read_pruned_result(pruned_folder(tmp_path / str(index), bound=bound)).record.bound
        assert read is not None and read.holds is expected
