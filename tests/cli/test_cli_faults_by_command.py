"""The faults of the list through the commands that read a network twice, judge it, store it and show it."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import files_in, run, safetensors_with, three_lines
from safetensors.torch import save_file

import sipp

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files with which every command below works, by name."""
    base = tmp_path_factory.mktemp("good")
    rng = np.random.default_rng(0)
    for name, n in (("data", 90), ("new", 120)):
        inputs = rng.normal(size=(n, 6)).astype(np.float32)
        np.savez(base / f"{name}.npz", inputs=inputs, labels=rng.integers(0, 3, n))
    save_file(mlp().state_dict(), base / "dense.safetensors")
    pruned = sipp.prune(mlp().eval(), None, keep=0.5, method="magnitude", floor=0.1)
    save_file(pruned.model.state_dict(), base / "pruned.safetensors")
    sipp.save(pruned, base / "net.sipp.safetensors")
    return files_in(base)


def commands(base: Path) -> dict[str, list[object]]:
    """Every command, as it works; `.out` is where it may write."""
    net, data, new = ["--model", "cli_zoo:mlp"], ["--data", base / "data.npz"], ["--holdout", base / "new.npz"]
    both = ["--dense", base / "dense.safetensors", "--pruned", base / "pruned.safetensors"]
    weights, file, out = ["--weights", base / "dense.safetensors"], base / "net.sipp.safetensors", base / "out"
    return {
        "compare": ["compare", *net, *weights, *data, *new, "--keeps", 0.5, "--methods", "magnitude"],
        "eval": ["eval", *net, *both, *data],
        "accuracy": ["certify", *net, *both, *new, "--calibration", base / "data.npz", "--accuracy", "--out", out],
        "repair": ["prune", *net, *weights, *data, *new, "--keep", 0.5, "--method", "lamp", "--repair", "--out", out],
        "pattern": ["prune", *net, *weights, *data, *new, "--pattern", "2:4", "--out", out],
        "values": ["prune", *net, *weights, *data, *new, "--keep", 0.5, "--values", "int8", "--out", f"{out}.{ST}"],
        "inspect": ["inspect", file],
        "bench": ["bench", file, *net, *data, "--batch-size", 1, "--out", base / "bench.json"],
        "export": ["export", file, *net, *data, "--out", base / "out.onnx"],
    }  # fmt: skip


READS_WEIGHTS = ("compare", "repair", "pattern", "values")
READS_PAIR = ("eval", "accuracy")
READS_FILE = ("inspect", "bench", "export")
READS_DATA = ("compare", "eval", "repair", "pattern", "values", "bench", "export")
READS_NEW = ("compare", "accuracy", "repair", "pattern", "values")
PRUNES = ("repair", "pattern", "values")


def written(name: str, data: bytes) -> Change:
    return lambda base: (base / name).write_bytes(data)


def cut(name: str, share: float) -> Change:
    def change(base: Path) -> None:
        content = (base / name).read_bytes()
        (base / name).write_bytes(content[: int(share * len(content))])

    return change


def flipped(name: str, place: float) -> Change:
    def change(base: Path) -> None:
        content = bytearray((base / name).read_bytes())
        content[int(place * len(content))] ^= 0x10
        (base / name).write_bytes(content)

    return change


def state(name: str, **tensors: torch.Tensor | None) -> Change:
    """The weights of the network with some changed, or left out."""

    def change(base: Path) -> None:
        found = {**mlp().state_dict(), **{key.replace("_", "."): value for key, value in tensors.items()}}
        save_file({key: value for key, value in found.items() if value is not None}, base / name)

    return change


def arrays(name: str, **values: Callable[[np.ndarray], np.ndarray] | None) -> Change:
    """The points with some arrays changed, or left out."""

    def change(base: Path) -> None:
        with np.load(base / name) as archive:
            found = dict(archive)
        for key, act in values.items():
            if act is None:
                del found[key]
            else:
                found[key] = act(found[key])
        np.savez(base / name, **found)

    return change


def put(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.where(np.arange(array.size).reshape(array.shape) == 11, np.float32(value), array)


HUGE = safetensors_with({"0.weight": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}})
ST = "safetensors"
D, N, W, P, F = "data.npz", "new.npz", "dense.safetensors", "pruned.safetensors", "net.sipp.safetensors"
LOST = state(W, **{"0_weight": None})

