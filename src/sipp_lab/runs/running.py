"""Runs recipes: loads their data, opens their folders, trains their networks and writes their records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from sipp.errors import OptionError
from sipp.progress import Advance, progress_bar, write_line
from sipp_lab.parallel.on_ray import RunOnRay, import_ray, run_on_ray
from sipp_lab.parallel.processes import ALONE, Processes, from_leader, join_processes, leave_processes
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs.context import RunContext
from sipp_lab.runs.folder import FINAL, Values, is_done, load_values, open_run, write_records
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.records import Origin, Stage
from sipp_lab.runs.stages import plan, remove_orphans, train_networks
from sipp_lab.training.feed import n_steps
from sipp_lab.training.loop import TrainState
from sipp_lab.training.setup import Device, code_version_of, device_named, load_feed, threads

CHECKPOINT_SECONDS = 30.0
SHOW_SECONDS = 0.2  # between two calls of `on_progress`
UNITS = 1000  # of progress in a network
RESUME = "what is done is kept: run the same command again to resume"


@dataclass(frozen=True)
class FinishedRun:
    """The records of a run, and its folder."""

    folder: Path
    records: list[Values]
    n_made: int  # networks trained by this call


def run_each(recipes: Sequence[Recipe], how: RunOptions) -> list[FinishedRun] | None:
    """Runs the recipes in order as a command does, with a bar each. None in a process that only helps."""
    processes = join_processes(cpu=device_named(how.device).type == "cpu")
    if processes.world_size > 1 and processes.is_leader:
        write_line(f"{processes.world_size} processes take part: each trains on its share of every batch")
    elif processes.world_size == 1 and any(name.startswith("ACCELERATE_") for name in os.environ):
        write_line("1 process takes part; several on a CPU: torchrun --nproc-per-node 2 -m sipp run ...")
    done, ray = [], how if how.engine == "ray" else None
    try:
        for recipe in recipes:
            n_units = UNITS * len(plan(recipe))
            with progress_bar(recipe.name, n_units, shown=processes.is_leader, in_percent=True) as advance:
                done.append(
                    run(
                        recipe, out=how.out, data_root=how.data, device=how.device, on_progress=moving(advance),
                        accept_changes=how.accept_changes, processes=processes, ray=ray,
                    )
                )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):
        write_line(RESUME)
        raise
    finally:
        leave_processes(processes)
    return done if processes.is_leader else None


def moving(advance: Advance) -> Callable[[float], None]:
    """Advances a bar of `UNITS` for each network to the number of networks done."""
    at = 0

    def show(n_done: float) -> None:
        nonlocal at
        now = max(at, int(UNITS * n_done))
        advance(now - at)
        at = now

    return show


def run(
    recipe: Recipe,
    *,
    out: Path = Path("runs"),
    data_root: Path = Path("data"),
    device: Device = "auto",
    accept_changes: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    on_progress: Callable[[float], None] = lambda n_done: None,
    processes: Processes = ALONE,
    ray: RunOptions | None = None,
) -> FinishedRun:
    """Runs a recipe, or resumes it from where it was stopped, and returns all its records.

    Stop it in any way: finished networks stay, and the one under way goes on from its last checkpoint, which is made
    after an epoch if the last one is `checkpoint_seconds` old. `on_progress` gets the number of networks done, with
    the share of the one under way. With several processes, all call this with the same arguments, and only the leader
    writes. `ray` (its address, how many at once, code) trains several networks at once, with the same records.
    """
    if ray is not None:
        if processes.world_size > 1:
            raise OptionError("Ray starts processes of its own", fix="run it without torchrun or accelerate launch")
        import_ray()  # before any work
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

        def show(stage: Stage, state: TrainState) -> None:
            nonlocal shown_at
            if processes.is_leader and time.monotonic() - shown_at >= SHOW_SECONDS:
                shown_at, hyper = time.monotonic(), recipe.hyper_of(stage.method)
                on_progress(len(records) + (state.epoch + state.step / n_steps(feed, hyper)) / hyper.epochs)

        def begin() -> None:
            remove_orphans(recipe, folder)
            add(stages)
            on_progress(len(records))

        from_leader(processes, begin)
        finished: Iterator[Stage]
        if ray is not None:
            job = RunOnRay(recipe, folder, data_root, target.type, checkpoint_seconds, origin)
            finished = run_on_ray(job, ray)
        else:
            finished = train_networks(RunContext(recipe, folder, feed, checkpoint_seconds, show, processes))
        for stage in stack.enter_context(closing(finished)):  # type: ignore[type-var]  # before the lock is released
            n_made += 1
            if processes.is_leader:
                add([stage])
                on_progress(len(records))
    return FinishedRun(folder, [records[stage] for stage in stages if stage in records], n_made)
