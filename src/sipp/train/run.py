"""A recipe in, a finished run out: data, folder, pipeline and records put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sipp.data import ImageSet, index_folders, load_cifar10, load_digits, make_splits, split_images
from sipp.errors import OptionError
from sipp.recipes import Recipe, config_of
from sipp.recipes.schema import N_CLASSES
from sipp.train import store as runs
from sipp.train.feed import Feed
from sipp.train.files import Values, read_json
from sipp.train.loop import EpochRow, Hyper
from sipp.train.pipelines import plan, run_units
from sipp.train.schedule import Schedule
from sipp.train.signals import stop_on_signals
from sipp.train.stages import Work
from sipp.train.team import ALONE, Team, from_leader

Device = Literal["auto", "cpu", "cuda"]
RunState = Literal["running", "finished", "stopped"]

CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class Progress:
    """What a display shows: the stage, its newest epoch (None when a stage was finished), and how far the run is."""

    stage: str
    epoch: EpochRow | None
    n_epochs: int
    n_done: int
    n_stages: int


@dataclass(frozen=True)
class Finished:
    """The records of a run and where they are."""

    folder: Path
    records: list[Values]
    n_made: int  # stages that were done now, not before


@dataclass(frozen=True)
class Listed:
    """One run folder, as `sipp runs` shows it."""

    folder: Path
    recipe: str
    pipeline: str
    n_done: int
    n_stages: int
    state: RunState
    n_origins: int  # above 1: it was resumed with other data, code or device


def hyper_of(recipe: Recipe) -> Hyper:
    """The recipe's hyperparameters as the loop takes them."""
    spec = recipe.train
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
    )


def feed_of(recipe: Recipe, *, data_root: Path, device: torch.device, n_workers: int = 0) -> Feed:
    """The recipe's data with its splits; images that fit are put on the device as a whole."""
    spec = recipe.data
    n_classes = N_CLASSES[spec.name]
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
    data: ImageSet = load_digits() if spec.name == "digits" else load_cifar10(data_root)
    splits = split_images(data, n_calibration=spec.n_calibration, n_holdout=spec.n_holdout, seed=spec.split_seed)
    return Feed(data.to(device), splits, n_classes, device, n_workers, recipe.train.channels_last)


def device_of(name: Device) -> torch.device:
    """The device of this name; "auto" is a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise OptionError("device 'cuda' was asked for, but torch finds no GPU here; use 'cpu' or 'auto'")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and has_gpu) else "cpu")


def run(
    recipe: Recipe,
    *,
    out: Path = Path("runs"),
    data_root: Path = Path("data"),
    device: Device = "auto",
    n_workers: int = 0,
    accept_changes: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    on_progress: Callable[[Progress], None] | None = None,
    team: Team = ALONE,
) -> Finished:
    """All records of the recipe's run, which goes on from wherever it was left; a finished one is only read.

    The processes of a team call this with the same arguments; only the leader touches the folder. SIGTERM and Ctrl-C
    save a checkpoint after the step under way and raise `Interrupted`.
    """
    target = device_of(device)
    units = plan(recipe)
    names = [unit.stage for unit in units]
    with _threads(recipe.n_threads), stop_on_signals() as wish:
        feed = feed_of(recipe, data_root=data_root, device=target, n_workers=n_workers)
        device_name = target.type if team.count == 1 else f"{target.type} x {team.count}"
        origin = runs.Origin(data=feed.splits.digest, code=runs.code_version(), device=device_name)
        with ExitStack() as stack:
            opened = runs.open_run(out, config_of(recipe), origin, accept_changes=accept_changes)
            store = from_leader(team, lambda: stack.enter_context(opened))
            records = from_leader(team, lambda: runs.write_records(store, names))
            n_done = n_before = len(records)

            def show(stage: str, row: EpochRow | None) -> None:
                if on_progress is not None and team.leads:
                    on_progress(Progress(stage, row, recipe.train.epochs, n_done, len(units)))

            work = Work(recipe.net, feed, hyper_of(recipe), wish, checkpoint_seconds, show, team)
            for unit in run_units(recipe, store, work):
                records = from_leader(team, lambda: runs.write_records(store, names))
                n_done = len(records)
                show(unit.stage, None)
            return Finished(store.folder, records, n_done - n_before)


def list_runs(out: Path) -> list[Listed]:
    """Every run below `out`, by name."""
    found = []
    for manifest in sorted(out.glob(f"*/{runs.MANIFEST}")):
        folder = manifest.parent
        values = read_json(manifest)
        config = values["config"]
        n_stages = config["repetitions"] * (1 + len(config["prune"]["methods"]) * config["prune"]["levels"])
        n_done = len(runs.read_records(folder))
        state: RunState = "running" if runs.is_locked(folder) else "finished" if n_done == n_stages else "stopped"
        found.append(
            Listed(folder, config["name"], config["pipeline"], n_done, n_stages, state, len(values["origins"]))
        )
    return found


@contextmanager
def _threads(n_threads: int | None) -> Iterator[None]:
    """A stretch with this many threads in torch; None leaves them as they are."""
    before = torch.get_num_threads()
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
