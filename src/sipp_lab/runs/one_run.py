"""Runs a recipe: loads its data, opens its folder, trains its networks and writes their records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from sipp.errors import OptionError
from sipp_lab.parallel.on_ray import RayOptions, RunOnRay, check_ray, run_on_ray
from sipp_lab.parallel.processes import ALONE, Processes, from_leader
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs.context import RunContext
from sipp_lab.runs.folder import FINAL, Values, is_done, load_values, open_run, write_records
from sipp_lab.runs.records import Origin, Stage
from sipp_lab.runs.stages import plan, train_networks
from sipp_lab.training.feed import n_steps
from sipp_lab.training.loop import TrainState
from sipp_lab.training.setup import Device, code_version_of, device_named, load_feed, threads

CHECKPOINT_SECONDS = 30.0
SHOW_SECONDS = 0.2  # between two calls of `on_progress`


@dataclass(frozen=True)
class Progress:
    """How far a run is: the stage under way or just finished, its epochs, and the networks done so far."""

    stage: str
    n_done: int
    n_stages: int
    epochs: float = 0.0  # of the stage under way
    n_epochs: int = 0
    top1: float | None = None  # at the last evaluation
    is_end: bool = False  # the stage is finished


@dataclass(frozen=True)
class FinishedRun:
    """The records of a run, and its folder."""

    folder: Path
    records: list[Values]
    n_made: int  # networks trained by this call


def run(
    recipe: Recipe,
    *,
    out: Path = Path("runs"),
    data_root: Path = Path("data"),
    device: Device = "auto",
    accept_changes: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    processes: Processes = ALONE,
    ray: RayOptions | None = None,
) -> FinishedRun:
    """Runs a recipe, or resumes it from where it was stopped, and returns all its records.

    Stop it in any way: finished networks stay, and the one under way goes on from its last checkpoint, which is made
    after an epoch if the last one is `checkpoint_seconds` old. With several processes, all call this with the same
    arguments, and only the leader writes. `ray` trains several networks at once, with the same records.
    """
    if ray is not None:
        if processes.world_size > 1:
            raise OptionError("Ray starts processes of its own", fix="run it without torchrun or accelerate launch")
        check_ray(ray)
    # On Ray the GPUs may be on other machines, and this process trains nothing.
    target = torch.device("cuda") if ray is not None and device == "cuda" else device_named(device)
    stages, version = plan(recipe), code_version_of(recipe)  # calls the user's own code before anything is written
    with threads(recipe.n_threads), ExitStack() as stack:
        feed = load_feed(recipe, data_root=data_root, device=torch.device("cpu") if ray is not None else target)
        device_name = target.type if processes.world_size == 1 else f"{target.type} x {processes.world_size}"
        origin = Origin(data=feed.splits.digest, code=version, device=device_name)
        opened = open_run(out, config_of(recipe), origin, accept_changes=accept_changes)
        folder = from_leader(processes, lambda: stack.enter_context(opened))
        records: dict[Stage, Values] = {}
        n_made, shown_at = 0, 0.0

        def add(done: list[Stage]) -> None:
            """Adds the records of these stages that are finished, and rewrites all in the order of the plan."""
            for stage in done:
                if is_done(folder, stage.name):
                    records[stage] = load_values(folder / stage.name / FINAL)["record"]
            write_records(folder, [records[stage] for stage in stages if stage in records])

        def show(stage: Stage, state: TrainState | None) -> None:
            nonlocal shown_at
            if not processes.is_leader or (state is not None and time.monotonic() - shown_at < SHOW_SECONDS):
                return
            shown_at, hyper = time.monotonic(), recipe.hyper_of(stage.method)
            epochs = 0.0 if state is None else state.epoch + state.step / n_steps(feed, hyper)
            tests = [] if state is None else [row.test.top1 for row in state.rows if row.test is not None]
            last = tests[-1] if tests else None
            on_progress(Progress(stage.name, len(records), len(stages), epochs, hyper.epochs, last, state is None))

        if processes.is_leader:
            add(stages)
            if todo := [stage for stage in stages if stage not in records]:
                n_epochs = recipe.hyper_of(todo[0].method).epochs
                on_progress(Progress(todo[0].name, len(records), len(stages), n_epochs=n_epochs))
        finished: Iterator[Stage]
        if ray is not None:
            finished = run_on_ray(RunOnRay(recipe, folder, data_root, target.type, checkpoint_seconds, origin), ray)
        else:
            finished = train_networks(RunContext(recipe, folder, feed, checkpoint_seconds, show, processes))
        for stage in stack.enter_context(closing(finished)):  # type: ignore[type-var]  # before the lock is released
            if processes.is_leader:
                add([stage])
            n_made += 1
            show(stage, None)
    return FinishedRun(folder, [records[stage] for stage in stages if stage in records], n_made)
