"""Reads MNIST from its four official files, plain or gzipped."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch

from sipp.errors import DataError
from sipp.experiments.data.imageset import ImageSet

FOLDER = "mnist"
PARTS = {"train": 60_000, "t10k": 10_000}  # prefix of the file name: number of images; training first
SIDE = 28
N_CLASSES = 10
IMAGES, LABELS = (0x803, "images-idx3-ubyte"), (0x801, "labels-idx1-ubyte")  # magic number, end of a file's name
MAX_GREY = 255.0


def load_mnist(root: Path) -> ImageSet:
    """All 70,000 images as float32 in [0, 1], N x 1 x 28 x 28, 60,000 training images first, from `root`/mnist."""
    images = [_read(root / FOLDER, part, IMAGES, (n, SIDE, SIDE)) for part, n in PARTS.items()]
    labels = [_read(root / FOLDER, part, LABELS, (n,)) for part, n in PARTS.items()]
    targets = torch.from_numpy(np.concatenate(labels)).to(torch.int64)
    if int(targets.max()) >= N_CLASSES:
        raise DataError(f"a label is {int(targets.max())}, but classes are 0 .. {N_CLASSES - 1}", where=root / FOLDER)
    pixels = torch.from_numpy(np.concatenate(images)).to(torch.float32).unsqueeze(1) / MAX_GREY
    return ImageSet("mnist", pixels, targets, PARTS["train"], N_CLASSES)


def _read(folder: Path, part: str, kind: tuple[int, str], shape: tuple[int, ...]) -> np.ndarray:
    """The content of one file as an array of this shape, after checking its header."""
    magic, ending = kind
    path = folder / f"{part}-{ending}"
    header = b"".join(number.to_bytes(4, "big") for number in (magic, *shape))
    n_expected = len(header) + int(np.prod(shape))
    packed = path.with_name(path.name + ".gz")
    try:
        if path.is_file():
            data = path.read_bytes()
        else:
            with gzip.open(packed) as file:
                data = file.read(n_expected + 1)  # at most one byte too many, however much it unpacks to
    except (OSError, EOFError) as error:
        raise DataError(
            f"{path} (or {packed.name}) could not be read ({error})", fix=f"put the four files of MNIST into {folder}"
        ) from error
    if len(data) != n_expected or data[: len(header)] != header:
        raise DataError("it is truncated, or not this file of MNIST", where=path)
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape).copy()
