"""Batches from ImageNet-style folders (`train/CLASS/*.jpg`, `val/CLASS/*.jpg`), decoded in worker processes.

Augmentation depends only on (seed, epoch, item number), not on the number of workers or the order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sipp.errors import DataError
from sipp.extras import needed_for
from sipp.files import sha256_of
from sipp_lab.data.images import ALL, Batch, Draw, Share, share_of
from sipp_lab.seeds import generator_for

Picture = Any  # PIL.Image, imported only when needed
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp"})
FORMATS = ("JPEG", "PNG", "BMP")  # the only decoders tried, whatever the file is called
PARTS = ("train", "val")
SIDE = 224
VAL_SHORT_SIDE = 256
CROP_AREA = (0.08, 1.0)  # share of the image area in a random crop
CROP_RATIO = (3 / 4, 4 / 3)  # width / height of a random crop
CROP_TRIES = 10
MANY_IMAGES, MOST_WORKERS = 10_000, 8  # of a folder of so many, several processes decode; what they read is the same


@dataclass(frozen=True, eq=False)
class FolderIndex:
    """Paths and labels of all images: `train/` first (items 0 .. n_train - 1), then `val/` as the test set.

    `content_hash` is a SHA-256 of names and sizes, not of the pixels (reading ImageNet takes hours).
    """

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: Tensor
    n_train: int
    content_hash: str

    EVAL_BATCH = 256  # images per batch without gradients; these are 49 times larger than those of CIFAR-10

    @property
    def n_test(self) -> int:
        return len(self.paths) - self.n_train

    @property
    def n_classes(self) -> int:
        return len(self.classes)

    def to(self, device: torch.device) -> FolderIndex:
        """The same: images are read when they are needed."""
        return self

    def batches(
        self,
        chunks: Sequence[Tensor],
        *,
        augment: Draw | None = None,
        share: Share = ALL,
        side: int | None = None,
        n_workers: int | None = None,
    ) -> Iterator[Batch]:
        """A batch (uint8 N x 3 x 224 x 224, labels) for each chunk of items, or for this process's share of it.

        With `augment`, a random crop, resized and flipped. Without, the shorter side is resized to 256, and the central
        224 cropped; with `side`, the shorter side is resized to it and side x side cropped. No item is ever skipped: an
        image that cannot be decoded, or a worker that dies, raises DataError.
        """
        if n_workers is None:
            n_workers = min(MOST_WORKERS, os.cpu_count() or 1) if len(self.paths) >= MANY_IMAGES else 0
        loader = DataLoader(
            _Decoded(self, augment, side),
            batch_sampler=[share_of(items, share).tolist() for items in chunks],
            num_workers=n_workers,
            pin_memory=torch.cuda.is_available(),
        )
        n_done, named = 0, None
        try:
            for images, labels in loader:
                yield images, labels
                n_done += 1
            return
        except DataError as error:
            named = error.with_traceback(None)  # whose frames hold the loader's workers
        except (RuntimeError, OSError, EOFError) as error:  # which one depends on when the worker died
            failure = f"{type(error).__name__}: {error}"
        # Raised here, where nothing references the loader any more, so that torch cleans up the worker now.
        if named is not None:
            raise named
        raise DataError(
            f"a worker process failed while batch {n_done + 1} of {len(chunks)} was awaited: {failure}",
            fix="look for a file that cannot be read, or for memory that runs out",
        )


def index_folders(root: Path | str) -> FolderIndex:
    """Indexes a folder with `train/` and `val/`, each with one folder per class, in sorted order."""
    with needed_for("reading images"):
        import PIL  # noqa: F401  before any work, and not in each worker

    root = Path(root)
    for part in PARTS:
        if not (root / part).is_dir():
            raise DataError(
                f"{root / part} is not a folder", fix=f"expected {root}/train/CLASS/*.jpg and {root}/val/CLASS/*.jpg"
            )
    classes = tuple(sorted(entry.name for entry in os.scandir(root / PARTS[0]) if entry.is_dir()))
    extra = sorted({entry.name for entry in os.scandir(root / PARTS[1]) if entry.is_dir()} - set(classes))
    if not classes:
        raise DataError(f"{root / PARTS[0]} contains no class folders")
    if extra:
        raise DataError(f"{root / PARTS[1]} contains classes that train/ does not have: {', '.join(extra[:5])}")
    paths: list[str] = []
    labels: list[int] = []
    counts: list[int] = []
    listed: list[bytes] = []
    for part in PARTS:
        for label, name in enumerate(classes):
            for file_name, size in _images_in(root / part / name):
                paths.append(f"{part}/{name}/{file_name}")
                labels.append(label)
                listed.append(f"{paths[-1]}\0{size}\n".encode())
        counts.append(len(paths))
    return FolderIndex(root, classes, tuple(paths), torch.tensor(labels), counts[0], sha256_of(*listed))


def _images_in(folder: Path) -> list[tuple[str, int]]:
    """Sorted (file name, size) of the images in a class folder; DataError if there are none."""
    if not folder.is_dir():
        raise DataError(f"{folder} is missing: every class needs a folder in train/ and in val/")
    entries = [entry for entry in os.scandir(folder) if Path(entry.name).suffix.lower() in SUFFIXES]
    if not entries:
        raise DataError(f"{folder} contains no images ({', '.join(sorted(SUFFIXES))})")
    return sorted((entry.name, entry.stat().st_size) for entry in entries)


class _Decoded(Dataset[tuple[Tensor, int]]):
    """Item k is image number k, decoded and cropped, with its label."""

    def __init__(self, index: FolderIndex, augment: Draw | None, side: int | None) -> None:
        self.index, self.augment, self.side = index, augment, side

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        image = _decode(self.index.root / self.index.paths[item], item)
        if self.augment is not None:
            (seed, epoch), (width, height) = self.augment, image.size
            crop = draw_crop(width, height, generator_for(f"crop {seed} {epoch} {item}"))
            cropped = resized_crop(image, crop)
        else:
            cropped = centre_crop(image) if self.side is None else centre_crop(image, self.side, self.side)
        pixels = torch.from_numpy(np.array(cropped)).permute(2, 0, 1).contiguous()
        return pixels, int(self.index.labels[item])


def _decode(path: Path, item: int) -> Picture:
    """The image in RGB; whatever a broken file raises becomes a DataError with its path and item."""
    from PIL import Image

    try:
        with Image.open(path, formats=FORMATS) as image:
            return image.convert("RGB")
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, bomb errors, ...
        raise DataError(
            f"cannot be decoded ({type(error).__name__}: {error})",
            where=f"item {item}, {path}",
            fix="replace the file, or take it out of the folder and index again",
        ) from error


Crop = tuple[int, int, int, int, bool]  # left, top, width and height in pixels, and whether it is mirrored


def draw_crop(width: int, height: int, generator: torch.Generator) -> Crop:
    """A random crop of a width x height image: 8 to 100 % of its area, ratio 3/4 to 4/3, mirrored half the time.

    Area and log-ratio are uniform, and so is the position. The first of ten draws that fits is used; if none fits, the
    largest centre crop with an allowed ratio.
    """
    draws = torch.rand(5, CROP_TRIES, generator=generator, dtype=torch.float64)
    area = (CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * draws[0]) * (width * height)
    low, high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    ratio = torch.exp(low + (high - low) * draws[1])
    widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    mirrored = bool(draws[4, 0] < 0.5)
    if not bool(fits.any()):
        w = min(width, max(1, round(height * CROP_RATIO[1])))
        h = min(height, max(1, round(width / CROP_RATIO[0])))
        return (width - w) // 2, (height - h) // 2, w, h, mirrored
    k = int(fits.to(torch.int8).argmax())  # the first that fits
    w, h = int(widths[k]), int(heights[k])
    left, top = int(draws[2, k] * (width - w + 1)), int(draws[3, k] * (height - h + 1))
    return left, top, w, h, mirrored


def resized_crop(image: Picture, crop: Crop) -> Picture:
    """The crop, resized to 224 x 224."""
    from PIL import Image

    left, top, width, height, mirrored = crop
    box = (left, top, left + width, top + height)
    out = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    return out.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else out


def centre_crop(image: Picture, side: int = SIDE, short_side: int = VAL_SHORT_SIDE) -> Picture:
    """Resizes the shorter side to `short_side`, then crops the central side x side pixels."""
    from PIL import Image

    width, height = image.size
    short = min(width, height)
    size = (width * short_side // short, height * short_side // short)  # integer arithmetic: exactly 256, never 255
    resized = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (resized.width - side) // 2, (resized.height - side) // 2
    return resized.crop((left, top, left + side, top + side))
