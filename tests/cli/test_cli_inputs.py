"""--data: arrays and tensors in files, pictures and how their bytes become numbers; all through `sipp eval`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_zoo import mlp, small_conv
from commandline import refused, run, three_lines, told
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import sipp
from sipp.cli.inputs import Reader
from sipp.cli.options import Reading
from sipp.cli.sources import source_of
from sipp.inputs import data_of
from sipp_lab.data.images import normalise
from sipp_lab.nets import build

TWO = ["--model", "resnet20", "--size", 16, "--dense", "two.pt", "--pruned", "two.pt"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes of images, pictures in folders of every form, and weights."""
    base = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    np.save(base / "bytes.npy", rng.integers(0, 256, size=(60, 3, 8, 8), dtype=np.uint8))
    np.save(base / "floats.npy", rng.random(size=(9, 3, 8, 8), dtype=np.float32))
    for name, parts, n in (
        ("two", ("cats", "dogs"), 8), ("flat", ("",), 6), ("three", ("a", "b", "c"), 2), ("parts/train", ("a", "b"), 2),
        ("parts/val", ("a", "b"), 3),
    ):  # fmt: skip
        for k, part in enumerate(parts):
            (base / name / part).mkdir(parents=True, exist_ok=True)
            for i in range(n):
                pixels = rng.integers(50 * k, 50 * k + 100, size=(16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(base / name / part / f"{i}.png")
    save_file(small_conv().state_dict(), base / "conv.safetensors")
    pruned = sipp.prune(small_conv(), None, keep=0.5, method="magnitude", floor=0.1).model
    save_file(pruned.state_dict(), base / "pruned.safetensors")
    torch.manual_seed(0)
    torch.save(build("resnet20", n_classes=2).state_dict(), base / "two.pt")
    return base


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def evaluated(model: str, *more: object) -> Any:
    return told("eval", "--model", model, *more)


def test_arrays_and_tensors_under_the_usual_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    y = mlp()(x).argmax(1)
    torch.save(mlp().state_dict(), "net.pt")
    np.savez("both.npz", inputs=x.numpy(), labels=y.numpy().astype(np.int32))
    np.savez("xy.npz", x=x.numpy().astype(">f4"), y=y.numpy())  # of another byte order
    np.save("x.npy", x.numpy())
    torch.save(x, "x.pt")
    torch.save((x, y), "pair.pt")
    torch.save({"inputs": x, "labels": y}, "dict.pt")
    both = ["--dense", "net.pt", "--pruned", "net.pt", "--data"]
    found = {path.name: evaluated("cli_zoo:mlp", *both, path) for path in tmp_path.iterdir() if path.name != "net.pt"}
    assert len(found) == 6 and len({one["data_hash"] for one in found.values()}) == 1
    labelled = {name for name, one in found.items() if one["accuracies"] is not None}
    assert labelled == {"both.npz", "xy.npz", "pair.pt", "dict.pt"}
    assert found["xy.npz"]["accuracies"][0] == 1.0
    wrong: dict[str, tuple[Any, str]] = {
        "list.pt": ([1, "two", 3], "it contains a list"),
        "model.pt": (nn.Linear(2, 2), "contains a pickle"),
    }
    for name, (value, what) in wrong.items():
        torch.save(value, name)
        refused(run("eval", "--model", "cli_zoo:mlp", *both, name), "--data", what)


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"other": np.zeros((9, 6))}, "other"),
        ({"labels": np.zeros(9)}, "labels but no inputs"),
        ({"inputs": np.zeros((9, 6)), "labels": np.zeros(8)}, "equally many inputs"),
        ({"inputs": np.zeros((0, 6))}, "contains no inputs"),
        ({"inputs": np.array(["a", "b"])}, "could not be read"),
        ({"inputs": np.zeros((9, 5))}, "cannot take this data"),
    ],
)
def test_arrays_that_cannot_be_inputs(arrays: dict[str, np.ndarray], what: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", **arrays)  # type: ignore[arg-type]
    done = run("prune", "--model", "cli_zoo:mlp", "--data", tmp_path / "p.npz", "--keep", 0.5, "--dry-run")
    assert done.returncode == 2 and what in done.stderr and three_lines(done.stderr)[1].startswith("--data")


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("none", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        ("0.1,0.2,0.3/1,2,3", (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)),
    ],
)
def test_bytes_are_normalised_as_asked(text: str, mean: tuple[float, ...], std: tuple[float, ...], here: Path) -> None:
    x = normalise(torch.from_numpy(np.load("bytes.npy")), mean=mean, std=std)
    dense, pruned = (small_conv().eval() for _ in range(2))
    pruned.load_state_dict(sipp.prune(small_conv(), None, keep=0.5, method="magnitude", floor=0.1).model.state_dict())
    expected = sipp.evaluate(dense, pruned, x, progress=False).error_mean
    words = [
        "--dense",
        "conv.safetensors",
        "--pruned",
        "pruned.safetensors",
        "--data",
        "bytes.npy",
        "--normalise",
        text,
    ]
    assert evaluated("cli_zoo:small_conv", *words)["error_mean"] == pytest.approx(expected, rel=1e-5)
    said = run("eval", "--model", "cli_zoo:small_conv", *words).stdout
    assert said.count("bytes x as (x / 255 - mean) / std") == 1 and f"std {std[0]:g}" in said