# fault row, commands that meet it, what happens to the files, words of the message, exit code
FAULTS: list[tuple[str, tuple[str, ...], Change, str, int]] = [
    ("4 no bytes in weights", READS_WEIGHTS, written(W, b""), W, 2),
    ("4 weights cut", READS_PAIR, cut(P, 0.6), P, 2),
    ("4 no bytes in a file", READS_FILE, written(F, b""), F, 2),
    ("4 a file cut", READS_FILE, cut(F, 0.99), F, 2),
    ("4 a bit of the data", READS_FILE, flipped(F, 0.95), F, 2),
    ("4 a bit of the index", READS_FILE, flipped(F, 0.5), F, 2),
    ("5 a pickle as weights", READS_PAIR, lambda base: torch.save(mlp(), base / P), P, 2),
    ("5 a pickle as a file", READS_FILE, lambda base: torch.save(mlp(), base / F), F, 2),
    ("5 endless header", READS_FILE, written(F, struct.pack("<Q", 2**60) + b"{}"), F, 2),
    ("6 1e12 elements in weights", READS_WEIGHTS, written(W, HUGE), W, 2),
    ("6 1e12 elements in a file", READS_FILE, written(F, HUGE), F, 2),
    ("6 other names", READS_WEIGHTS, LOST, "0.weight", 2),
    ("6 other names in the dense network", READS_PAIR, LOST, "0.weight", 2),
    ("6 other shapes", READS_PAIR, state(P, **{"0_bias": torch.ones(2)}), "mismatch for 0.bias", 2),
    ("13 NaN in the data", ("compare", *PRUNES), arrays(D, inputs=put(np.nan)), "NaN", 2),
    ("14 NaN weight", READS_WEIGHTS, state(W, **{"2_weight": torch.full((3, 16), torch.nan)}), "2.weight", 2),
    ("18 no points", READS_DATA, arrays(D, inputs=lambda a: a[:0], labels=lambda a: a[:0]), "no inputs", 2),
    ("18 no holdout points", READS_NEW, arrays(N, inputs=lambda a: a[:0], labels=lambda a: a[:0]), "no inputs", 2),
    ("19 holdout too small", PRUNES, arrays(N, inputs=lambda a: a[:9], labels=lambda a: a[:9]), "59 holdout inputs", 3),
    ("20 overlap", READS_NEW, lambda base: (base / N).write_bytes((base / D).read_bytes()), "90 of 90 holdout", 2),
    ("31 points cut", READS_DATA, cut(D, 0.7), D, 2),
    ("35 another width", READS_DATA, arrays(D, inputs=lambda a: a[:, :4]), "cannot take this data", 2),
    ("35 another rank", READS_NEW, arrays(N, inputs=lambda a: a[:, :5, None]), "cannot take this data", 2),
    ("45 complex numbers", READS_DATA, arrays(D, inputs=lambda a: a.astype(np.complex64)), "", 2),
    ("45 whole numbers", READS_DATA, arrays(D, inputs=lambda a: a.astype(np.int64)), "", 2),
    ("45 text", READS_DATA, arrays(D, inputs=lambda a: a.astype(str)), "not numbers", 2),
    ("6 unequal lengths", READS_DATA, arrays(D, labels=lambda a: a[:4]), "'labels': 4", 2),
    ("6 labels alone", READS_DATA, arrays(D, inputs=None), "no inputs", 2),
]  # fmt: skip
CASES = [(row, command, *rest) for row, names, *rest in FAULTS for command in names]


def put_down(files: dict[str, bytes], base: Path) -> None:
    for name, content in files.items():
        (base / name).write_bytes(content)


