"""What a run still has to train, and how long that may take: a few training steps are timed, on noise."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sipp_lab.nets import INPUT_SHAPES, build
from sipp_lab.own_code import own_images, own_network
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs.folder import run_name
from sipp_lab.runs.stages import is_done, plan
from sipp_lab.training.loop import make_train_step, new_state
from sipp_lab.training.setup import Device, device_named, threads

N_TRAIN = {"digits": 1437, "mnist": 60_000, "cifar10": 50_000, "imagenet": 1_281_167}  # training items of a data set
SIZES = (2, 16)  # images of a step that is timed, before a whole batch
N_STEPS = 4  # of each size
ENOUGH_SECONDS = 0.2  # a step that took longer is the last one


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
    """The seconds of an epoch's steps, from steps on noise: of more images the shorter they are."""
    code, hyper, spec = recipe.code, recipe.train, recipe.data
    own = None if code is None or code.data is None else own_images(code.data)
    shape = INPUT_SHAPES[spec.name] if own is None else tuple(own.images.shape[1:])
    n_items = (N_TRAIN[spec.name] if own is None else own.n_train) - spec.n_calibration - spec.n_holdout
    with threads(recipe.n_threads), torch.random.fork_rng(devices=[]):
        if code is not None and code.net is not None:
            model = own_network(code.net)
        else:
            model = build(recipe.net, n_classes=None if own is None else own.n_classes)
        state, passed = new_state(model.to(device), hyper), 0.0
        step = make_train_step(state, hyper, "eager")
        for size in sorted({min(n, hyper.batch_size) for n in (*SIZES, hyper.batch_size)}):
            if passed > ENOUGH_SECONDS:
                break
            images, labels = (
                torch.rand(size, *shape, device=device),
                torch.zeros(size, dtype=torch.int64, device=device),
            )
            times = []
            for _ in range(N_STEPS):
                began = time.monotonic()
                step(images, labels, 0.0, size)
                state.sums.tolist()  # waits for the device
                times.append(time.monotonic() - began)
            passed = min(times)  # the first warms up, and other programs may have interrupted any
            seconds_per_image = passed / size
    return seconds_per_image * n_items


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
