"""CIFAR-10 files, whole and broken, and the batch operations, against an obvious version of themselves."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from sipp.errors import DataError
from sipp_lab.data import cifar10 as module
from sipp_lab.data.cifar10 import BIN_FOLDER, FILES, load_cifar10
from sipp_lab.data.transforms import draw_shifts, join_shifts, normalise, shift

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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set of six small files, whose bytes are taken for the published ones."""
    inner = write_bin(tmp_path)
    whole = b"".join((inner / f"{name}.bin").read_bytes() for name in FILES)
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(module, "N_PER_FILE", N)
    return tmp_path


def test_bin_layout(folder: Path) -> None:
    data = load_cifar10(folder)
    assert data.images.shape == (6 * N, 3, 32, 32) and data.images.dtype == torch.uint8
    assert data.n_train == 5 * N and data.n_test == N
    records = fake_records()
    for i in (0, N, 6 * N - 1):  # first, first of the second file, last
        record = records[FILES[i // N]][i % N]
        assert data.labels[i] == record[0]
        for c, y, x in ((0, 0, 0), (1, 5, 7), (2, 31, 30)):
            assert data.images[i, c, y, x] == record[1 + 1024 * c + 32 * y + x]
    assert torch.equal(load_cifar10(folder / BIN_FOLDER).images, data.images)


@pytest.mark.parametrize("n_bytes", [0, 100, 3073 * (N - 1), 3073 * N + 1])
def test_a_cut_file_is_refused_even_at_a_record_boundary(folder: Path, n_bytes: int) -> None:
    path = folder / BIN_FOLDER / "data_batch_3.bin"
    path.write_bytes((path.read_bytes() * 2)[:n_bytes])
    with pytest.raises(DataError, match=rf"data_batch_3.bin: {n_bytes} bytes instead of {3073 * N}"):
        load_cifar10(folder)




def test_one_bit_of_one_pixel_is_not_cifar10_as_published(folder: Path) -> None:
    path = folder / BIN_FOLDER / "data_batch_4.bin"
    raw = bytearray(path.read_bytes())
    raw[1234] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="not CIFAR-10 as published"):
        load_cifar10(folder)


def test_normalise_is_the_published_formula() -> None:
    batch = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = normalise(batch)
    assert out.dtype == torch.float32
    for c, (mean, std) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        expected = (batch[:, c].double() / 255 - mean) / std
        assert torch.allclose(out[:, c].double(), expected, atol=1e-6)
    with pytest.raises(DataError, match="not images as bytes"):
        normalise(out)
    with pytest.raises(DataError, match="3 means for the 1 channels"):
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


