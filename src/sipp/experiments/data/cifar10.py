"""CIFAR-10 from its official folders as one tensor, and the batch operations that training needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.errors import DataError
from sipp.experiments.data.imageset import ImageSet
from sipp.experiments.data.safepickle import load_pickle
from sipp.records.checking import check_choice
from sipp.storage.files import sha256_of

N_CLASSES = 10
N_PER_FILE = 10_000
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
FILES = (*TRAIN_FILES, "test_batch")
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32  # one label, then the red, green and blue planes
BIN_FOLDER = "cifar-10-batches-bin"
PY_FOLDER = "cifar-10-batches-py"
SHA256 = "013ba16d14ecc4829da62bf2af648ca30f600491ecb3e7f329c827db0dd17522"  # all records, in the order of FILES

MEAN = (0.485, 0.456, 0.406)  # the constants that published CIFAR-10 networks were trained with
STD = (0.229, 0.224, 0.225)
CROP_PADDING = 4

Checksum = Literal["official", "skip"]


def load_cifar10(folder: Path | str, *, n_per_file: int = N_PER_FILE, checksum: Checksum = "official") -> ImageSet:
    """All 60,000 images as uint8, 50,000 training images first, from `folder` or from the batches folder inside it.

    `checksum="official"` refuses anything but the published bytes; "skip" is for other data in the same layout.
    """
    check_choice("checksum", checksum, ("official", "skip"))
    records = np.concatenate(_read_all(Path(folder), n_per_file))  # N x 3073
    if checksum == "official":
        found = sha256_of(records.data)
        if found != SHA256:
            raise DataError(
                f"this is not CIFAR-10 as published (sha256 {found[:12]} instead of {SHA256[:12]})",
                where=folder,
                fix="fetch it again, or pass checksum='skip' if other data in this layout is meant",
            )
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    images = torch.from_numpy(np.ascontiguousarray(records[:, 1:])).view(-1, *SHAPE)
    return ImageSet("cifar10", images, labels, n_per_file * len(TRAIN_FILES), N_CLASSES)


def _read_all(folder: Path, n_per_file: int) -> list[np.ndarray]:
    """The records of the six files in order, from whichever of the two layouts is there."""
    for candidate in (folder / BIN_FOLDER, folder / PY_FOLDER, folder):
        if (candidate / f"{FILES[0]}.bin").is_file():
            return [_read_bin(candidate / f"{name}.bin", n_per_file) for name in FILES]
        if (candidate / FILES[0]).is_file():
            return [_read_py(candidate / name, n_per_file) for name in FILES]
    raise DataError(
        f"no CIFAR-10 in {folder}",
        fix=f"put the official {BIN_FOLDER}/ (data_batch_1.bin .. test_batch.bin) or {PY_FOLDER}/ "
        "(data_batch_1 .. test_batch) there, or fetch it with sipp.experiments.data.fetch_cifar10("
        f"{str(folder)!r})",
    )


def _require(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path} is missing: the set is incomplete; all of {', '.join(FILES)} are needed")


def _read_bin(path: Path, n_records: int) -> np.ndarray:
    """Records n x 3073 of one binary file, whose size must be exact."""
    _require(path)
    expected, found = n_records * RECORD_BYTES, path.stat().st_size
    if found != expected:
        raise DataError(
            f"{found} bytes instead of {expected} ({n_records} records); it is cut or not CIFAR-10", where=path
        )
    records = np.fromfile(path, np.uint8).reshape(n_records, RECORD_BYTES)
    _check_labels(path, records[:, 0])
    return records


def _read_py(path: Path, n_records: int) -> np.ndarray:
    """The same records from one pickled file, read without running anything in it."""
    _require(path)
    batch = load_pickle(path)
    pixels, labels = batch.get("data"), batch.get("labels")
    n_pixels = RECORD_BYTES - 1
    if not isinstance(pixels, np.ndarray) or pixels.shape != (n_records, n_pixels):
        shape = getattr(pixels, "shape", type(pixels).__name__)
        raise DataError(f"'data' must be a uint8 array {n_records} x {n_pixels}, found {shape}", where=path)
    if not isinstance(labels, list) or len(labels) != n_records or not all(type(n) is int for n in labels):
        raise DataError(f"'labels' must be a list of {n_records} class numbers", where=path)
    _check_labels(path, np.asarray(labels, object))  # any size of number: narrowed only once it is known to fit
    return np.concatenate([np.asarray(labels, np.uint8)[:, None], pixels], axis=1)


def _check_labels(path: Path, labels: np.ndarray) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= N_CLASSES))
    if wrong.size:
        raise DataError(
            f"record {wrong[0]} has label {labels[wrong[0]]}, but classes are 0 .. {N_CLASSES - 1}", where=path
        )


def normalise(batch: Tensor, *, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """uint8 images N x C x H x W as float32 (x / 255 - mean) / std, on the device they are on."""
    if batch.dtype != torch.uint8 or batch.dim() != 4 or batch.shape[1] != len(mean):
        raise DataError(
            f"normalise takes uint8 images N x {len(mean)} x H x W, got {batch.dtype} {tuple(batch.shape)}; "
            "a batch must not be normalised twice"
        )
    return (batch.to(torch.float32) / 255 - _channels(mean, batch.device)) / _channels(std, batch.device)


@cache  # copied to a GPU once: each copy would wait for all work under way there
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One number for each channel, C x 1 x 1."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


@dataclass(frozen=True)
class Shifts:
    """How each of N images is moved: offsets (2 x N x 1, 0 .. 2 * CROP_PADDING) and mirroring (N x 1)."""

    offsets: Tensor
    mirrored: Tensor


def draw_shifts(n_images: int, generator: torch.Generator) -> Shifts:
    """Shifts uniform on {-4 .. 4}^2 and mirroring with probability 1/2, independent from image to image."""
    device, n_offsets = generator.device, 2 * CROP_PADDING + 1
    offsets = torch.randint(n_offsets, (2, n_images, 1), generator=generator, device=device)
    return Shifts(offsets, torch.randint(2, (n_images, 1), generator=generator, device=device).bool())


def join_shifts(parts: Sequence[Shifts], device: torch.device) -> Shifts:
    """The shifts of several batches as those of one, on the device; a GPU is not waited for."""
    offsets, mirrored = torch.cat([one.offsets for one in parts], 1), torch.cat([one.mirrored for one in parts])
    if device.type == "cuda":
        offsets, mirrored = offsets.pin_memory(), mirrored.pin_memory()
    return Shifts(offsets.to(device, non_blocking=True), mirrored.to(device, non_blocking=True))


def shift(batch: Tensor, shifts: Shifts) -> Tensor:
    """The images moved and mirrored, zeros moving in: a new batch, all images at once on their device."""
    if batch.dim() != 4:
        raise DataError(f"images are N x C x H x W, got {tuple(batch.shape)}")
    n_images, n_channels, height, width = batch.shape
    padded = F.pad(batch, (CROP_PADDING,) * 4)
    steps = torch.arange(width, device=batch.device)
    rows = shifts.offsets[0] + torch.arange(height, device=batch.device)  # N x H
    columns = shifts.offsets[1] + torch.where(shifts.mirrored, steps.flip(0), steps)  # N x W
    images = torch.arange(n_images, device=batch.device).view(-1, 1, 1, 1)
    channels = torch.arange(n_channels, device=batch.device).view(1, -1, 1, 1)
    return padded[images, channels, rows[:, None, :, None], columns[:, None, None, :]]


def augment(batch: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to 4 pixels (zeros move in) and mirrored with probability 1/2: a new batch.

    Numbers are drawn on the generator's device: a CPU generator gives the same batch everywhere.
    """
    return shift(batch, join_shifts([draw_shifts(len(batch), generator)], batch.device))
