"""Faults that reach the command line: three lines that name it, an exit code, and nothing written or lost."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import files_in, must_not_be_called, refused, run, three_lines, told
from report.synthetic import big_run
from safetensors.torch import save_file

from sipp.cli import networks
from sipp.files import write_json
from sipp_lab.data.sets import CIFAR10

Words = list[object]
Make = Callable[[Path], Words]


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name("ran")

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def file(option: str, name: str, make: Callable[[Path], object]) -> Make:
    """The option, with a file that `make` writes."""

    def words(folder: Path) -> Words:
        make(folder / name)
        return [option, folder / name]

    return words


def numbers(place: tuple[object, ...], value: float, n: int = 200) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        array = np.random.default_rng(n).normal(size=(n, 6)).astype(np.float32)
        array[place] = value
        np.savez(path, inputs=array)

    return make


def cut_set(folder: Path) -> Words:
    (folder / "cifar-10-batches-bin").mkdir()
    for name in CIFAR10.files:
        (folder / "cifar-10-batches-bin" / name).write_bytes(b"\0" * 3073)
    return ["--data", f"cifar10:{folder}"]


# number in the table of faults, what the command gets besides or instead of good words, words of the message, exit code
FAULTS: list[tuple[str, Make, str, int]] = [
    ("4 endless header", file("--weights", "w.safetensors", lambda p: p.write_bytes(b"\xff" * 8)), "w.saf", 2),
    ("4 truncated array", file("--data", "p.npy", lambda p: p.write_bytes(b"\x93NUMPY\x01\x00v\x00")), "p.npy", 2),
    ("6 unknown kind of file", file("--data", "p.csv", lambda p: p.write_bytes(b"1,2")), "p.csv", 2),
    ("13 NaN in the data", file("--data", "p.npz", numbers((70, 2), np.nan)), "first in input 70", 2),
    ("13 infinity in the data", file("--data", "p.npz", numbers((0, 0), np.inf)), "NaN or infinite", 2),
    ("15 output not finite", file("--holdout", "h.npz", numbers((slice(None), 0), np.nan)), "not certified", 3),
    ("19 too small a holdout", file("--holdout", "h.npz", numbers((0, 0), 1.0, n=20)), "needs n >= 59", 3),
    ("24 unsupported layer", lambda folder: ["--model", "cli_zoo:transposed"], "ConvTranspose2d", 2),
    ("32 no level passes", lambda folder: ["--epsilon", 0, "--holdout", folder / "new.npz"], "not certified", 3),
    ("33 set absent", lambda folder: ["--data", f"cifar10:{folder}"], "CIFAR-10", 2),
    ("33 set cut", cut_set, "bytes", 2),
    ("pickle in weights", file("--weights", "w.pt", lambda p: torch.save({"a": Canary(p)}, p)), "w.pt", 2),
    ("pickle in inputs", file("--data", "p.npy", lambda p: np.save(p, np.array([Canary(p)]))), "p.npy", 2),
    ("model unknown", lambda folder: ["--model", "resnet21"], "did you mean", 2),
    ("model gives no network", lambda folder: ["--model", "cli_zoo:not_a_network"], "not an nn.Module", 2),
    ("model raises", lambda folder: ["--model", "cli_zoo:raises"], "my own bug", 2),
    ("model exits", lambda folder: ["--model", "cli_zoo:ends_the_program"], "SystemExit", 2),
    ("pattern of no layer", lambda folder: ["--exclude", "conv*"], "matches no layer", 2),
    ("keep out of range", lambda folder: ["--keep", 1.5], "(0, 1]", 2),
    ("keep of none", lambda folder: ["--keep", 1e-9], "keeps none", 2),
    ("points out of range", lambda folder: ["--points", 0], "--points", 2),
]  # fmt: skip


def command(folder: Path, change: Words) -> Words:
    """A prune command that works, after a change: an option given again replaces the first."""
    numbers((0, 0), 1.0)(folder / "good.npz")
    numbers((0, 0), 1.0, n=300)(folder / "new.npz")
    options: dict[str, object] = {"--model": "cli_zoo:mlp", "--data": folder / "good.npz", "--keep": 0.5}
    options |= {"--out": folder / "out"} | dict(zip(change[::2], change[1::2]))  # type: ignore[arg-type]
    if "--epsilon" in options:
        del options["--keep"]
    return ["prune", *(word for option in options.items() for word in option)]


@pytest.mark.parametrize(("row", "change", "words", "code"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_fault(row: str, change: Make, words: str, code: int, tmp_path: Path) -> None:
    typed = command(tmp_path, change(tmp_path))
    before = files_in(tmp_path)
    done = run(*typed, "--json")
    assert done.returncode == code and words in three_lines(done.stderr)[0], done.stderr
    assert (code == 3 or done.stdout == "") and files_in(tmp_path) == before


def test_what_is_only_warned_of_or_said(tmp_path: Path) -> None:
    assert "warning: --points 500: there are only 200" in run(*command(tmp_path, ["--points", 500])).stderr
    dead = run(*command(tmp_path, ["--keep", 0.05, "--method", "magnitude", "--out", tmp_path / "dead"]))  # fault 16
    assert dead.returncode == 0 and "filters lost all" in dead.stderr and "0.weight" in dead.stderr
    few = told(
        *command(tmp_path, [*file("--data", "few.npz", numbers((0, 0), 1.0, n=3))(tmp_path), "--out", tmp_path / "f"])
    )
    assert not few["guarantee"]["met"] and not few["bound"]["met"]  # faults 18, 19
    zero = run(
        *command(
            tmp_path, [*file("--data", "zero.npz", numbers((slice(None),), 0.0))(tmp_path), "--out", tmp_path / "z"]
        )
    )
    assert zero.returncode == 0 and "nan" not in zero.stdout.lower()  # fault 16
    low = run(*command(tmp_path, ["--model", "cli_zoo:half", "--out", tmp_path / "half"]))  # fault 17
    assert low.returncode == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    refused(run(*command(tmp_path, ["--device", "cuda"])), "--device", "CUDA")  # fault 34


def test_a_set_that_cannot_be_fetched_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sipp_lab.data.sets.CIFAR10", replace(CIFAR10, url="http://127.0.0.1:9/x"))
    done = run("data", "cifar10", tmp_path)  # fault 33
    assert done.returncode == 2 and "data_batch_1.bin" in done.stderr and not files_in(tmp_path)


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs, weights and a pruned network; no command may begin to work."""
    monkeypatch.chdir(tmp_path)
    for name in ("data.npz", "new.npz"):
        numbers((0, 0), 1.0)(tmp_path / name)
    save_file(mlp().state_dict(), "w.safetensors")
    words = ["--model", "cli_zoo:mlp", "--data", "data.npz", "--keep", 0.5, "--out", "net"]
    assert run("prune", *words).returncode == 0
    Path("file").write_text("a file\n")
    monkeypatch.setattr(networks, "_build", must_not_be_called)
    return tmp_path


