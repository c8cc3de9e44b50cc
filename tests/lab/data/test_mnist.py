"""MNIST's files: what is written is read, plain and packed; what is cut, wrong or endless is refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from sipp.errors import DataError
from sipp_lab.data import mnist
from sipp_lab.data.mnist import load_mnist


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "PARTS", {"train": 12, "t10k": 5})


def write(root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Files in the official layout, the test part packed; all images and labels, training part first."""
    generator = np.random.default_rng(0)
    folder = root / "mnist"
    folder.mkdir()
    images = generator.integers(0, 256, (17, 28, 28), np.uint8)
    labels = generator.integers(0, 10, 17).astype(np.uint8)
    for part, chosen in (("train", slice(0, 12)), ("t10k", slice(12, 17))):
        for ending, magic, values in (("images-idx3", 2051, images[chosen]), ("labels-idx1", 2049, labels[chosen])):
            header = np.array([magic, *values.shape], ">i4").tobytes()
            path = folder / f"{part}-{ending}-ubyte"
            if part == "train":
                path.write_bytes(header + values.tobytes())
            else:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(header + values.tobytes()))
    return images, labels


def test_what_is_written_is_read(tmp_path: Path) -> None:
    images, labels = write(tmp_path)
    data = load_mnist(tmp_path)
    assert (data.n_train, data.n_test, data.images.shape) == (12, 5, (17, 1, 28, 28))
    assert torch.equal((data.images[:, 0] * 255).round(), torch.from_numpy(images).float())
    assert data.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte.gz"])
def test_what_is_wrong_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    path = tmp_path / "mnist" / name
    good = path.read_bytes()
    plain = gzip.decompress(good) if name.endswith("gz") else good
    pack = gzip.compress if name.endswith("gz") else bytes
    magic = bytes([plain[0], plain[1], plain[2], plain[3] ^ 2])
    for bad in (plain[:-1], plain + b"\0", magic + plain[4:], b"", plain + bytes(1 << 22)):
        path.write_bytes(pack(bad))
        with pytest.raises(DataError, match="MNIST"):
            load_mnist(tmp_path)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError):
        load_mnist(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="four files"):
        load_mnist(tmp_path)


