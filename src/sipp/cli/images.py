"""Images as inputs: how bytes become numbers (--normalise), the built-in sets, and folders of pictures."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sipp.cli.errors import CommandError, naming_option
from sipp.errors import DataError
from sipp_lab.data.imagefolder import SIDE, SUFFIXES, FolderIndex, folder_batches, index_folders
from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.transforms import MEAN, STD, normalise
from sipp_lab.nets import NETS

FIX = "give imagenet, cifar10, none, or MEAN/STD for bytes x as (x / 255 - MEAN) / STD: 0.5,0.5,0.5/0.25,0.25,0.25"


@dataclass(frozen=True)
class Normalisation:
    """Bytes x become (x / 255 - mean) / std, per channel or with one value for all."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def words(self) -> str:
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"bytes x as (x / 255 - mean) / std, mean {mean}, std {std}; --normalise gives others"

    def apply(self, images: Tensor) -> Tensor:
        """Normalises the images."""
        with naming_option("--normalise", "leave it out, or give one mean for each channel, or one for all"):
            return normalise(images, mean=self.mean, std=self.std)


USUAL = Normalisation(MEAN, STD)  # used to train published networks, also for CIFAR-10
NAMED = {
    "imagenet": USUAL,
    "cifar10": Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "none": Normalisation((0.0,), (1.0,)),
}


def normalisation_of(text: str | None) -> Normalisation | None:
    """Parses --normalise; None if it is not given."""
    if text is None or text in NAMED:
        return None if text is None else NAMED[text]
    where = f"--normalise {text:.60}"
    try:
        mean, std = (tuple(float(part) for part in half.split(",")) for half in text.split("/"))
    except ValueError:
        raise CommandError(f"{text!r:.60} is not a normalisation", where=where, fix=FIX) from None
    if len(mean) != len(std) or not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
        raise CommandError(f"{text!r:.60} must have as many positive deviations as finite means", where=where, fix=FIX)
    return Normalisation(mean, std)


@dataclass(frozen=True)
class Pictures:
    """The pictures of one part of a set or folder, which are read and normalised when they are taken."""

    n: int
    what: str  # "training images of digits"
    data: ImageSet | FolderIndex
    first: int  # its first item in the data
    normalised: Normalisation | None
    side: int | None = None  # of pictures from a folder; None: SIDE
    has_holdout: bool = False

    def take(self, items: Tensor) -> tuple[Tensor, Tensor | None]:
        """The images and labels of these items."""
        labels: Tensor | None
        if isinstance(self.data, ImageSet):
            images, labels = self.data.images[self.first + items], self.data.labels[self.first + items]
        else:
            read = folder_batches(
                self.data, self.first + items, mode="val", batch_size=max(1, len(items)), side=self.side
            )
            images, labels = (torch.cat(parts) for parts in zip(*read))
            labels = labels if self.data.classes else None
        return images if self.normalised is None else self.normalised.apply(images), labels

    @property
    def classes(self) -> tuple[str, ...]:
        """Of a folder with one subfolder per class, in label order."""
        return self.data.classes if isinstance(self.data, FolderIndex) else ()


def pictures_of_set(data: ImageSet, is_holdout: bool, chosen: Normalisation | None) -> Pictures:
    """A built-in image set: its training part for calibration, its test part as holdout."""
    normalised = chosen or (USUAL if data.images.dtype == torch.uint8 else None)
    first, n, part = (data.n_train, data.n_test, "test") if is_holdout else (0, data.n_train, "training")
    return Pictures(n, f"{part} images of {data.name}", data, first, normalised, has_holdout=True)


def pictures_in(path: Path, is_holdout: bool, chosen: Normalisation | None, side: int | None) -> Pictures:
    """A folder of images: `train/CLASS/*` and `val/CLASS/*` by role, one subfolder per class, or unlabelled images.

    Classes are numbered in the order of their names, as in torchvision's ImageFolder.
    """
    has_parts = (path / "train").is_dir() and (path / "val").is_dir()
    index = index_folders(path) if has_parts else _index_any(path)
    is_rest = has_parts and is_holdout
    first, n = (index.n_train, len(index.paths) - index.n_train) if is_rest else (0, index.n_train)
    part = "images" if not has_parts else "validation images" if is_rest else "training images"
    kinds = f"{len(index.classes)} classes" if index.classes else "without labels"
    what = f"{part} of {path}, {side or SIDE} x {side or SIDE}, {kinds}"
    return Pictures(n, what, index, first, chosen or USUAL, side, has_parts)


def side_for(model: str) -> int | None:
    """The image side of a built-in network; None: ImageNet's, or not a built-in network."""
    side = NETS[model].input_shape[-1] if model in NETS else SIDE
    return None if side == SIDE else side


def _index_any(path: Path) -> FolderIndex:
    """All images in a folder in sorted order, labelled if they are all in class folders."""
    images = sorted(
        os.path.relpath(os.path.join(root, name), path)
        for root, _, names in os.walk(path)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES
    )
    if not images:
        raise DataError(
            f"{path} holds no images ({', '.join(sorted(SUFFIXES))})",
            fix=f"give {path}/train/CLASS/*.jpg and {path}/val/CLASS/*.jpg, or images anywhere in it",
        )
    tops = [Path(image).parts[0] if len(Path(image).parts) > 1 else "" for image in images]
    classes = tuple(sorted(set(tops)))
    if len(classes) < 2 or "" in classes:
        classes = ()
    labels = torch.tensor([classes.index(top) if classes else 0 for top in tops], dtype=torch.int64)
    return FolderIndex(path, classes, tuple(images), labels, len(images), "")
