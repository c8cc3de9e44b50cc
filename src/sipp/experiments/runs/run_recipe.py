"""A recipe in, a finished run out: data, folder, pipeline and records put together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from sipp.errors import OptionError
from sipp.experiments.parallel.on_ray import Job, RayOptions, check_ray, run_on_ray
from sipp.experiments.parallel.processes import ALONE, Team, from_leader
from sipp.experiments.pipelines import plan, run_units
from sipp.experiments.recipes import Recipe, config_of
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.stages import Work
from sipp.experiments.training.loop import EpochRow
from sipp.experiments.training.setup import Device, device_of, feed_of, hyper_of, threads
from sipp.experiments.training.signals import stop_on_signals
from sipp.storage.files import Values

Engine = Literal["process", "ray"]
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
    engine: Engine = "process",
    ray: RayOptions | None = None,
) -> Finished:
    """All records of the recipe's run, which goes on from wherever it was left; a finished one is only read.

    The processes of a team call this with the same arguments; only the leader touches the folder. SIGTERM and Ctrl-C
    save a checkpoint after the step under way and raise `Interrupted`. Engine "ray" makes several networks at once, in
    processes of their own, and gives the same records; `ray` says where (without it: on this machine).
    """
    _check_engine(engine, ray, team)
    # On Ray the GPUs may be those of other machines, and this process trains nothing.
    target = torch.device("cuda") if engine == "ray" and device == "cuda" else device_of(device)
    units = plan(recipe)
    names = [unit.stage for unit in units]
    with threads(recipe.n_threads), stop_on_signals() as wish:
        place = torch.device("cpu") if engine == "ray" else target
        feed = feed_of(recipe, data_root=data_root, device=place, n_workers=n_workers)
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

            if engine == "ray":
                kind: Literal["cpu", "cuda"] = "cuda" if target.type == "cuda" else "cpu"
                folders, n_threads = (store.folder.resolve(), data_root.resolve()), torch.get_num_threads()
                job = Job(recipe, *folders, kind, n_workers, n_threads, checkpoint_seconds, origin)
                made = run_on_ray(job, store, ray or RayOptions(), wish, show)
            else:
                work = Work(recipe.net, feed, hyper_of(recipe), wish, checkpoint_seconds, show, team)
                made = run_units(recipe, store, work)
            for unit in stack.enter_context(closing(made)):  # closed before the lock is given back
                records = from_leader(team, lambda: runs.write_records(store, names))
                n_done = len(records)
                show(unit.stage, None)
            return Finished(store.folder, records, n_done - n_before)


def _check_engine(engine: Engine, ray: RayOptions | None, team: Team) -> None:
    if engine not in get_args(Engine):
        raise OptionError(f"engine={engine!r} must be one of {', '.join(get_args(Engine))}")
    if engine == "process" and ray is not None:
        raise OptionError(f"{ray} says how to use Ray, but the engine is 'process'; pass engine='ray' (--engine ray)")
    if engine == "ray":
        if team.count > 1:
            raise OptionError("engine 'ray' starts processes of its own: run it without accelerate launch or torchrun")
        check_ray(ray or RayOptions())


def list_runs(out: Path) -> list[Listed]:
    """Every run below `out`, by name."""
    return [look_at(manifest.parent) for manifest in sorted(out.glob(f"*/{runs.MANIFEST}"))]


def look_at(folder: Path) -> Listed:
    """How far the run in this folder is."""
    begun, n_done = runs.read_begun(folder), len(runs.read_records(folder))
    state: RunState = "running" if runs.is_locked(folder) else "finished" if n_done == begun.n_stages else "stopped"
    return Listed(folder, begun.recipe, begun.pipeline, n_done, begun.n_stages, state, begun.n_origins)
