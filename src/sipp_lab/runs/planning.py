"""What a run still has to train, and how long the training alone may take: a few steps are timed, on noise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sipp.report import numbers
from sipp.results import Sheet, Table, shown, words
from sipp_lab.data.feed import Feed, n_left, split_images
from sipp_lab.data.images import ImageSet
from sipp_lab.nets import INPUT_SHAPES
from sipp_lab.own_code import own_images
from sipp_lab.recipes import Recipe, config_of, is_own
from sipp_lab.recipes.schema import Training
from sipp_lab.runs.context import RunContext, device_named, torch_settings
from sipp_lab.runs.folder import run_name
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.stages import left_to_train, plan
from sipp_lab.training import new_state, set_rate, train_step

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
    seconds: float  # of the steps of these epochs alone, one network after another


@dataclass(frozen=True)
@shown
class Plan:
    """What is left to train of several runs, and how long the training alone may take here."""

    runs: tuple[PlannedRun, ...]

    ALSO_IN_JSON = ("n_new", "n_epochs", "seconds")

    @property
    def n_new(self) -> int:
        return sum(one.n_new for one in self.runs)

    @property
    def n_epochs(self) -> int:
        return sum(one.n_epochs for one in self.runs)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.runs)

    @property
    def sheet(self) -> Sheet:
        rows = []
        for one in self.runs:
            counts = (f"{n:,}" for n in (one.n_all, one.n_there, one.n_new, one.n_epochs))
            rows.append((one.run, *counts, numbers.seconds(one.seconds)))
        columns = ("run", "networks", "there", "to train", "epochs", "training")
        left = f"{words.counted(self.n_new, 'network')} and {self.n_epochs:,} epochs to train"
        note = f"{left}: about {numbers.seconds(self.seconds)} here for the training alone, one network after another; "
        note += "pruning, tests and reading images come on top, and take longer than that for small networks"
        table = Table(columns, tuple(rows), texts=("training",))
        return Sheet("what is left to train", tables=(table,), note=note)


def planned_run(recipe: Recipe, how: RunOptions) -> PlannedRun:
    """What is left to train of a recipe, if the data, the code and the device are those of the networks there.

    A few steps are timed: of the dense network, and of a pruned one if it is trained otherwise.
    """
    name, spec, n_all = run_name(config_of(recipe)), recipe.data, len(plan(recipe))
    own = own_images(spec.name) if is_own(spec.name) else None
    n_train = N_TRAIN[spec.name] if own is None else own.n_train
    n_items = n_left(n_train, n_calibration=spec.n_calibration, n_holdout=spec.n_holdout)
    shape = INPUT_SHAPES[spec.name] if own is None else tuple(own.images.shape[1:])
    n_classes = (1000 if spec.name == "imagenet" else 10) if own is None else own.n_classes
    noise = ImageSet("noise", torch.rand(2, *shape), torch.zeros(2, dtype=torch.int64), 1, n_classes)
    feed = Feed(noise, split_images(noise, n_calibration=0, n_holdout=0), device_named(how.device))
    context = RunContext(recipe, Path(), feed, checkpoint_seconds=0.0)
    new = left_to_train(recipe, how.out / name)
    hypers = [recipe.hyper_of(stage.method) for stage in new]
    with torch_settings(recipe.n_threads), torch.random.fork_rng(devices=[]):
        of_an_image = {hyper: _seconds_of_an_image(context, hyper, shape) for hyper in set(hypers)}
    seconds = n_items * sum(hyper.epochs * of_an_image[hyper] for hyper in hypers)
    return PlannedRun(name, n_all, n_all - len(new), len(new), sum(hyper.epochs for hyper in hypers), seconds)


def _seconds_of_an_image(context: RunContext, hyper: Training, shape: Sequence[int]) -> float:
    """The seconds of training on one image, from steps on noise: of more images the shorter they are."""
    device, network = context.feed.device, context.initial_network(0)
    state, passed, seconds = new_state(context.module_of(network, hyper), hyper), 0.0, 0.0
    teacher = None if hyper.distill is None else context.module_of(network, hyper).eval()
    set_rate(state.optimizer, 0.0)
    for size in sorted({min(n, hyper.batch_size) for n in (*SIZES, hyper.batch_size)}):
        if passed > ENOUGH_SECONDS:
            break
        images, labels = torch.rand(size, *shape, device=device), torch.zeros(size, dtype=torch.int64, device=device)
        times = []
        for _ in range(N_STEPS):
            began = time.monotonic()
            train_step(state, hyper, images, labels, size, teacher)
            state.sums.tolist()  # waits for the device
            times.append(time.monotonic() - began)
        passed = min(times)  # the first warms up, and other programs may have interrupted any
        seconds = passed / size
    return seconds