@pytest.mark.parametrize("command", [*commands(Path())])
def test_the_commands_work_without_a_fault(command: str, good: dict[str, bytes], tmp_path: Path) -> None:
    put_down(good, tmp_path)
    done = run(*commands(tmp_path)[command])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("row", "command", "change", "words", "code"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_fault(
    row: str, command: str, change: Change, words: str, code: int, good: dict[str, bytes], tmp_path: Path
) -> None:
    put_down(good, tmp_path)
    change(tmp_path)
    before = files_in(tmp_path)
    done = run(*commands(tmp_path)[command])
    assert done.returncode == code, (done.stderr, done.stdout)
    assert words in " ".join(three_lines(done.stderr)), done.stderr
    assert files_in(tmp_path) == before, "something was written"


def test_an_evaluation_counts_what_is_not_finite(good: dict[str, bytes], tmp_path: Path) -> None:
    put_down(good, tmp_path)
    arrays(D, inputs=put(np.nan))(tmp_path)  # faults 13, 15
    done = run(*commands(tmp_path)["eval"])
    assert done.returncode == 0 and "not finite on 1 of " in done.stdout


def test_an_accuracy_that_rests_on_too_few_points_or_none_that_are_finite_is_no_promise(
    good: dict[str, bytes], tmp_path: Path
) -> None:
    put_down(good, tmp_path)
    arrays(N, inputs=lambda a: a[:3], labels=lambda a: a[:3])(tmp_path)  # fault 19
    few = json.loads(run(*commands(tmp_path)["accuracy"], "--json").stdout)
    assert few["n"] == 3 and few["drop_upper"] > 0.5
    put_down(good, tmp_path)
    state(P, **{"2_bias": torch.full((3,), torch.nan)})(tmp_path)  # fault 15
    (tmp_path / "out").unlink()
    lost = json.loads(run(*commands(tmp_path)["accuracy"], "--json").stdout)
    assert lost["drop_upper"] > 0.2  # the network is right on about a third of the points


# words, what the message says, where it says it
WRONG: list[tuple[str, str, str]] = [
    ("prune --model cli_zoo:mlp --method magnitude --keep 0.5 --repair --out out", "repair", "sipp prune|--model"),
    ("prune --model cli_zoo:mlp --data random:8x6 --pattern 0:4 --out out", "is not a pattern", "--pattern 0:4"),
    ("prune --model cli_zoo:mlp --data random:8x6 --pattern 2:four --out out", "is not a pattern", "--pattern 2:four"),
    ("prune --model cli_zoo:mlp --data random:8x6 --pattern 2:4 --method sipp-rand --out out", "draws", "--model"),
    ("prune --model cli_zoo:mlp --data random:8x6 --keep 0.5 --values fp8 --out o.safetensors", "fp8", "sipp prune"),
    ("compare --model cli_zoo:mlp --data random:8x6 --keeps 0.5,x", "is not a list of numbers", "--keeps"),
    ("compare --model cli_zoo:mlp --data random:8x6 --methods magnitude,magic", "magic", "--methods"),
    ("compare --model cli_zoo:mlp --data random:8x6 --methods snip --keeps 0.5", "labels", "--model"),
    ("compare --model cli_zoo:mlp --data random:1x6 --keeps 0.5", "too few inputs", "--model"),
    ("compare --model cli_zoo:mlp --data random:8x6 --holdout random:8x6", "noise", "--holdout"),
    ("compare --model cli_zoo:transposed --data random:8x6", "ConvTranspose2d", "--model"),
    ("eval --model cli_zoo:mlp --dense absent --pruned absent --data random:8x6", "absent", "--dense"),
    ("inspect absent", "is not a file", "FILE absent"),
    ("inspect .", "holds no pruned network", "FILE ."),
    ("bench absent", "is not a file", "FILE absent"),
    ("bench . --model cli_zoo:mlp", "report.json", "FILE ."),
    ("export absent --out x", "is not a file", "FILE absent"),
    ("export . --out x --model cli_zoo:mlp", "report.json", "FILE ."),
    ("study no-such-study", "no-such-study", "sipp study"),
    ("study ../../etc/passwd", "passwd", "sipp study"),
    ("study paper-fully-connected --set nothing=1 --dry-run", "nothing", "sipp study"),
    ("study paper-fully-connected --set prune.levels=-1 --dry-run", "levels", "sipp study"),
    ("study paper-fully-connected --set train.epochs=1e-3 --dry-run", "epochs", "sipp study"),
    ("study paper-fully-connected --set name=../x --dry-run", "name", "sipp study"),
    ("run no-such-recipe --show", "no-such-recipe", "sipp run"),
    ("run ../../etc/passwd --show", "passwd", "sipp run"),
    ("run tagged.yaml --show", "tag", "sipp run"),
    ("run key.yaml --show", "not_a_key", "sipp run"),
    ("run text.yaml --show", "epochs", "sipp run"),
]  # fmt: skip
RECIPES = {
    "tagged": "net: !!python/object/apply:os.mkdir ['ran']\n",
    "bomb": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "key": "base: digits-iterative\nnot_a_key: 1\n",
    "text": "base: digits-iterative\ntrain:\n  epochs: '3'\n",
}


@pytest.mark.parametrize(("typed", "words", "where"), WRONG, ids=[one[0] for one in WRONG])
def test_wrong_words(typed: str, words: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in RECIPES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    before = files_in(tmp_path)
    done = run(*typed.split())
    assert done.returncode == 2 and done.stdout == "", (done.stdout, done.stderr)
    what, place, _ = three_lines(done.stderr)
    assert words in what and place.startswith(tuple(where.split("|"))), done.stderr
    assert files_in(tmp_path) == before
