"""What a run still has to train, and how long that may take: a few training steps are timed, on noise."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.splits import split_images
from sipp_lab.nets import INPUT_SHAPES, build
from sipp_lab.own_code import own_images, own_network
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs.folder import run_name
from sipp_lab.runs.stages import is_done, plan
from sipp_lab.training.feed import Feed, train_batches
from sipp_lab.training.loop import make_train_step, new_state
from sipp_lab.training.setup import Device, device_named, threads

N_TRAIN = {"digits": 1437, "mnist": 60_000, "cifar10": 50_000, "imagenet": 1_281_167}  # training items of a data set
N_WARM, N_STEPS = 2, 4  # steps before the timed ones, and these
CPU_BATCH = 16  # images of a timed step on a CPU, where the time grows with them


@dataclass(frozen=True)
class PlannedRun:
    """One run: how many networks it has, how many of them are there, and what is left to train."""

    run: str
    n_all: int
    n_there: int
    n_new: int
    n_epochs: int  # of the new ones together
    seconds: float  # for these epochs, one network after another, without pruning, evaluation and decoding of images


def planned_run(recipe: Recipe, *, out: Path, device: Device = "auto") -> PlannedRun:
    """What is left to train of a recipe, if the data, the code and the device are those of the networks there."""
    name, stages = run_name(config_of(recipe)), plan(recipe)
    new = [stage for stage in stages if not is_done(out / name, stage)]
    n_epochs = sum(recipe.hyper_of(stage.method).epochs for stage in new)
    spent = 0.0 if not new else n_epochs * _seconds_of_an_epoch(recipe, device_named(device))
    return PlannedRun(name, len(stages), len(stages) - len(new), len(new), n_epochs, spent)


def _seconds_of_an_epoch(recipe: Recipe, device: torch.device) -> float:
    code, hyper, spec = recipe.code, recipe.train, recipe.data
    own = None if code is None or code.data is None else own_images(code.data)
    shape = INPUT_SHAPES[spec.name] if own is None else tuple(own.images.shape[1:])
    n_items = (N_TRAIN[spec.name] if own is None else own.n_train) - spec.n_calibration - spec.n_holdout
    size = hyper.batch_size if device.type == "cuda" else min(hyper.batch_size, CPU_BATCH)
    n_images = (N_WARM + N_STEPS) * size
    noise = ImageSet(
        "noise", torch.rand(n_images + 1, *shape), torch.zeros(n_images + 1, dtype=torch.int64), n_images, 1
    )
    feed = Feed(noise.to(device), split_images(noise, n_calibration=0, n_holdout=0), device, 0, hyper.channels_last)
    with threads(recipe.n_threads), torch.random.fork_rng(devices=[]):
        if code is not None and code.net is not None:
            model = own_network(code.net)
        else:
            model = build(recipe.net, n_classes=None if own is None else own.n_classes)
        state = new_state(model.to(device), hyper)
        step = make_train_step(state, hyper, "eager")
        began = time.monotonic()
        for number, (images, labels) in train_batches(feed, seed=0, epoch=0, batch_size=size, augmented=False):
            step(images, labels, 0.0, size)
            if number + 1 == N_WARM:
                state.sums.tolist()  # waits for the device
                began = time.monotonic()
        state.sums.tolist()
    return (time.monotonic() - began) / (N_STEPS * size) * n_items


def total_of(planned: list[PlannedRun]) -> PlannedRun:
    """The sum of several runs."""
    total = PlannedRun("all", 0, 0, 0, 0, 0.0)
    for one in planned:
        total = replace(
            total,
            n_all=total.n_all + one.n_all,
            n_there=total.n_there + one.n_there,
            n_new=total.n_new + one.n_new,
            n_epochs=total.n_epochs + one.n_epochs,
            seconds=total.seconds + one.seconds,
        )
    return total
