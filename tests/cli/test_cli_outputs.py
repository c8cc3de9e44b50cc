"""No command writes over what it reads, or without --force over what exists: every output against every input."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import asked, files_in, must_not_be_called, refused, run, three_lines
from report.synthetic import big_run
from safetensors.torch import save_file

from sipp.cli import model_option, stored_option
from sipp.cli.commands import demo_command as demo
from sipp.scoring import methods
from sipp_lab import page

Words = list[object]
# What the options and arguments that name a place on the disk are for; a new name must be put here.
READ = {
    "--weights", "--data", "--holdout", "--calibration", "--code", "--dense", "--pruned", "FILE", "RECIPE",
    "RUNS",
}  # fmt: skip
WRITTEN = {"--out", "FOLDER"}
NAMES_OR_PLACES = {"--data", "--holdout", "--calibration", "RECIPE"}
PLACES = [one for one in asked() if one.kind is Path or one.label in NAMES_OR_PLACES]


def reads(command: str) -> list[str]:
    """The options of a command that name what it reads."""
    return [one.label for one in PLACES if one.command == command and one.label in READ]


def test_every_option_that_names_a_place_is_read_or_written() -> None:
    assert {one.label for one in PLACES} == READ | WRITTEN and not READ & WRITTEN


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, each a file of its own, and a whole folder of `sipp prune`."""
    folder = tmp_path_factory.mktemp("filled")
    for seed, name in enumerate(("data", "holdout", "calibration")):
        save_file({"inputs": _points(seed)}, folder / f"{name}.safetensors")
    for name in ("weights", "dense", "pruned"):
        save_file(mlp().state_dict(), folder / f"{name}.safetensors")
    (folder / "code.py").write_text("import sipp\nsipp.register_method('of-a-file', lambda task: {})\n")
    words = ["--model", "cli_zoo:mlp", "--data", folder / "data.safetensors", "--keep", 0.5]
    assert run("prune", *words, "--out", folder / "net").returncode == 0
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; no command may begin to work."""
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(methods, "_ROWS", dict(methods._ROWS))  # what the code registers ends with the test
    for module in (model_option, stored_option):
        monkeypatch.setattr(module, "load_model", must_not_be_called)
    return tmp_path


def _points(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(200, 6)).astype(np.float32))


def command(name: str, folder: Path) -> dict[str, object]:
    """The inputs of a command by option."""
    options = {option: folder / f"{option[2:]}.safetensors" for option in reads(name)}
    options |= {"--code": folder / "code.py"} if "--code" in options else {}
    more: dict[str, object] = {"--keep": 0.5} if name == "prune" else {}
    return {"--model": "cli_zoo:mlp", **options, **more}


def words_of(name: str, options: dict[str, object]) -> Words:
    return [name, *(word for option in options.items() for word in option)]


def _same(path: Path) -> Path:
    return path


def _roundabout(path: Path) -> Path:
    (path.parent / "x").mkdir(exist_ok=True)
    return path.parent / "x" / ".." / path.name


def _hard_link(path: Path) -> Path:
    os.link(path, path.with_name("hard.safetensors"))
    return path.with_name("hard.safetensors")


def _through_a_linked_folder(path: Path) -> Path:
    (path.parent / "linked").symlink_to(path.parent)
    return path.parent / "linked" / path.name


WAYS: list[Callable[[Path], Path]] = [_same, _roundabout, _hard_link, _through_a_linked_folder]
FILES = [
    (name, output, option)
    for name, output in (
        ("certify", "--out"),
        ("eval", "--out"),
    )
    for option in reads(name)
]


@pytest.mark.parametrize(("name", "output", "option"), FILES)
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_read(name: str, output: str, option: str, way: Callable[[Path], Path], folder: Path) -> None:
    options = command(name, folder)
    out = way(Path(str(options[option])))
    before = files_in(folder)
    for force in ([], ["--force"]):
        done = run(*words_of(name, options | {output: out}), *force)
        assert done.returncode == 2 and three_lines(done.stderr)[1].startswith(output), done.stderr
        assert files_in(folder) == before


def test_a_hugging_face_folder_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.json").write_text("{}")
    done = run("prune", "--model", f"hf:{tmp_path / 'net'}", "--keep", 0.5, "--out", tmp_path / "net", "--force")
    assert done.returncode == 2 and "what --model reads" in done.stderr


def test_a_folder_in_which_lies_what_is_read(folder: Path) -> None:
    inside = folder / "net" / "mine.safetensors"
    inside.write_bytes((folder / "weights.safetensors").read_bytes())
    before = files_in(folder)
    for out in (folder / "net", _roundabout(folder / "net"), folder):
        typed = command("prune", folder) | {"--weights": inside, "--out": out}
        for force in ([], ["--force"]):
            done = run(*words_of("prune", typed), *force)
            assert done.returncode == 2 and three_lines(done.stderr)
            assert {**files_in(folder), "x": b""} == {**before, "x": b""}
        if out != folder:
            assert "what --weights reads" in three_lines(done.stderr)[0]


def test_a_network_pruned_over_itself(folder: Path) -> None:
    """`prune --weights d/model.safetensors --out d --force`, by file and by folder."""
    before = files_in(folder)
    for weights in (folder / "net" / "model.safetensors", folder / "net"):
        typed = command("prune", folder) | {"--weights": weights, "--out": folder / "net"}
        refused(run(*words_of("prune", typed), "--force"), "--out", "what --weights reads")
        assert files_in(folder) == before


# --- what exists ----------------------------------------------------------------------------------------------------


def test_what_exists_stays_without_force(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sipp_lab.runs.running.run", must_not_be_called)
    for name in ("mine.safetensors", "mine.json", "page.html"):
        (folder / name).write_text("mine")
    (folder / "other").mkdir()
    (folder / "other" / "report.json").write_text("mine")
    before = files_in(folder)
    typed: list[tuple[Words, str]] = [
        (words_of("certify", command("certify", folder) | {"--out": folder / "mine.json"}), "--out"),
        (words_of("eval", command("eval", folder) | {"--out": folder / "mine.json"}), "--out"),
        (words_of("prune", command("prune", folder) | {"--out": folder / "mine.safetensors"}), "--out"),
        (words_of("prune", command("prune", folder) | {"--out": folder / "other"}), "--out"),
        (["report", folder / "net", "--out", folder / "page.html"], "--out"),
        (["demo", "--out", folder], "sipp demo"),
    ]
    for words, where in typed:
        done = run(*words)
        refused(done, where)
        assert "--force" in three_lines(done.stderr)[2] and files_in(folder) == before, words


def test_weights_put_by_others_into_our_folder_stay(folder: Path) -> None:
    save_file({"theirs": _points(9)}, folder / "net" / "model.safetensors")
    before = files_in(folder)
    typed = words_of("prune", command("prune", folder) | {"--out": folder / "net"})
    refused(run(*typed, "--force"), "--out", "that is not of sipp")
    assert files_in(folder) == before


def test_it_is_replaced_with_force(tmp_path: Path) -> None:
    save_file({"inputs": _points(0)}, tmp_path / "data.safetensors")
    save_file({"inputs": _points(1)}, tmp_path / "holdout.safetensors")
    save_file(mlp().state_dict(), tmp_path / "w.safetensors")
    net, data = ["--model", "cli_zoo:mlp"], ["--data", tmp_path / "data.safetensors"]
    dense = ["--dense", tmp_path / "w.safetensors", "--pruned", tmp_path / "out"]
    runs = big_run(tmp_path / "run", methods=("magnitude",), n_levels=1, n_seeds=1, n_layers=1)
    commands: dict[str, Words] = {
        "out": ["prune", *net, *data, "--weights", tmp_path / "w.safetensors", "--keep", 0.9, "--method", "magnitude"],
        "c.json": ["certify", *net, *dense, "--holdout", tmp_path / "holdout.safetensors"],
        "e.json": ["eval", *net, *dense, *data],
        "page.html": ["report", runs],
    }
    for name, words in commands.items():
        for force, code in ([[], 0], [[], 2], [["--force"], 0]):
            before = files_in(tmp_path)
            done = run(*words, "--out", tmp_path / name, *force)
            assert done.returncode == code, done.stderr
            if code:
                refused(done, "--out")
                assert "--force" in three_lines(done.stderr)[2] and files_in(tmp_path) == before


# --- run, demo, data -------------------------------------------------------------------------------------------------


def test_a_demo_over_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = [
        {"method": m, "level": level, "before": {"top1": 0.5}, "after": {"top1": 0.6}, "seed": 0, "keep": 0.5}
        for m, level in ((None, 0), ("magnitude", 1))
    ]
    shown = big_run(tmp_path / "run", methods=("magnitude",), n_levels=1, n_seeds=1, n_layers=1)
    honest = page.read_results
    monkeypatch.setattr(demo, "_records", lambda *args: result)
    monkeypatch.setattr(page, "read_results", lambda paths: honest([shown]))
    out = tmp_path / "demo"
    assert run("demo", "--out", out).returncode == 0
    before = files_in(tmp_path)
    refused(run("demo", "--out", out), "sipp demo", "exists")
    assert files_in(tmp_path) == before
    assert run("demo", "--out", out, "--force").returncode == 0


def test_fetching_never_replaces_existing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sipp_lab.data.download._download", must_not_be_called)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(b"mine")
    before = files_in(tmp_path)
    done = run("data", "cifar10", tmp_path)
    assert done.returncode == 2 and "move" in three_lines(done.stderr)[2] and files_in(tmp_path) == before


def test_help_says_that_inputs_are_never_replaced() -> None:
    for name in ("prune", "certify", "report", "demo"):
        assert "files that the command reads are never replaced" in " ".join(
            run(name, "--help").stdout.replace("│", " ").split()
        ), name
