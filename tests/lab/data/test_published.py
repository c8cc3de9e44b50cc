"""Published sets: whole files are read as images and labels, and fetched whole or not at all."""

import hashlib
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sipp.errors import DataError
from sipp_lab.data import sets
from sipp_lab.data.published import Published
from sipp_lab.data.sets import RECORD_BYTES, cifar10_of

N = {"train": 5, "t10k": 2}


def made(folder: Path) -> tuple[Published, dict[str, np.ndarray]]:
    """Small files in the format of MNIST, and a set that knows their sizes and hashes; {part: its images}."""
    rng, images, files = np.random.default_rng(0), {}, {}
    folder.mkdir(parents=True)
    for part, n in N.items():
        images[part] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        contents = {"images-idx3": b"\7" * 16 + images[part].tobytes(), "labels-idx1": b"\7" * 8 + bytes(range(n))}
        for kind, content in contents.items():
            name = f"{part}-{kind}-ubyte"
            (folder / name).write_bytes(content)
            files[name] = (len(content), hashlib.sha256(content).hexdigest())
    order = {name: files[name] for name in sets.MNIST.files}
    return replace(sets.MNIST, files=order), images


def test_mnist_from_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published, images = made(tmp_path / "mnist")
    monkeypatch.setattr(sets, "MNIST", published)
    for root in (tmp_path, tmp_path / "mnist"):  # the folder around it, or the folder itself
        data = sets.load_mnist(root)
        assert (data.n_train, data.n_test, data.n_classes) == (5, 2, 10)
        assert data.labels.tolist() == [0, 1, 2, 3, 4, 0, 1] and data.images.dtype == torch.float32
        expected = np.concatenate([images["train"], images["t10k"]])[:, None] / 255
        assert np.allclose(data.images.numpy(), expected, rtol=1e-6) and data.images.shape == (7, 1, 28, 28)


def test_a_changed_byte_is_named(tmp_path: Path) -> None:
    published, _ = made(tmp_path / "mnist")
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"t10k-images.*not the file of MNIST as published .*fetch it again"):
        published.read(tmp_path)
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match="it is cut"):
        published.read(tmp_path)


def test_a_set_is_fetched_whole_or_not_at_all(tmp_path: Path) -> None:
    published, _ = made(tmp_path / "there" / "mnist")
    archive, n_bytes = tmp_path / "set.tar.gz", list[int]()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "there" / "mnist", "package/data")
    published = replace(published, url=archive.as_uri())
    folder = published.fetch(tmp_path / "here", progress=n_bytes.append)
    assert sum(n_bytes) == published.n_bytes and [*published.read(tmp_path / "here")] == [*published.files]
    assert published.fetch(tmp_path / "here", progress=None) == folder
    archive.write_bytes(archive.read_bytes()[:-50])
    with pytest.raises(DataError, match="MNIST could not be fetched"):
        published.fetch(tmp_path / "cut")
    assert not list((tmp_path / "cut").iterdir())


def test_cifar10_records_are_a_label_and_three_planes() -> None:
    raw = np.random.default_rng(0).integers(0, 256, (12, RECORD_BYTES), dtype=np.uint8)
    raw[:, 0] %= 10
    data = cifar10_of(raw.reshape(-1))
    assert (data.n_train, data.n_test) == (10, 2) and data.labels.tolist() == raw[:, 0].tolist()
    assert data.images.dtype == torch.uint8 and data.images[3, 2, 31, 30] == raw[3, 1 + 2 * 1024 + 31 * 32 + 30]
