"""Prepares training for a recipe: data with splits, code version, device and number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from sipp.errors import OptionError
from sipp_lab.data.cifar10 import load_cifar10
from sipp_lab.data.digits import load_digits
from sipp_lab.data.imagefolder import FolderIndex, index_folders
from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.mnist import load_mnist
from sipp_lab.data.splits import split_images
from sipp_lab.own_code import own_images, own_network, source_digest
from sipp_lab.recipes import Recipe
from sipp_lab.runs.folder import code_version
from sipp_lab.training.feed import Feed

Device = Literal["auto", "cpu", "cuda"]
MANY_IMAGES, MOST_WORKERS = 10_000, 8  # in a folder of so many, several processes decode; what they read is the same


def load_feed(recipe: Recipe, *, data_root: Path, device: torch.device) -> Feed:
    """Loads the recipe's data and splits it; images in memory are moved to the device."""
    spec, data = recipe.data, _load(recipe, data_root)
    splits = split_images(data, n_calibration=spec.n_calibration, n_holdout=spec.n_holdout, seed=spec.split_seed)
    if isinstance(data, ImageSet):
        return Feed(data.to(device), splits, device, channels_last=recipe.train.channels_last)
    n_workers = min(MOST_WORKERS, os.cpu_count() or 1) if len(data.paths) >= MANY_IMAGES else 0
    return Feed(data, splits, device, n_workers, recipe.train.channels_last)


def _load(recipe: Recipe, root: Path) -> ImageSet | FolderIndex:
    if recipe.code is not None and recipe.code.data is not None:
        return own_images(recipe.code.data)
    if recipe.data.name == "imagenet":
        return index_folders(root / "imagenet")
    if recipe.data.name == "digits":
        return load_digits()
    return load_mnist(root) if recipe.data.name == "mnist" else load_cifar10(root)


def code_version_of(recipe: Recipe) -> str:
    """The code behind a run's results: this package, torch, and the user's own code if any."""
    names = () if recipe.code is None else (recipe.code.net, recipe.code.data)
    if recipe.code is not None and recipe.code.net is not None:
        with torch.random.fork_rng(devices=[]):
            own_network(recipe.code.net)  # fails early if it cannot be built
    return ", ".join([code_version(), *(source_digest(name) for name in names if name is not None)])


def device_named(name: Device) -> torch.device:
    """The device with this name; "auto" is a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise OptionError("torch finds no CUDA device on this machine", fix="use device cpu, or leave it out")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


@contextmanager
def threads(n_threads: int | None) -> Iterator[None]:
    """Sets torch's number of threads inside the block; None leaves it unchanged."""
    before = torch.get_num_threads()
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