@pytest.mark.parametrize(
    ("text", "data", "what"),
    [
        ("imagnet", "bytes.npy", "not a normalisation"),
        ("0.5/0", "bytes.npy", "positive deviations"),
        ("0.5,0.5/0.5", "bytes.npy", "as many"),
        ("0.5,0.5/0.5,0.5", "bytes.npy", "2 means for the 3 channels"),
        ("0.5,0.5/0.5,0.5", "flat", "2 means for the 3 channels"),
        ("none", "floats.npy", "these are not images"),
        ("none", "digits", "not images as bytes"),
    ],
)
def test_impossible_normalisations_are_refused(text: str, data: str, what: str, here: Path) -> None:
    done = run("compare", "--model", "cli_zoo:small_conv", "--data", data, f"--normalise={text}")
    refused(done, "--normalise", what)


def test_class_folders_give_labels_and_accuracy(here: Path) -> None:
    two = run("eval", *TWO, "--data", "two")
    assert "accuracy:" in two.stdout and "not measured" not in two.stdout and "2 classes" in two.stdout
    flat = run("eval", *TWO, "--data", "flat")
    assert "not measured:" in flat.stdout and "one folder for each class" in " ".join(flat.stdout.split())
    three = run("eval", *TWO, "--data", "three")  # which label is which output, nobody knows
    assert "not measured: the folder has 3 classes, the network 2 outputs" in three.stdout
    assert "labels are ignored" in three.stderr


def test_sizes_of_pictures(here: Path) -> None:
    def words(*more: object) -> str:
        cheap = ["--keep", 0.5, "--method", "magnitude", "--no-statements", "--dry-run", "--points", 1]
        found: str = told("prune", *more, "--data", "two", *cheap)["data"]["what"]
        return found

    assert "32 x 32" in words("--model", "resnet20")  # a built-in network says what it takes
    assert "224 x 224" in words("--model", "cli_zoo:small_conv")
    assert "24 x 24" in words("--model", "cli_zoo:small_conv", "--size", 24)
    refused(run("compare", "--model", "resnet20", "--data", "digits", "--size", 16), "--size 16")


def test_a_folder_with_parts_is_calibrated_on_train_and_held_out_on_val(here: Path) -> None:
    net = ["--model", "resnet20", "--weights", "two.pt", "--size", 16, "--data", "parts", "--method", "magnitude"]
    record = told("prune", *net, "--holdout", "parts", "--epsilon", 0.5, "--share", 0.9, "--dry-run")
    assert record["data"]["what"].startswith("4 training images of parts")
    assert record["holdout"]["what"].startswith("6 validation images of parts")


@pytest.mark.parametrize("points", [torch.zeros(3000, 8), torch.zeros(200, 3, 32, 32), torch.zeros(40, 7).long()])
def test_a_batch_holds_as_many_points_as_in_python(points: torch.Tensor) -> None:
    source = source_of("file", {"inputs": points}, "inputs")
    drawn = Reader(nn.Flatten(), "net", Reading()).draw(source, None)
    assert [len(batch) for batch in drawn.batches] == [batch.n_points for batch in data_of(points).batches()]


def test_points_are_drawn_by_the_seed() -> None:
    source = source_of("file", {"inputs": torch.arange(100.0)[:, None]}, "inputs")
    first, again, other = (
        Reader(nn.Flatten(), "net", Reading(), seed).draw(source, 10).batches[0] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
