"""CIFAR-10 files, whole and broken, and the batch operations, against an obvious version of themselves."""

import hashlib
import os
import pickle
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from sipp.errors import DataError, OptionError
from sipp.experiments.data import cifar10 as module
from sipp.experiments.data import draw_shifts, join_shifts, load_cifar10, normalise, shift
from sipp.experiments.data.cifar10 import BIN_FOLDER, FILES, PY_FOLDER

N = 7  # records per file


def fake_records() -> dict[str, np.ndarray]:
    """Six batches of N records: label, then 3072 bytes."""
    rng = np.random.default_rng(0)
    return {
        name: np.concatenate([rng.integers(0, 10, (N, 1), np.uint8), rng.integers(0, 256, (N, 3072), np.uint8)], axis=1)
        for name in FILES
    }


def write_bin(folder: Path) -> Path:
    (folder / BIN_FOLDER).mkdir(parents=True)
    for name, records in fake_records().items():
        (folder / BIN_FOLDER / f"{name}.bin").write_bytes(records.tobytes())
    return folder / BIN_FOLDER


def write_py(folder: Path, protocol: int = 2) -> Path:
    (folder / PY_FOLDER).mkdir(parents=True)
    for name, records in fake_records().items():
        batch = {"data": records[:, 1:].copy(), "labels": records[:, 0].tolist(), "filenames": ["a.png"] * N}
        (folder / PY_FOLDER / name).write_bytes(pickle.dumps(batch, protocol=protocol))
    return folder / PY_FOLDER


def load(folder: Path):
    return load_cifar10(folder, n_per_file=N, checksum="skip")


