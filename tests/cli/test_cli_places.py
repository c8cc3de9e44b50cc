"""Places on the disk: outputs refused before any work, folders that a stop leaves, results of which one is broken."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cli_zoo import mlp
from commandline import files_in, must_not_be_called, refused, run, three_lines
from report.synthetic import big_run
from safetensors.torch import save_file

from sipp.cli import model_option
from sipp.cli.commands import demo_command as demo
from sipp.cli.errors import Terminated
from sipp.errors import OptionError
from sipp.files import check_file, read_json, write_json

NOBODY = 65534
LONG = "x" * 252  # letters: a name, but too long with the start it has while it is being written
Words = list[object]

# --- a demo that was stopped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Terminated(143)], ids=repr)
def test_a_stopped_demo_leaves_the_disk_as_it_was(
    stop: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(recipe: object, *, out: Path, **options: object) -> None:
        (out / "half").mkdir()
        raise stop

    monkeypatch.setattr("sipp_lab.runs.running.run", stopped)
    (tmp_path / "there").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    before = files_in(tmp_path)
    for name in ("new", "new/a/b", "there", "there/a", "full", "full/a"):
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            demo.run_demo(tmp_path / name, progress=False)
        assert files_in(tmp_path) == before, name


def test_a_demo_s_folder_that_is_none_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sipp_lab.runs.running.run", must_not_be_called)
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "page.html").mkdir(parents=True)
    before = files_in(tmp_path)
    for name in ("file", "taken"):
        done = run("demo", "--out", tmp_path / name)
        assert done.returncode == 2 and three_lines(done.stderr) and files_in(tmp_path) == before


# --- one broken result among others ---------------------------------------------------------------------------------


def whole_run(folder: Path) -> Path:
    """A run as `sipp run` leaves it, with the checksum of a real one."""
    return big_run(folder, methods=("magnitude",), n_levels=1, n_seeds=1, n_layers=1)


def _without(*keys: str) -> Callable[[Path], None]:
    """Takes a key out of a manifest, and makes its checksum fit."""

    def change(folder: Path) -> None:
        values = read_json(folder / "manifest.json")
        inner = values
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        write_json(folder / "manifest.json", values)

    return change


def _folder_instead(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda folder: (folder / "manifest.json").write_text('{"values": '), "JSON"),
    "no text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json"),
    "a list": (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json"),
    "no config": (_without("config"), "'config'"),
    "no methods": (_without("config", "prune", "methods"), "'methods'"),
    "no origins": (_without("origins"), "'origins'"),
    "unreadable": (_folder_instead, "cannot be read"),
    "cut records": (lambda folder: (folder / "records.jsonl").write_text('{"a": '), "records.jsonl"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_one_broken_run_does_not_hide_the_others(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for name in ("a", "c"):
        whole_run(root / name)
    whole = json.loads(run("run", "--status", "--out", root, "--json").stdout)["runs"]
    assert [(one["name"], one["state"], one["what"]) for one in whole] == [(n, "finished", None) for n in ("a", "c")]
    make, words = BROKEN[kind]
    make(whole_run(root / "b"))

    listed = run("run", "--status", "--out", root, "--json")
    assert listed.returncode == 0 and listed.stderr == ""
    first, broken, last = json.loads(listed.stdout)["runs"]
    assert [first, last] == whole and set(broken) == set(first)
    assert (broken["name"], broken["state"], broken["n_done"]) == ("b", "broken", None)
    assert words in broken["what"] and str(root / "b") in broken["what"] and broken["do"]

    shown = run("run", "--status", "--out", root)
    assert shown.returncode == 0 and shown.stdout.count("finished") == 2
    assert f"broken: {broken['what']}; {broken['do']}" in shown.stdout.splitlines()

    page = tmp_path / "page.html"
    made = run("report", root, "--out", page, "--json")
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["of"] == ["a", "c"] and [one["folder"] for one in found["broken"]] == [str(root / "b")]
    assert words in found["broken"][0]["what"] and found["broken"][0]["do"]
    assert (
        "Not shown: b is broken" in page.read_text()
        and str(root / "b") in run("report", root, "--out", page, "--force").stdout
    )


def test_a_broken_result_that_was_asked_for_is_refused(tmp_path: Path) -> None:
    folders = {name: whole_run(tmp_path / "runs" / name) for name in ("a", "c")}
    (folders["c"] / "manifest.json").write_text("")
    page = tmp_path / "page.html"
    for asked in ([folders["c"]], [tmp_path / "runs", folders["c"]]):
        done = run("report", *asked, "--out", page)
        assert done.returncode == 2 and "is not JSON" in three_lines(done.stderr)[0] and not page.exists()
    (folders["a"] / "manifest.json").write_text("")
    none = run("report", tmp_path / "runs", "--out", page)
    assert none.returncode == 2 and "put back" in three_lines(none.stderr)[2] and not page.exists()


# --- outputs that cannot be written ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with inputs, and commands that fail the test where they begin to work."""
    np.savez(tmp_path / "p.npz", inputs=np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32))
    np.savez(tmp_path / "h.npz", inputs=np.random.default_rng(1).normal(size=(200, 6)).astype(np.float32))
    save_file(mlp().state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "file").write_text("a file\n")
    (tmp_path / "some").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "dead").symlink_to(tmp_path / "nothing")
    monkeypatch.setattr(model_option, "load_model", must_not_be_called)
    return tmp_path


def command(name: str, folder: Path) -> Words:
    data = ["--data", folder / "p.npz"]
    net, networks = (
        ["--model", "cli_zoo:mlp"],
        ["--dense", folder / "w.safetensors", "--pruned", folder / "w.safetensors"],
    )
    return {
        "keep": ["prune", *net, *data, "--holdout", folder / "h.npz", "--keep", 0.9, "--out", folder / "out"],
        "epsilon": ["prune", *net, *data, "--epsilon", 0.5, "--out", folder / "out"],
        "drop": ["prune", *net, *data, "--max-accuracy-drop", 0.5, "--out", folder / "out"],
        "certify": ["certify", *net, *networks, "--holdout", folder / "h.npz"],
        "accuracy": ["certify", *net, *networks, "--holdout", folder / "h.npz", "--accuracy"],
        "report": ["report", folder],
    }[name]


@pytest.mark.parametrize("name", ["keep", "epsilon", "certify", "report"])
def test_an_output_that_cannot_be_is_refused_before_any_work(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sipp_lab.page.read_intact_results", must_not_be_called)
    before = files_in(folder)
    for path in ("file/out", LONG, "x" * 300, "/proc/out"):
        refused(run(*command(name, folder), "--out", folder / path), "--out")
        assert files_in(folder) == before, path


@contextmanager
def _as_nobody() -> Iterator[None]:
    """A context in which permissions count, also for root."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_places_without_permission_are_refused() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folder is closed to everyone else
        root = Path(name)
        root.chmod(0o755)
        closed, opened = root / "closed", root / "opened"
        for folder, mode in ((closed, 0o555), (opened, 0o777)):
            folder.mkdir()
            folder.chmod(mode)
        with _as_nobody():
            with pytest.raises(OptionError, match="ermission denied"):
                check_file(closed / "out", force=False)
            check_file(opened / "out", force=False)
