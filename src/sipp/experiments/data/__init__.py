"""Data sets (digits, MNIST, CIFAR-10, ImageNet-style folders) and their splits."""

from sipp.experiments.data.cifar10 import fetch_cifar10, load_cifar10
from sipp.experiments.data.digits import load_digits
from sipp.experiments.data.imagefolder import FolderIndex, folder_batches, index_folders
from sipp.experiments.data.imageset import ImageSet
from sipp.experiments.data.mnist import load_mnist
from sipp.experiments.data.splits import Splits, epoch_order, split_images
from sipp.experiments.data.transforms import draw_shifts, join_shifts, normalise, shift

__all__ = [
    "FolderIndex",
    "ImageSet",
    "Splits",
    "draw_shifts",
    "epoch_order",
    "fetch_cifar10",
    "folder_batches",
    "index_folders",
    "join_shifts",
    "load_cifar10",
    "load_digits",
    "load_mnist",
    "normalise",
    "shift",
    "split_images",
]
