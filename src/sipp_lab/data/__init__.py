"""Data sets (digits, MNIST, CIFAR-10, ImageNet-style folders), one file each, and their splits."""

from pathlib import Path


def data_sets(folder: Path) -> dict[str, tuple[bool, str]]:
    """{name: whether the set is here, what it is and how to get it} of all sets, in this folder."""
    pictures, digits, imagenet = folder / "cifar-10-batches-bin", folder / "mnist", folder / "imagenet"
    return {
        "digits": (True, "1,437 training and 360 test images, 1 x 8 x 8, part of scikit-learn"),
        "mnist": (
            digits.is_dir(),
            f"60,000 training and 10,000 test images, 1 x 28 x 28, in {digits}; sipp data mnist {folder} gets it",
        ),
        "cifar10": (
            pictures.is_dir(),
            f"50,000 training and 10,000 test images, 3 x 32 x 32, in {pictures}; sipp data cifar10 {folder} gets it",
        ),
        "imagenet": (
            (imagenet / "train").is_dir() and (imagenet / "val").is_dir(),
            f"put the images there yourself: {imagenet}/train/CLASS/*.jpg and {imagenet}/val/CLASS/*.jpg",
        ),
    }
