"""What a hostile user tried on the command line and once got through: networks, weights, points, seeds, folders."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import Done, files_in, run, three_lines

from sipp.cli.errors import run_and_report
from sipp.errors import DataError
from sipp_lab.runs.folder import read_records


def prune(folder: Path, *change: object) -> Done:
    """`sipp prune` of a good network on good points, after a change: the last of an option counts."""
    words = ["--model", "cli_zoo:mlp", "--data", "random:8x6", "--keep", 0.5, "--out", folder / "out"]
    return run("prune", *words, *change)


def refused(done: Done, folder: Path) -> str:
    """All three lines of a refusal with exit code 2, after which nothing new is in the folder."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and not (folder / "out").exists()
    return " / ".join(three_lines(done.stderr))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ends_the_program", "SystemExit"),  # was exit code 0 with nothing done
        ("without_values", "meta device"),
        ("scripted", "TorchScript"),
        ("no_rows", "no prunable weight"),
    ],
)
def test_networks_that_are_none(name: str, words: str, tmp_path: Path) -> None:
    assert words in refused(prune(tmp_path, "--model", f"cli_zoo:{name}"), tmp_path)


def _save(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        state = mlp().state_dict()
        torch.save({**state, "0.weight": change(state["0.weight"])}, path)

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_save(lambda t: t.to(torch.complex64) * 1j), "0.weight is torch.complex64"),  # torch drops the imaginary part
        (_save(lambda t: t.to(torch.int8)), "0.weight is torch.int8"),  # a quantised file without its scales
        (_save(lambda t: t.to_sparse()), "sparse"),
    ],
)
def test_weights_that_would_change_on_the_way_in(make: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    make(tmp_path / "w.pt")
    assert words in refused(prune(tmp_path, "--weights", tmp_path / "w.pt"), tmp_path)


def test_weights_of_another_precision_are_read(tmp_path: Path) -> None:
    _save(lambda t: t.double())(tmp_path / "w.pt")
    assert prune(tmp_path, "--weights", tmp_path / "w.pt").returncode == 0


def test_nobody_is_told_how_to_run_a_pickle(tmp_path: Path) -> None:
    torch.save(mlp(), tmp_path / "w.pt")
    np.save(tmp_path / "p.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "q.npy").write_bytes(b"no array at all" * 20)
    for change in (["--weights", "w.pt"], ["--data", "p.npy"], ["--data", "q.npy"]):
        told = refused(prune(tmp_path, change[0], tmp_path / change[1]), tmp_path)
        assert not any(advice in told for advice in ("weights_only", "allow_pickle", "trust")), told


def test_arrays_of_numbers_only_in_any_byte_order(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(9, 6))
    hashes = []
    for dtype in ("<f4", ">f4"):
        np.save(tmp_path / f"{dtype[0]}.npy", values.astype(dtype))
        assert prune(tmp_path, "--data", tmp_path / f"{dtype[0]}.npy", "--force").returncode == 0
        hashes.append(json.loads((tmp_path / "out" / "report.json").read_text())["seen"])
    assert hashes[0] == hashes[1]
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    np.savez(tmp_path / "none.npz")
    assert "not numbers" in prune(tmp_path, "--data", tmp_path / "words.npy", "--force").stderr
    assert "holds no arrays" in prune(tmp_path, "--data", tmp_path / "none.npz", "--force").stderr


@pytest.mark.parametrize("labels", [np.full(9, 7), np.full(9, -1), np.linspace(0, 1, 9), np.zeros((9, 2), int)])
def test_labels_that_do_not_fit_the_loss(labels: np.ndarray, tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", inputs=np.ones((9, 6), np.float32), labels=labels)
    told = refused(prune(tmp_path, "--data", tmp_path / "p.npz", "--method", "snip"), tmp_path)
    assert "calibration batch 0" in told and "labels" in told


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_seeds_that_no_generator_takes(seed: int, tmp_path: Path) -> None:
    assert "--seed" in refused(prune(tmp_path, "--seed", seed), tmp_path)


def test_an_option_inside_another_name_is_not_respelled(tmp_path: Path) -> None:
    np.save(tmp_path / "h.npy", np.ones((99, 6), np.float32))
    told = refused(prune(tmp_path, "--holdout", tmp_path / "h.npy", "--share", 2), tmp_path)
    assert "---" not in told and "share" in told


def test_a_page_needs_a_name_and_runs_a_folder(tmp_path: Path) -> None:
    assert prune(tmp_path).returncode == 0
    before = files_in(tmp_path)
    assert "is a folder" in three_lines(run("report", tmp_path / "out", "--out", tmp_path).stderr)[0]
    file = tmp_path / "out" / "report.json"
    for as_json in ([], ["--json"]):
        listed = run("run", "--status", "--out", file, *as_json)
        assert listed.returncode == 2 and "is a file" in three_lines(listed.stderr)[0]
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("data", [b'{"a": ', b"\xff\n", b"[" * 100_000])
def test_records_that_were_cut_are_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=r"records\.jsonl: is not whole"):
        read_records(tmp_path)


def test_a_full_disk_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(number: int) -> Callable[..., None]:
        def app(**words: object) -> None:
            raise OSError(number, "words of the system")

        return app

    assert run_and_report(fails(errno.ENOSPC), ["run"]) == 2
    assert three_lines(capsys.readouterr().err)[2].startswith("free space")
    assert run_and_report(fails(errno.EBADF), ["run"]) == 1  # and this one is
