"""Hostile values for every option of every command, taken from the application itself: a new option is covered too.

Whatever is typed ends with an exit code that the manual knows, and where it is refused with three lines and nothing
written. Exit code 1 is a bug.
"""

import functools
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from cli_zoo import mlp
from commandline import Asked, asked, files_in, run, three_lines
from report.synthetic import big_run
from safetensors.torch import save_file

import sipp
from sipp.results.jsonio import to_json
from sipp.verbs.certify import certify
from sipp_lab.data.cifar10 import fetch_cifar10

HUGE = 1 << 40  # bytes of a file of holes
SUFFIXES = (".safetensors", ".pt", ".npy", ".npz", ".yaml", ".json", "")
TAKEN = {
    "--data": (".npy", ".npz"), "--holdout": (".safetensors",), "--calibration": (".npz",), "RECIPE": (".yaml",),
    "--weights": (".safetensors", ".pt"), "--dense": (".safetensors",), "--pruned": (".pt",),
    "--out": ("", ".safetensors"), "FILE": (".safetensors", ""),
}  # fmt: skip
SECONDS = 30  # after which a command counts as one that hangs
WIDE_ONE = "\N{FULLWIDTH DIGIT ONE}"
NUMBERS = ("", "x", "1.5", "-1", "0", "nan", "inf", "1e999", str(10**30), WIDE_ONE, "--")
WORDS = ("", "[", "a=b", "a:b:c", "x" * 5000, "b\udcff", "%s{0}", "seed=9e999", "os:getcwd", "sipp:__version__", "-1")
NAMES = ("", "x" * 5000, "b\udcff", "random:", "random:0x6", "random:6x-1", "cifar10:nowhere")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good inputs for every command, and one file of every bad kind with every suffix."""
    base = tmp_path_factory.mktemp("options")
    rng = np.random.default_rng(0)
    for name, n in (("data", 70), ("holdout", 99)):
        np.save(base / f"{name}.npy", rng.normal(size=(n, 6)).astype(np.float32))
    save_file(mlp().state_dict(), base / "w.safetensors")
    sipp.save(sipp.prune(mlp(), None, keep=0.5, method="magnitude"), base / "net.sipp.safetensors")
    holdout = torch.from_numpy(np.load(base / "holdout.npy"))
    (base / "cert.json").write_text(
        json.dumps({"kind": "certificate", **to_json(certify(mlp().eval(), mlp().eval(), holdout))})
    )
    records = big_run(base / "run", methods=("magnitude",), n_levels=1, n_seeds=1, n_layers=1) / "records.jsonl"
    records.write_text(records.read_text().splitlines()[0] + "\n")
    bad = base / "bad"
    bad.mkdir()
    for suffix in SUFFIXES:
        (bad / f"empty{suffix}").touch()
        (bad / f"junk{suffix}").write_bytes(bytes(range(256)) * 40)
        (bad / f"text{suffix}").write_text("a: [1, 2\n")
        (bad / f"folder{suffix}").mkdir()
        (bad / f"dead{suffix}").symlink_to(base / "nowhere")
        os.mkfifo(bad / f"fifo{suffix}")
        with open(bad / f"huge{suffix}", "wb") as file:
            file.truncate(HUGE)
    return base


def places(label: str, folder: Path) -> list[str]:
    """Paths of every bad kind, with the suffixes that the option takes."""
    names = [path for path in sorted((folder / "bad").iterdir()) if path.suffix in TAKEN.get(label, ("",))]
    others = [folder / "absent" / "x.npy", "/dev/null", "/proc/self/mem", folder / "w.safetensors" / "x"]
    return [str(path) for path in (*names, *others)]


def good(folder: Path, out: Path) -> dict[str, dict[str, object]]:
    """A command that works, by option; the arguments first."""
    model: dict[str, object] = {"--model": "cli_zoo:mlp"}
    data, weights = {"--data": folder / "data.npy"}, folder / "w.safetensors"
    return {
        "demo": {"--out": out / "demo"},
        "prune": {**model, **data, "--keep": 0.5, "--method": "magnitude", "--out": out / "out"},
        "compare": {**model, **data, "--keeps": 0.5, "--methods": "magnitude"},
        "certify": {**model, "--dense": weights, "--pruned": weights, "--holdout": folder / "holdout.npy"},
        "eval": {**model, **data, "--dense": weights, "--pruned": weights, "--out": out / "eval.json"},
        "run": {"RECIPE": "digits-iterative", "--out": out / "runs"},
        "inspect": {"FILE": folder / "net.sipp.safetensors"},
        "shrink": {"FILE": folder / "net.sipp.safetensors", **model, **data, "--out": out / "net.pt"},
        "export": {"FILE": folder / "net.sipp.safetensors", **model, **data, "--out": out / "net.onnx"},
        "study": {"NAME": "paper-fully-connected", "--out": out / "runs"},
        "sensitivity": {**model, **data, "--out": out / "scores.safetensors"},
        "report": {"RUNS": folder / "run", "--out": out / "page.html"},
        "data": {"NAME": "list", "FOLDER": folder},
        "bench": {
            "FILE": folder / "net.sipp.safetensors",
            **model,
            **data,
            "--batch-size": 1,
        },
    }


def typed(command: str, options: dict[str, object]) -> list[object]:
    words: list[object] = [command]
    for option, value in options.items():
        words += [f"{option}={value}"] if option.startswith("-") else [value]
    return words


def values(one: Asked, folder: Path) -> list[str]:
    """Hostile values for an option of this kind; options that name a place or a set get all the bad files too."""
    if one.kind is bool:
        return ["maybe"]
    if one.choices:
        return ["", "x", one.choices[0].upper() + " ", f"{one.choices[0]},{one.choices[-1]}"]
    is_first = one.command == next(other.command for other in asked() if other.label == one.label)
    if one.kind in (int, float):  # every command reads numbers by the same code
        return [*NUMBERS] if is_first else ["x", "-1", "0", "nan", str(10**30)]
    if one.kind is Path or one.label in TAKEN:
        return [*(NAMES[:3] if one.kind is Path else NAMES), *places(one.label, folder)]
    return [*WORDS] if is_first else [*WORDS[:6]]


def with_its_companions(one: Asked, options: dict[str, object], folder: Path) -> dict[str, object]:
    """The options with those that this one needs, and without those that it excludes."""
    if one.command == "prune" and one.label in ("--epsilon", "--max-accuracy-drop"):
        options = {key: value for key, value in options.items() if key not in ("--keep", "--method")}
    if one.command == "prune" and one.label in ("--confidence", "--share", "--part"):
        options["--holdout"] = folder / "holdout.npy"
    if one.command == "prune" and one.label == "--points":
        options["--method"] = "sipp-det"
    if one.command == "prune" and one.label == "--pattern":
        del options["--keep"]
    return options


@pytest.fixture(autouse=True)
def no_long_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stops commands where training or fetching would begin, and ends those that hang."""

    def begun(*args: object, **options: object) -> None:
        raise typer.Exit(0)

    def hangs(*args: object) -> None:
        raise AssertionError("it hangs")

    monkeypatch.setattr("sipp_lab.runs.running.train_networks", begun)
    monkeypatch.setattr("sipp_lab.runs.running.run_on_ray", begun)
    monkeypatch.setattr(
        "sipp_lab.data.cifar10.fetch_cifar10", functools.partial(fetch_cifar10, url="http://127.0.0.1:9/x")
    )
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGALRM, hangs)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("command", good(Path(), Path()))
def test_the_good_commands_are_good(command: str, folder: Path, tmp_path: Path) -> None:
    done = run(*typed(command, good(folder, tmp_path)[command]))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("one", asked(), ids=lambda one: f"{one.command} {one.label}")
def test_hostile_values(one: Asked, folder: Path, tmp_path: Path) -> None:
    n_refused = 0
    for value in values(one, folder):
        out = tmp_path / "o"
        out.mkdir()
        options = with_its_companions(one, dict(good(folder, out)[one.command]), folder)
        words = typed(one.command, {**options, one.label: value})
        before = files_in(tmp_path)
        signal.alarm(SECONDS)
        done = run(*words)
        signal.alarm(0)
        assert done.returncode in (0, 2, 3), (value[:80], done.stderr)
        assert "Traceback" not in done.stderr + done.stdout
        if done.returncode:
            n_refused += 1
            assert done.returncode == 3 or done.stdout == "", (value, done.stdout)
            assert done.returncode == 3 or three_lines(done.stderr), value
            assert files_in(tmp_path) == before, value
        for left in tmp_path.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    assert n_refused or one.kind in (str, Path)


def test_every_command_is_among_the_good_ones() -> None:
    assert {one.command for one in asked()} == set(good(Path(), Path()))
