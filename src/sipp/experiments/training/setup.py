"""A recipe as training takes it: its hyperparameters, its data with splits, the device, the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from sipp.errors import OptionError
from sipp.experiments.data import (
    ImageSet,
    index_folders,
    load_cifar10,
    load_digits,
    load_mnist,
    make_splits,
    split_images,
)
from sipp.experiments.own_code import own_images, own_network, source_digest
from sipp.experiments.recipes import Recipe
from sipp.experiments.runs import store
from sipp.experiments.training.feed import Feed
from sipp.experiments.training.loop import Hyper
from sipp.experiments.training.schedule import Schedule

Device = Literal["auto", "cpu", "cuda"]


def hyper_of(recipe: Recipe, *, again: bool = False) -> Hyper:
    """The recipe's hyperparameters as the loop takes them: of training, or of training `again` after a cut."""
    spec = recipe.retraining if again else recipe.train
    schedule = Schedule(
        spec.rate, spec.warmup_epochs, spec.decay.factor, spec.decay.milestones or (), every=spec.decay.every
    )
    return Hyper(
        epochs=spec.epochs,
        batch_size=spec.batch_size,
        schedule=schedule,
        optimizer=spec.optimizer,
        momentum=spec.momentum if spec.momentum is not None else 0.0,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay,
        augment=spec.augment,
        precision=spec.precision,
        eval_every=spec.eval_every,
        step=spec.step,
    )


def feed_of(recipe: Recipe, *, data_root: Path, device: torch.device, n_workers: int = 0) -> Feed:
    """The recipe's data with its splits; images that fit are put on the device as a whole."""
    spec = recipe.data
    if spec.name == "imagenet":
        index = index_folders(data_root / "imagenet")
        splits = make_splits(
            n_train_part=index.n_train,
            n_test=len(index.paths) - index.n_train,
            n_calibration=spec.n_calibration,
            n_holdout=spec.n_holdout,
            seed=spec.split_seed,
            content=index.content,
        )
        return Feed(index, splits, len(index.classes), device, n_workers, recipe.train.channels_last)
    data = _images(recipe, data_root)
    splits = split_images(data, n_calibration=spec.n_calibration, n_holdout=spec.n_holdout, seed=spec.split_seed)
    return Feed(data.to(device), splits, data.n_classes, device, n_workers, recipe.train.channels_last)


def _images(recipe: Recipe, root: Path) -> ImageSet:
    """The recipe's data set, where it fits into memory."""
    if recipe.code is not None and recipe.code.data is not None:
        return own_images(recipe.code.data)
    if recipe.data.name == "digits":
        return load_digits()
    return load_mnist(root) if recipe.data.name == "mnist" else load_cifar10(root)


def code_of(recipe: Recipe) -> str:
    """Which code a run's numbers come from: this package's, torch's, and the user's own where it has a part."""
    names = () if recipe.code is None else (recipe.code.net, recipe.code.data)
    if recipe.code is not None and recipe.code.net is not None:
        with torch.random.fork_rng(devices=[]):
            own_network(recipe.code.net)  # makes a network, or the run ends here
    return ", ".join([store.code_version(), *(source_digest(name) for name in names if name is not None)])


def device_named(name: Device) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise OptionError("device 'cuda' was asked for, but torch finds no GPU here", fix="use 'cpu' or 'auto'")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


@contextmanager
def threads(n_threads: int | None) -> Iterator[None]:
    """A stretch with this many threads in torch; None leaves them as they are."""
    before = torch.get_num_threads()
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
