"""Images on the command line: how bytes become numbers is told once, recorded, settable, and refused where wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import small_conv
from commandline import run, three_lines
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import sipp
from sipp.cli.data_option import INPUTS, Reader
from sipp.cli.options import InputOptions, ReadingOptions, StoredOptions
from sipp.cli.stored_option import stored_network
from sipp_lab.data.transforms import normalise
from sipp_lab.nets import NETS, build, n_classes_in

NET = ["--model", "cli_zoo:small_conv"]
HALF = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes of images as files, floats, a folder of pictures, and weights."""
    base = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name, n in (("data", 40), ("new", 80)):
        np.save(base / f"{name}.npy", rng.integers(0, 256, size=(n, 3, 8, 8), dtype=np.uint8))
    np.save(base / "floats.npy", rng.random(size=(9, 3, 8, 8), dtype=np.float32))
    np.savez(base / "named.npz", left=rng.random(size=(9, 6), dtype=np.float32))
    (base / "pictures").mkdir()
    for i in range(3):
        pixels = rng.integers(0, 256, size=(20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(base / "pictures" / f"{i}.png")
    save_file(small_conv().state_dict(), base / "w.safetensors")
    sipp.save(sipp.prune(small_conv(), None, keep=0.5, method="magnitude", floor=0.1), base / "net.sipp.safetensors")
    return base


def taken(spec: Path, text: str | None) -> torch.Tensor:
    source = Reader(nn.Identity(), "", InputOptions(normalise=text)).open(str(spec))
    return source.take(torch.arange(source.n_points))[INPUTS]


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("none", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
        ("0.5/0.25", HALF, (0.25, 0.25, 0.25)),
        ("0.1,0.2,0.3/1,2,3", (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)),
    ],
)
def test_images_are_normalised_as_asked(
    text: str, mean: tuple[float, ...], std: tuple[float, ...], folder: Path
) -> None:
    bytes_ = torch.from_numpy(np.load(folder / "data.npy"))
    assert torch.equal(taken(folder / "data.npy", text), normalise(bytes_, mean=mean, std=std))
    raw = taken(folder / "pictures", "none")
    expected = (raw - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(taken(folder / "pictures", text), expected, atol=1e-6)


def test_without_the_option_pictures_are_normalised_and_numbers_are_not(folder: Path) -> None:
    assert torch.equal(taken(folder / "pictures", None), taken(folder / "pictures", "imagenet"))
    assert taken(folder / "data.npy", None).dtype == torch.uint8


def commands(folder: Path, out: Path) -> dict[str, list[object]]:
    """Every command that takes images, at work on them."""
    data, both = (
        ["--data", folder / "data.npy"],
        ["--dense", folder / "w.safetensors", "--pruned", folder / "w.safetensors"],
    )
    file = folder / "net.sipp.safetensors"
    return {
        "prune": [*NET, *data, "--holdout", folder / "new.npy", "--keep", 0.5, "--out", out / "net"],
        "compare": [*NET, *data, "--holdout", folder / "new.npy", "--keeps", 0.5, "--methods", "magnitude"],
        "certify": [*NET, *both, "--holdout", folder / "new.npy", "--calibration", folder / "data.npy"],
        "eval": [*NET, *both, *data],
        "bench": [file, *NET, *data, "--batch-size", 1],
        "export": [file, *NET, *data, "--out", out / "net.onnx"],
    }  # fmt: skip


@pytest.mark.parametrize("command", ["prune", "compare", "certify", "eval", "bench", "export"])
def test_what_was_applied_is_told_once_and_a_wrong_value_is_refused(command: str, folder: Path, tmp_path: Path) -> None:
    words = commands(folder, tmp_path)[command]
    wrong = run(command, *words, "--normalise", "imagnet")
    what, where, fix = three_lines(wrong.stderr)
    assert wrong.returncode == 2 and "imagnet" in what and where == "--normalise imagnet" and "MEAN/STD" in fix
    done = run(command, *words, "--normalise", "0.5/0.25")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean 0.5, std 0.25") == (0 if command == "export" else 1)  # its output is no number


def test_the_record_holds_the_normalisation(folder: Path, tmp_path: Path) -> None:
    words = commands(folder, tmp_path)["prune"]
    assert run("prune", *words, "--normalise", "0.5,0.5,0.5/0.25,0.25,0.25").returncode == 0
    record = json.loads((tmp_path / "net" / "report.json").read_text())
    for part in ("data", "holdout"):
        assert record[part]["normalisation"] == {"mean": [0.5] * 3, "std": [0.25] * 3}
    found = json.loads(run("compare", *NET, "--data", folder / "floats.npy", "--methods", "magnitude", "--json").stdout)
    assert found["data"]["normalisation"] is None


@pytest.mark.parametrize(
    ("text", "data", "what"),
    [
        ("0.5/0", "data.npy", "positive deviations"),
        ("0.5/nan", "data.npy", "positive deviations"),
        ("0.5,0.5/0.5", "data.npy", "as many"),
        ("0.5", "data.npy", "not a normalisation"),
        ("", "data.npy", "not a normalisation"),
        ("1/2/3", "data.npy", "not a normalisation"),
        ("0.5,0.5/0.5,0.5", "data.npy", "2 means for the 3 channels"),
        ("0.5,0.5/0.5,0.5", "pictures", "2 means for the 3 channels"),
        ("none", "floats.npy", "torch.float32 (9, 3, 8, 8): these are not images"),
        ("none", "named.npz", "torch.float32 (9, 6)"),
        ("none", "digits", "not images as bytes"),
        ("none", "random:4x3x8x8", "holds no images"),
    ],
)
def test_impossible_normalisations_are_refused(text: str, data: str, what: str, folder: Path) -> None:
    spec = folder / data if (folder / data).exists() else data
    done = run("compare", *NET, "--data", spec, f"--normalise={text}")
    assert done.returncode == 2 and done.stdout == ""
    found, where, _ = three_lines(done.stderr)
    assert what in found and where.startswith("--normalise")


# --- folders of classes, sizes, networks of other numbers of classes -------------------------------------------------


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 x 16 pictures in two class folders, flat, and in three; a CifarResNet for two classes, as a .pt."""
    base = tmp_path_factory.mktemp("pets")
    rng = np.random.default_rng(1)
    for name, parts, n in (("two", ("cats", "dogs"), 8), ("flat", ("",), 6), ("three", ("a", "b", "c"), 2)):
        for k, part in enumerate(parts):
            (base / name / part).mkdir(parents=True, exist_ok=True)
            for i in range(n):
                pixels = rng.integers(50 * k, 50 * k + 100, size=(16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(base / name / part / f"{i}.png")
    torch.manual_seed(0)
    torch.save(build("resnet20", n_classes=2).state_dict(), base / "w.pt")
    return base


TWO = ["--model", "resnet20", "--size", 16]


def test_class_folders_give_labels_and_accuracy(pets: Path) -> None:
    source = Reader(nn.Identity(), "", InputOptions(size=16)).open(str(pets / "two"))
    found = source.take(torch.arange(source.n_points))
    assert source.classes == ("cats", "dogs") and found["labels"].tolist() == [0] * 8 + [1] * 8
    both = ["--dense", pets / "w.pt", "--pruned", pets / "w.pt"]
    told = run("eval", *TWO, *both, "--data", pets / "two")
    assert "accuracy:" in told.stdout and "not measured" not in told.stdout and "2 classes" in told.stdout
    flat = run("eval", *TWO, *both, "--data", pets / "flat")
    assert "not measured:" in flat.stdout and "one folder for each class" in " ".join(flat.stdout.split()), flat.stdout
    three = run("eval", *TWO, *both, "--data", pets / "three")  # which label is which output, nobody knows
    assert "not measured: the folder has 3 classes, the network 2 outputs" in three.stdout
    assert "labels are ignored" in three.stderr


def test_an_image_of_the_size_asked_for_stays_as_it_is(pets: Path) -> None:
    def pixels(model: str = "", size: int | None = None) -> torch.Tensor:
        source = Reader(nn.Identity(), model, InputOptions(normalise="none", size=size)).open(str(pets / "two"))
        return source.take(torch.arange(1))[INPUTS]

    picture = torch.from_numpy(np.array(Image.open(pets / "two" / "cats" / "0.png"))).permute(2, 0, 1)
    assert torch.equal((255 * pixels(size=16)[0]).round().byte(), picture)
    shapes = [tuple(found.shape[2:]) for found in (pixels(), pixels(size=24), pixels("resnet20"))]
    assert shapes == [(224, 224), (24, 24), (32, 32)]  # a built-in network says what it takes
    wrong = run("compare", *TWO, "--data", "random:4x3x8x8")
    assert wrong.returncode == 2 and three_lines(wrong.stderr)[1] == "--size 16"


def test_as_many_classes_as_the_weights_have(pets: Path, tmp_path: Path) -> None:
    """From weights of two classes to a pruned network, as a folder and as a small file: no code."""
    known = {name: n_classes_in(name, {k: v.shape for k, v in meta(name, 7).items()}) for name in NETS}
    assert set(known.values()) == {7}
    for out in (tmp_path / "net", tmp_path / "net.safetensors"):
        words = [*TWO, "--weights", pets / "w.pt", "--method", "magnitude", "--keep", 0.5, "--out", out]
        assert run("prune", *words).returncode == 0
        asked = None if out.is_dir() else "resnet20"  # a folder says which network it is
        stored = stored_network(StoredOptions(file=out, model=asked, reading=ReadingOptions()))
        assert stored.name == "resnet20" and stored.model(torch.rand(1, 3, 16, 16)).shape == (1, 2)


def meta(name: str, n_classes: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return dict(build(name, n_classes=n_classes).state_dict())


def test_a_folder_with_parts_is_calibrated_on_train_and_held_out_on_val(tmp_path: Path) -> None:
    for part, n, grey in (("train", 2, 10), ("val", 3, 200)):
        (tmp_path / part / "a").mkdir(parents=True)
        for i in range(n):
            Image.new("RGB", (8, 8), (grey, grey, grey)).save(tmp_path / part / "a" / f"{i}.png")
    reader = Reader(nn.Flatten(), "", InputOptions(normalise="none", size=8))
    for role, n, grey in (("calibration", 2, 10), ("holdout", 3, 200)):
        source = reader.open(str(tmp_path), role)  # type: ignore[arg-type]
        images = source.take(torch.arange(source.n_points))[INPUTS]
        assert source.has_holdout and len(images) == n and float(images.mean()) == pytest.approx(grey / 255)