def test_bin_layout(tmp_path: Path) -> None:
    inner = write_bin(tmp_path)
    data = load(tmp_path)
    assert data.images.shape == (6 * N, 3, 32, 32) and data.images.dtype == torch.uint8
    assert data.n_train == 5 * N and data.n_test == N
    records = fake_records()
    for i in (0, N, 6 * N - 1):  # first, first of the second file, last
        record = records[FILES[i // N]][i % N]
        assert data.labels[i] == record[0]
        for c, y, x in ((0, 0, 0), (1, 5, 7), (2, 31, 30)):
            assert data.images[i, c, y, x] == record[1 + 1024 * c + 32 * y + x]
    assert torch.equal(load(inner).images, data.images)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_py_layout_gives_the_same_set(tmp_path: Path, protocol: int) -> None:
    write_bin(tmp_path / "b")
    write_py(tmp_path / "p", protocol)
    from_bin, from_py = load(tmp_path / "b"), load(tmp_path / "p")
    assert torch.equal(from_bin.images, from_py.images) and torch.equal(from_bin.labels, from_py.labels)


@pytest.mark.parametrize("n_bytes", [0, 100, 3073 * (N - 1), 3073 * N + 1])
def test_a_cut_file_is_refused_even_at_a_record_boundary(tmp_path: Path, n_bytes: int) -> None:
    path = write_bin(tmp_path) / "data_batch_3.bin"
    path.write_bytes((path.read_bytes() * 2)[:n_bytes])
    with pytest.raises(DataError, match=rf"data_batch_3.bin: {n_bytes} bytes instead of {3073 * N}"):
        load(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no CIFAR-10 in .*put the official"):
        load(tmp_path)
    (write_bin(tmp_path) / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch.bin is missing"):
        load(tmp_path)


def test_wrong_labels(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "b") / "data_batch_2.bin"
    raw = bytearray(path.read_bytes())
    raw[3073 * 4] = 10
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"data_batch_2.bin: record 4 has label 10"):
        load(tmp_path / "b")
    for label, message in (
        (-1, "not a batch"),
        (10, "record 2 has label 10"),
        (266, "not a batch"),
        ("3", "not a batch"),
        (1.5, "not a batch"),
    ):
        inner = write_py(tmp_path / f"p{label}")
        labels: list = [1] * N
        labels[2] = label
        (inner / "data_batch_1").write_bytes(pickle.dumps({"data": np.zeros((N, 3072), np.uint8), "labels": labels}, 2))
        with pytest.raises(DataError, match=message):
            load(tmp_path / f"p{label}")


def test_wrong_py_content(tmp_path: Path) -> None:
    path = write_py(tmp_path) / "data_batch_1"
    for batch, message in (
        ({"labels": [0] * N}, "data"),
        ({"data": np.zeros((N, 3071), np.uint8), "labels": [0] * N}, "reshape"),
        ({"data": np.zeros((N, 3072), np.int16), "labels": [0] * N}, "element type 'i2'"),
        ({"data": b"x", "labels": [0] * N}, "pixels"),
        ({"data": np.zeros((N, 3072), np.uint8)}, "labels"),
        ({"data": np.zeros((N, 3072), np.uint8), "labels": [0] * (N - 1)}, "reshape"),
        ([1, 2], "TypeError"),
    ):
        path.write_bytes(pickle.dumps(batch, 2))
        with pytest.raises(DataError, match=f"not a batch of {N} images and labels .*{message}.*nothing in it was run"):
            load(tmp_path)


class Canary:
    """Creates the folder `path` when it is unpickled the ordinary way."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_cannot_run_anything(tmp_path: Path, protocol: int) -> None:
    touched, path = tmp_path / "touched", write_py(tmp_path) / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Canary(touched), "labels": []}, protocol))
    with pytest.raises(DataError, match=r"it names (posix|nt)\.mkdir.*nothing in it was run"):
        load(tmp_path)
    assert not touched.exists()
    pickle.loads(path.read_bytes())
    assert touched.exists()  # the canary is alive: an ordinary reader would have run it


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"\x80\x02cbuiltins\neval\nU\x011\x85R.", "builtins.eval"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"(ios\nsystem\n.", "os.system"),
        (b"\x80\x02cnumpy\nload\n.", "numpy.load"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "TypeError"),  # the array class itself cannot be called
        (b"\x80\x02cnumpy\nndarray\n)\x81.", "Error"),
        (b"\x80\x02cnumpy\ndtype\nU\x02O8\x85R.", "element type 'O8'"),  # nor can objects be made of bytes
        (b"\x80\x02\x82\x01.", "Error"),
        (b"P1\n.", "Error"),
    ],
)
def test_other_ways_into_a_pickle(tmp_path: Path, raw: bytes, reason: str) -> None:
    (write_py(tmp_path) / "data_batch_1").write_bytes(raw)
    with pytest.raises(DataError, match=reason):
        load(tmp_path)


def python2_batch() -> bytes:
    """What Python 2 wrote in the official archive: protocol 2, byte strings, `numpy.core.multiarray`."""
    pixels = fake_records()["data_batch_1"][:, 1:].tobytes()

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    shape = b"K" + bytes([N]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array += b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", len(pixels)) + pixels + b"tb"
    labels = b"](" + b"K\x03" * N + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + labels + b"u."


def test_a_batch_as_python_2_wrote_it(tmp_path: Path) -> None:
    path = write_py(tmp_path) / "data_batch_1"
    path.write_bytes(python2_batch())
    data = load(tmp_path)
    assert np.array_equal(data.images[:N].reshape(N, -1).numpy(), fake_records()["data_batch_1"][:, 1:])
    assert data.labels[:N].tolist() == [3] * N
    assert (pickle.loads(path.read_bytes(), encoding="bytes")[b"data"] == data.images[:N].reshape(N, -1).numpy()).all()


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of the byte strings that the changes make
def test_cut_and_changed_pickles_raise_data_errors_only(tmp_path: Path) -> None:
    path, raw, rng, n_refused = write_py(tmp_path) / "data_batch_1", python2_batch(), random.Random(0), 0
    for trial in range(200):
        changed = bytearray(raw)
        for _ in range(rng.randint(1, 3)):  # of the program, not of the pixels
            changed[rng.choice((rng.randrange(150), -rng.randrange(1, 40)))] = rng.randrange(256)
        path.write_bytes(changed if trial % 2 else raw[: rng.randrange(len(raw))])
        try:
            load(tmp_path)
        except DataError:
            n_refused += 1
    assert 100 <= n_refused < 200


def test_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = write_bin(tmp_path)
    with pytest.raises(DataError, match="not CIFAR-10 as published"):
        load_cifar10(tmp_path, n_per_file=N)
    whole = b"".join((inner / f"{name}.bin").read_bytes() for name in FILES)
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(whole).hexdigest())
    assert load_cifar10(tmp_path, n_per_file=N).n_train == 5 * N
    write_py(tmp_path / "p")
    assert load_cifar10(tmp_path / "p", n_per_file=N).n_train == 5 * N  # the same bytes, whatever the layout
    path = inner / "data_batch_4.bin"
    raw = bytearray(path.read_bytes())
    raw[1234] ^= 1  # one bit of one pixel
    path.write_bytes(raw)
    with pytest.raises(DataError, match="not CIFAR-10 as published"):
        load_cifar10(tmp_path, n_per_file=N)
    with pytest.raises(OptionError, match="checksum"):
        load_cifar10(tmp_path, checksum="none")  # type: ignore[arg-type]


def test_normalise_is_the_published_formula() -> None:
    batch = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = normalise(batch)
    assert out.dtype == torch.float32
    for c, (mean, std) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        expected = (batch[:, c].double() / 255 - mean) / std
        assert torch.allclose(out[:, c].double(), expected, atol=1e-6)
    with pytest.raises(DataError, match="must not be normalised twice"):
        normalise(out)
    with pytest.raises(DataError, match="N x 3"):
        normalise(batch[:, :1])


def augment(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image shifted and mirrored at random, as training does it."""
    return shift(batch, join_shifts([draw_shifts(len(batch), generator)], batch.device))


def slow_crop(image: np.ndarray, dy: int, dx: int, mirrored: bool) -> np.ndarray:
    """The image seen through a window moved by (dy, dx), zeros outside, then mirrored: pixel by pixel."""
    out = np.zeros_like(image)
    _, height, width = image.shape
    for y in range(height):
        for x in range(width):
            from_y, from_x = y + dy, (width - 1 - x if mirrored else x) + dx
            if 0 <= from_y < height and 0 <= from_x < width:
                out[:, y, x] = image[:, from_y, from_x]
    return out


def shifts_of(out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dy, dx, mirrored) of images that were augmented from one whose pixel (y, x) holds 1 + 32 y + x."""
    here, right = out[:, 0, 16, 15] - 1, out[:, 0, 16, 16] - 1
    mirrored = right < here
    column = torch.where(mirrored, 16, 15)  # the mirrored window reads column 31 - 15
    return here // 32 - 16, here % 32 - column, mirrored


def coded_images(n: int) -> torch.Tensor:
    return (torch.arange(32 * 32, dtype=torch.int32) + 1).view(1, 1, 32, 32).expand(n, 1, 32, 32)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augment_against_the_slow_version(dtype: torch.dtype) -> None:
    n = 24
    code = coded_images(n)
    other = torch.randint(1, 256, (n, 3, 32, 32), generator=torch.Generator().manual_seed(5)).to(dtype)
    # The same generator state draws the same shifts, whatever the images: the coded ones say which.
    dy, dx, mirrored = shifts_of(augment(code, torch.Generator().manual_seed(3)))
    out = augment(other, torch.Generator().manual_seed(3))
    assert out.dtype == dtype and out.shape == other.shape
    for i in range(n):
        expected = slow_crop(other[i].numpy(), int(dy[i]), int(dx[i]), bool(mirrored[i]))
        assert np.array_equal(out[i].numpy(), expected)
    assert len(set(zip(dy.tolist(), dx.tolist(), mirrored.tolist()))) > n // 2


def looks_uniform(transform) -> bool:
    """Whether all 9 x 9 x 2 outcomes are equally likely: chi-square with 161 degrees of freedom."""
    n = 162 * 60
    dy, dx, mirrored = shifts_of(transform(coded_images(n), torch.Generator().manual_seed(0)))
    if int(dy.abs().max()) > 4 or int(dx.abs().max()) > 4:
        return False
    cells = ((dy + 4) * 9 + (dx + 4)) * 2 + mirrored.long()
    counts = torch.bincount(cells, minlength=162).double()
    return bool(((counts - 60) ** 2 / 60).sum() < 260)  # beyond 260 with probability 1e-6


def test_augment_is_uniform_and_broken_ones_are_seen() -> None:
    assert looks_uniform(augment)

    def one_shift_for_all(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return augment(batch[:1], generator).expand(len(batch), -1, -1, -1)

    def never_mirrored_at_the_left(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        out = augment(batch, generator)
        _, dx, mirrored = shifts_of(out)
        return out[~((dx == -4) & mirrored)]

    def mirrors_too_rarely(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        out = augment(batch, generator)
        again = shifts_of(out)[2] & (torch.rand(len(out), generator=generator) < 0.2)
        return torch.where(again.view(-1, 1, 1, 1), out.flip(3), out)

    for broken in (one_shift_for_all, never_mirrored_at_the_left, mirrors_too_rarely, lambda b, g: b):
        assert not looks_uniform(broken)


def test_augment_small_things() -> None:
    batch = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    kept = batch.clone()
    out = augment(batch, torch.Generator().manual_seed(0))
    assert torch.equal(batch, kept)
    assert torch.equal(out, augment(batch, torch.Generator().manual_seed(0)))
    generator = torch.Generator().manual_seed(0)
    augment(batch, generator)
    assert not torch.equal(out, augment(batch, generator))
    assert augment(batch[:0], generator).shape == (0, 3, 32, 32)
    assert augment(torch.zeros(2, 1, 8, 12), generator).shape == (2, 1, 8, 12)
    with pytest.raises(DataError, match="N x C x H x W"):
        augment(batch[0], generator)
