"""Data sets: digits (embedded), MNIST, CIFAR-10, ImageNet-style folders, and their splits."""

from sipp.experiments.data.cifar10 import augment, draw_shifts, join_shifts, load_cifar10, normalise, shift
from sipp.experiments.data.digits import digits_splits, load_digits
from sipp.experiments.data.fetch import fetch_cifar10
from sipp.experiments.data.imagefolder import FolderBatches, FolderIndex, index_folders
from sipp.experiments.data.imageset import ImageSet, content_hash
from sipp.experiments.data.mnist import load_mnist
from sipp.experiments.data.splits import Splits, check_content, epoch_order, make_splits, split_images

__all__ = [
    "FolderBatches",
    "FolderIndex",
    "ImageSet",
    "Splits",
    "augment",
    "check_content",
    "content_hash",
    "digits_splits",
    "draw_shifts",
    "epoch_order",
    "fetch_cifar10",
    "index_folders",
    "join_shifts",
    "load_cifar10",
    "load_digits",
    "load_mnist",
    "make_splits",
    "normalise",
    "shift",
    "split_images",
]
