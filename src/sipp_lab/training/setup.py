"""Prepares training for a recipe: data with splits, code version, device and number of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

import sipp
from sipp.errors import OptionError
from sipp_lab.arms import arm_of
from sipp_lab.data.cifar10 import load_cifar10
from sipp_lab.data.digits import load_digits
from sipp_lab.data.imagefolder import FolderIndex, index_folders
from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.mnist import load_mnist
from sipp_lab.data.splits import split_images
from sipp_lab.own_code import digest_of, own_images, own_network
from sipp_lab.recipes import Recipe
from sipp_lab.runs.folder import code_version
from sipp_lab.training.feed import Feed

Device = Literal["auto", "cpu", "cuda"]
MANY_IMAGES, MOST_WORKERS = 10_000, 8  # in a folder of so many, several processes decode; what they read is the same


def load_feed(recipe: Recipe, *, data_root: Path, device: torch.device) -> Feed:
    """Loads the recipe's data and splits it; images in memory are moved to the device."""
    data: ImageSet | FolderIndex
    if recipe.code.data is not None:
        data = own_images(recipe.code.data)
    elif recipe.data.name == "imagenet":
        data = index_folders(data_root / "imagenet")
    elif recipe.data.name == "digits":
        data = load_digits()
    else:
        data = load_mnist(data_root) if recipe.data.name == "mnist" else load_cifar10(data_root)
    splits = split_images(data, n_calibration=recipe.data.n_calibration, n_holdout=recipe.data.n_holdout)
    if isinstance(data, ImageSet):
        return Feed(data.to(device), splits, device)
    n_workers = min(MOST_WORKERS, os.cpu_count() or 1) if len(data.paths) >= MANY_IMAGES else 0
    return Feed(data, splits, device, n_workers)


def code_version_of(recipe: Recipe) -> str:
    """The code behind a run's results: this package, torch, and the user's own network, data and scores if any."""
    code, known = recipe.code, sipp.methods()
    if code.net is not None:
        with torch.random.fork_rng(devices=[]):
            own_network(code.net)  # fails early if it cannot be built
    own = [name for name in (code.net, code.data) if name is not None]
    rows = [known[arm_of(label).method] for label in recipe.prune.methods]
    scores = [digest_of(row.name, row.score) for row in rows if row.is_own]
    return ", ".join([code_version(), *(digest_of(name) for name in own), *scores])


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
