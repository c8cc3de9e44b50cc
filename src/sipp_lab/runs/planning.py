"""What a run still has to train, and how long that may take: a few training steps are timed, on noise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sipp.report import numbers
from sipp.results import Sheet, Table, shown, words
from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.splits import split_images
from sipp_lab.nets import INPUT_SHAPES
from sipp_lab.own_code import own_images
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs.context import RunContext
from sipp_lab.runs.folder import is_done, run_name
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.stages import plan
from sipp_lab.training.feed import Feed
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


@dataclass(frozen=True)
@shown
class Plan:
    """What is left to train of several runs, and how long that may take here."""

    runs: tuple[PlannedRun, ...]
    n_new: int
    n_epochs: int
    seconds: float

    @property
    def sheet(self) -> Sheet:
        rows = []
        for one in self.runs:
            counts = (f"{n:,}" for n in (one.n_all, one.n_there, one.n_new, one.n_epochs))
            rows.append((one.run, *counts, numbers.seconds(one.seconds)))
        columns = ("run", "networks", "there", "to train", "epochs", "time")
        networks, time_left = words.counted(self.n_new, "network"), numbers.seconds(self.seconds)
        left = f"{networks} and {self.n_epochs:,} epochs to train: about {time_left} here, one network after another"
        note = f"{left}; pruning, tests and reading images come on top"
        return Sheet("what is left to train", tables=(Table(columns, tuple(rows), texts=("time",)),), note=note)


def planned_runs(recipes: Sequence[Recipe], how: RunOptions) -> Plan:
    """What is left to train of each recipe: a few steps of each are timed."""
    runs = tuple(planned_run(recipe, out=how.out, device=how.device) for recipe in recipes)
    n_new, n_epochs = (sum(getattr(one, key) for one in runs) for key in ("n_new", "n_epochs"))
    return Plan(runs, n_new, n_epochs, sum(one.seconds for one in runs))


def planned_run(recipe: Recipe, *, out: Path, device: Device = "auto") -> PlannedRun:
    """What is left to train of a recipe, if the data, the code and the device are those of the networks there."""
    name, stages = run_name(config_of(recipe)), plan(recipe)
    new = [stage for stage in stages if not is_done(out / name, stage.name)]
    n_epochs = sum(recipe.hyper_of(stage.method).epochs for stage in new)
    spent = 0.0 if not new else n_epochs * _seconds_of_an_epoch(recipe, device_named(device))
    return PlannedRun(name, len(stages), len(stages) - len(new), len(new), n_epochs, spent)


def _seconds_of_an_epoch(recipe: Recipe, device: torch.device) -> float:
    """The seconds of an epoch's steps, from steps on noise: of more images the shorter they are."""
    spec, hyper = recipe.data, recipe.train.model_copy(update={"step": "eager"})
    own = None if recipe.code.data is None else own_images(recipe.code.data)
    shape = INPUT_SHAPES[spec.name] if own is None else tuple(own.images.shape[1:])
    n_items = (N_TRAIN[spec.name] if own is None else own.n_train) - spec.n_calibration - spec.n_holdout
    n_classes = (1000 if spec.name == "imagenet" else 10) if own is None else own.n_classes
    noise = ImageSet("noise", torch.rand(2, *shape), torch.zeros(2, dtype=torch.int64), 1, n_classes)
    feed = Feed(noise, split_images(noise, n_calibration=0, n_holdout=0), device)
    context = RunContext(recipe, Path(), feed, checkpoint_seconds=0.0)
    with threads(recipe.n_threads), torch.random.fork_rng(devices=[]):
        state, passed, seconds = new_state(context.module_of(context.initial_network(0)), hyper), 0.0, 0.0
        step = make_train_step(state, feed, hyper)
        for size in sorted({min(n, hyper.batch_size) for n in (*SIZES, hyper.batch_size)}):
            if passed > ENOUGH_SECONDS:
                break
            images = torch.rand(size, *shape, device=device)
            labels, times = torch.zeros(size, dtype=torch.int64, device=device), []
            for _ in range(N_STEPS):
                began = time.monotonic()
                step(images, labels, 0.0, size)
                state.sums.tolist()  # waits for the device
                times.append(time.monotonic() - began)
            passed = min(times)  # the first warms up, and other programs may have interrupted any
            seconds = passed / size * n_items
    return seconds
