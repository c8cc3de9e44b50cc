"""Data sets: digits (embedded), CIFAR-10, ImageNet-style folders, and their splits."""

from sipp.data.cifar10 import augment, draw_shifts, join_shifts, load_cifar10, normalise, shift
from sipp.data.digits import digits_splits, load_digits
from sipp.data.fetch import fetch_cifar10
from sipp.data.imagefolder import FolderBatches, FolderIndex, index_folders
from sipp.data.imageset import ImageSet, content_hash
from sipp.data.splits import Splits, check_content, epoch_order, make_splits, split_images

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
    "make_splits",
    "normalise",
    "shift",
    "split_images",
]
