"""Images as inputs: how bytes become numbers (--normalise), and folders of pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sipp.cli.errors import CommandError, naming_option
from sipp.errors import DataError
from sipp_lab.data.folder import PARTS, SUFFIXES, FolderIndex, index_folders
from sipp_lab.data.images import MEAN, STD, normalise

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


def index_images(path: Path) -> FolderIndex:
    """`train/CLASS/*` and `val/CLASS/*` of a folder, else all images in it, labelled if they are in class folders.

    Classes are numbered in the order of their names, as in torchvision's ImageFolder.
    """
    if all((path / part).is_dir() for part in PARTS):
        return index_folders(path)
    found = sorted(file.relative_to(path) for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(
            f"{path} contains no images ({', '.join(sorted(SUFFIXES))})",
            fix=f"give {path}/train/CLASS/*.jpg and {path}/val/CLASS/*.jpg, or images anywhere in it",
        )
    tops = [image.parts[0] if len(image.parts) > 1 else "" for image in found]
    classes = tuple(sorted(set(tops)))
    classes = () if len(classes) < 2 or "" in classes else classes
    labels = torch.tensor([classes.index(top) if classes else 0 for top in tops], dtype=torch.int64)
    return FolderIndex(path, classes, tuple(map(str, found)), labels, len(found), "")


def read_images(index: FolderIndex, items: Tensor, side: int | None) -> tuple[Tensor, Tensor]:
    """These images as bytes, with their labels."""
    return next(index.batches([items], side=side))