NET = ["--model", "cli_zoo:mlp"]
BOTH = [*NET, "--dense", "w.safetensors", "--pruned", "net"]
COMMANDS: dict[str, Words] = {
    "prune": ["prune", *NET, "--weights", "w.safetensors", "--data", "data.npz", "--holdout", "new.npz", "--keep", 0.5],
    "certify": ["certify", *BOTH, "--holdout", "new.npz"],
    "eval": ["eval", *BOTH, "--data", "data.npz"],
    "report": ["report", "net"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_cannot_be_is_refused_before_any_work(name: str, folder: Path) -> None:
    before = files_in(folder)
    for path in ("file/out", "x" * 300, "/proc/out"):
        refused(run(*COMMANDS[name], "--out", path), "--out")
    for path in ("file", *(["net"] if name == "prune" else [])):
        assert "--force" in refused(run(*COMMANDS[name], "--out", path), "--out") or name == "prune"
    assert files_in(folder) == before


@pytest.mark.parametrize("name", ["prune", "certify", "eval"])
def test_what_a_command_reads_is_never_replaced(name: str, folder: Path) -> None:
    before = files_in(folder)
    for path in ("w.safetensors", "net/../w.safetensors"):
        fix = refused(run(*COMMANDS[name], "--out", path, "--force"), "--out", "reads")
        assert fix and files_in(folder) == before


def test_one_broken_run_does_not_hide_the_others(tmp_path: Path) -> None:
    root, page = tmp_path / "runs", tmp_path / "page.html"
    for name in ("a", "b", "c"):
        big_run(root / name, methods=("magnitude",), n_levels=1, n_seeds=1, n_layers=1)
    write_json(root / "b" / "manifest.json", {"no": "config"})
    states = {Path(one["folder"]).name: one["state"] for one in told("run", "--status", "--out", root)["runs"]}
    assert states == {"a": "finished", "b": "broken", "c": "finished"}
    found = told("report", root, "--out", page)
    assert found["of"] == ["a", "c"] and [one["folder"] for one in found["broken"]] == [str(root / "b")]
    assert "Not shown: b is broken" in page.read_text()
    done = run("report", root / "b", "--out", page, "--force")  # it was asked for by name
    assert done.returncode == 2 and "config" in done.stderr
