"""Every fault that can reach the command line: three lines that name it, its exit code, and nothing written."""

import functools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import files_in, run, safetensors_with, three_lines

from sipp_lab.data.cifar10 import FILES, fetch_cifar10

Words = list[object]


class Canary:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def good(folder: Path) -> dict[str, np.ndarray]:
    return {"inputs": np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)}


def weights(name: str, make: Callable[[Path], None]) -> Callable[[Path], Words]:
    """`--weights` with a file that `make` writes."""

    def words(folder: Path) -> Words:
        make(folder / name)
        return ["--weights", folder / name]

    return words


def points(name: str, make: Callable[[Path], None], option: str = "--data") -> Callable[[Path], Words]:
    def words(folder: Path) -> Words:
        make(folder / name)
        return [option, folder / name]

    return words


def vectors(change: Callable[[np.ndarray], np.ndarray], **more: np.ndarray) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        np.savez(path, inputs=change(good(path)["inputs"]), **more)

    return make


def put(where: tuple[int, ...], value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[where] = value
        return array

    return change


def write(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


OVERLAP = safetensors_with({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in ("a", "b")}, b"\0" * 8)
NPY_HUGE = b"\x93NUMPY\x01\x00v\x00" + (
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }".ljust(117) + b"\n"
)

# fault row, what the command gets instead of or besides the good words, words of the message, exit code
FAULTS: list[tuple[str, Callable[[Path], Words], str, int]] = [
    ("5 pickle that runs code", weights("w.pt", lambda p: torch.save({"a": Canary(p.parent / "ran")}, p)), "w.pt", 2),
    ("5 whole pickled model", weights("w.pt", lambda p: torch.save(mlp(), p)), "could not be read as weights", 2),
    ("5 pickle in npy", points("p.npy", lambda p: np.save(p, np.array([Canary(p.parent / "ran")]))), "p.npy", 2),
    ("5 endless header", weights("w.safetensors", write(struct.pack("<Q", 2**60) + b"{}")), "w.safetensors", 2),
    ("5 overlapping tensors", weights("w.safetensors", write(OVERLAP)), "w.safetensors", 2),
    ("6 1e12 elements in points", points("p.npy", write(NPY_HUGE)), "p.npy", 2),
    ("6 no weights at all", weights("w.pt", lambda p: torch.save([1, 2], p)), "no state_dict", 2),
    ("6 absent weights", lambda folder: ["--weights", folder / "absent.pt"], "absent.pt", 2),
    ("6 set of another shape", lambda folder: ["--data", "digits"], "cannot take this data", 2),
    ("6 points under other names", points("p.npz", lambda p: np.savez(p, other=np.zeros((9, 6)))), "other", 2),
    ("6 unknown kind of file", points("p.csv", write(b"1,2")), "p.csv", 2),
    ("13 NaN in the data", points("p.npz", vectors(put((70, 2), np.nan))), "first in input 70", 2),
    ("13 infinity in the data", points("p.npz", vectors(put((0, 0), np.inf))), "NaN or infinite", 2),
    ("15 output not finite", points("h.npz", vectors(put((slice(None), 0), np.nan)), "--holdout"), "not certified", 3),
    ("24 unsupported layer", lambda folder: ["--model", "cli_zoo:transposed"], "ConvTranspose2d", 2),
    ("24 nothing to prune", lambda folder: ["--model", "cli_zoo:no_weights"], "prunable", 2),
    ("32 no level passes", lambda folder: ["--epsilon", 0, "--method", "magnitude"], "no level below the dense", 3),
    ("33 set absent", lambda folder: ["--data", f"cifar10:{folder}"], "CIFAR-10", 2),
    ("33 set cut", lambda folder: ["--data", f"cifar10:{_cut(folder)}"], "bytes", 2),
    ("33 empty folder", lambda folder: ["--data", _empty(folder)], "no images", 2),
    ("model unknown", lambda folder: ["--model", "resnet21"], "did you mean", 2),
    ("model gives no network", lambda folder: ["--model", "cli_zoo:not_a_network"], "not an nn.Module", 2),
    ("model raises", lambda folder: ["--model", "cli_zoo:raises"], "my own bug", 2),
    ("model absent", lambda folder: ["--model", "no.such:thing"], "no.such", 2),
    ("pattern of no layer", lambda folder: ["--exclude", "conv*"], "matches no layer", 2),
    ("keep out of range", lambda folder: ["--keep", 1.5], "(0, 1]", 2),
    ("keep not a number", lambda folder: ["--keep", "nan"], "(0, 1]", 2),
    ("keep of none", lambda folder: ["--keep", 1e-9], "keeps none", 2),
    ("delta out of range", lambda folder: ["--delta", 0], "delta", 2),
    ("points out of range", lambda folder: ["--points", 0], "not a number of inputs", 2),
    ("noise cannot be certified", lambda folder: ["--holdout", "random:99x6"], "noise", 2),
    ("noise of no shape", lambda folder: ["--data", "random:6"], "shape", 2),
    ("noise too large", lambda folder: ["--data", "random:999999x999999"], "numbers", 2),
]  # fmt: skip


def _cut(folder: Path) -> Path:
    (folder / "cifar-10-batches-bin").mkdir()
    for name in FILES:
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(b"\0" * 3073)
    return folder


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def command(folder: Path, change: Words) -> Words:
    """A prune command that works, after a change: an option given again replaces the first."""
    np.savez(folder / "good.npz", **good(folder))  # type: ignore[arg-type]
    options: dict[str, object] = {"--model": "cli_zoo:mlp", "--data": folder / "good.npz", "--keep": 0.5}
    options |= {"--out": folder / "out"} | dict(zip(change[::2], change[1::2]))  # type: ignore[arg-type]
    if "--epsilon" in options:
        del options["--keep"]
    return ["prune", *(word for option in options.items() for word in option)]


@pytest.mark.parametrize(("row", "change", "words", "code"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_fault(row: str, change: Callable[[Path], Words], words: str, code: int, tmp_path: Path) -> None:
    typed = command(tmp_path, change(tmp_path))
    before = files_in(tmp_path)
    for as_json in ([], ["--json"]):
        done = run(*typed, *as_json)
        assert done.returncode == code, done.stderr
        what, _, _ = three_lines(done.stderr)
        assert words in what
        assert code == 3 or done.stdout == ""
        assert files_in(tmp_path) == before, "something was written"


def test_the_command_of_the_fault_tests_works_without_a_fault(tmp_path: Path) -> None:
    assert run(*command(tmp_path, [])).returncode == 0 and (tmp_path / "out" / "report.json").is_file()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--epsilon", 0.1], "exclude each other"),
        (["--pattern", "2:4"], "exclude each other"),
        (["--part", "x"], "--part does nothing without --holdout or --epsilon"),
        (["--share", 0.1], "--share does nothing without --holdout"),
    ],
)
def test_options_that_cannot_be_meant_together(change: Words, words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "good.npz", **good(tmp_path))  # type: ignore[arg-type]
    typed = ["prune", "--model", "cli_zoo:mlp", "--data", tmp_path / "good.npz", "--keep", 0.5]
    done = run(*typed, *change, "--out", tmp_path / "out")
    assert done.returncode == 2 and words in three_lines(done.stderr)[0]
    lost = run(*typed)
    assert lost.returncode == 2 and "--out" in three_lines(lost.stderr)[2]
    assert list(files_in(tmp_path)) == ["good.npz"]


def test_more_points_than_there_are_is_said(tmp_path: Path) -> None:
    done = run(*command(tmp_path, ["--points", 500]))
    assert done.returncode == 0 and "warning: --points 500: there are only 200" in done.stderr


def test_dead_rows_are_warned_of_by_name_and_the_rest_is_done(tmp_path: Path) -> None:
    done = run(*command(tmp_path, ["--keep", 0.05, "--method", "magnitude"]))  # fault 16
    assert done.returncode == 0 and "rows lost all" in done.stderr and "0.weight" in done.stderr
    assert json.loads((tmp_path / "out" / "report.json").read_text())["dead_rows"] > 0


@pytest.mark.parametrize("n", [1, 3])
def test_too_few_calibration_points_prune_and_promise_nothing(n: int, tmp_path: Path) -> None:
    done = run(*command(tmp_path, points("p.npz", vectors(lambda a: a[:n]))(tmp_path)))  # faults 18, 19
    assert done.returncode == 0
    assert f"too few calibration inputs (n={n}, needs" in done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert not report["guarantee"]["met"] and not report["bound"]["met"]


def test_all_zero_points_and_small_precision_are_no_faults(tmp_path: Path) -> None:
    done = run(*command(tmp_path, points("p.npz", vectors(np.zeros_like))(tmp_path)))  # fault 16
    assert done.returncode == 0 and "nan" not in done.stdout.lower()
    low = run(*command(tmp_path, ["--model", "cli_zoo:half", "--out", tmp_path / "half"]))  # fault 17
    assert low.returncode == 0 and "float32 read as bfloat16" in low.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    done = run(*command(tmp_path, ["--device", "cuda"]))  # fault 34
    assert done.returncode == 2 and "CUDA" in three_lines(done.stderr)[0] and not (tmp_path / "out").exists()
    assert run(*command(tmp_path, ["--device", "auto"])).returncode == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("network: !!python/object/apply:os.mkdir ['ran']\n", "tag"),
        ("base: digits-iterative\nnot_a_key: 1\n", "not_a_key"),
        ("base: digits-iterative\nseed: .nan\n", "seed"),
        ("base: digits-iterative\nnet: cli_zoo:mlp\n", "unknown network"),  # code comes from the command line only
    ],
)
def test_recipes_are_refused_by_key(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)  # fault 7
    done = run("run", tmp_path / "bad.yaml", "--out", tmp_path / "runs")
    assert done.returncode == 2 and words in done.stderr.lower()
    three_lines(done.stderr)
    assert list(files_in(tmp_path)) == ["bad.yaml"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "no-such-recipe"])
def test_a_recipe_that_is_none(name: str, tmp_path: Path) -> None:
    done = run("run", name, "--out", tmp_path)  # fault 8
    assert done.returncode == 2 and three_lines(done.stderr) and not files_in(tmp_path)


def test_a_set_that_cannot_be_fetched_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sipp_lab.data.cifar10.fetch_cifar10", functools.partial(fetch_cifar10, url="http://127.0.0.1:9/x")
    )
    done = run("data", "cifar10", tmp_path)  # fault 33
    assert done.returncode == 2 and "data_batch_1.bin" in done.stderr and not files_in(tmp_path)
