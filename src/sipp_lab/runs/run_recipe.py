"""Runs a recipe: loads its data, opens its folder, trains its networks and writes their records."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from sipp.errors import OptionError
from sipp.files import Values
from sipp.results.checking import check_choice
from sipp.results.manifest import Origin
from sipp.results.run_records import EpochRow
from sipp_lab.parallel.on_ray import RayOptions, RunOnRay, check_ray, run_on_ray
from sipp_lab.parallel.processes import ALONE, Processes, from_leader
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs import store
from sipp_lab.runs.context import RunContext
from sipp_lab.runs.plan import plan
from sipp_lab.runs.reuse import reuse_networks
from sipp_lab.runs.train_networks import train_networks
from sipp_lab.training.setup import Device, code_version_of, device_named, load_feed, threads
from sipp_lab.training.signals import stop_on_signals

Engine = Literal["process", "ray"]

CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class Progress:
    """Progress of a run: the stage, its last epoch (None when the stage is finished), and the counts done so far."""

    stage: str
    epoch: EpochRow | None
    n_epochs: int
    n_done: int
    n_stages: int


@dataclass(frozen=True)
class FinishedRun:
    """The records of a run, and its folder."""

    folder: Path
    records: list[Values]
    n_made: int  # stages trained by this call


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
    processes: Processes = ALONE,
    engine: Engine = "process",
    ray: RayOptions | None = None,
    code_files: tuple[Path, ...] = (),
) -> FinishedRun:
    """Runs a recipe, or resumes it from where it was stopped, and returns all its records.

    Networks that other runs in `out` trained with the same data, code and device are copied, not trained again. With
    several processes, all call this with the same arguments, and only the leader writes to the folder. SIGTERM and
    Ctrl-C save a checkpoint after the current step and raise `Interrupted`. Engine "ray" trains several networks at
    once in separate processes, with the same records; `ray` says where (default: this machine), and its processes load
    the methods in `code_files`, which the caller has already loaded.
    """
    _check_engine(engine, ray, processes)
    # On Ray the GPUs may be on other machines, and this process trains nothing.
    target = torch.device("cuda") if engine == "ray" and device == "cuda" else device_named(device)
    names = [stage.name for stage in plan(recipe)]
    n_epochs = max(recipe.train.epochs, recipe.retraining.epochs)
    version = code_version_of(recipe)  # calls the user's own code, so do it before writing anything
    records: dict[str, Values] = {}
    with threads(recipe.n_threads), stop_on_signals() as stop_signal, ExitStack() as stack:
        place = torch.device("cpu") if engine == "ray" else target
        feed = load_feed(recipe, data_root=data_root, device=place, n_workers=n_workers)
        device_name = target.type if processes.world_size == 1 else f"{target.type} x {processes.world_size}"
        origin = Origin(data=feed.splits.digest, code=version, device=device_name)
        opened = store.open_run(out, config_of(recipe), origin, accept_changes=accept_changes)
        folder = from_leader(processes, lambda: stack.enter_context(opened))

        def show(stage: str, row: EpochRow | None) -> None:
            if on_progress is not None and processes.is_leader:
                on_progress(Progress(stage, row, n_epochs, len(records), len(names)))

        def add_records(done: list[str]) -> None:
            """Adds the records of finished stages, and rewrites all records in the order of the plan."""
            records.update(from_leader(processes, lambda: store.stage_records(folder, done)))
            from_leader(processes, lambda: store.write_records(folder, names, records))

        from_leader(processes, lambda: reuse_networks(folder, recipe, origin, accept_changes=accept_changes))
        add_records(names)
        n_before = len(records)
        if engine == "ray":
            job = RunOnRay(
                recipe=recipe,
                folder=folder.resolve(),
                data_root=data_root.resolve(),
                device="cuda" if target.type == "cuda" else "cpu",
                n_workers=n_workers,
                n_threads=torch.get_num_threads(),
                checkpoint_seconds=checkpoint_seconds,
                origin=origin,
                code=tuple(path.resolve() for path in code_files),
            )
            finished = run_on_ray(job, ray or RayOptions(), stop_signal)
        else:
            context = RunContext(recipe, folder, feed, stop_signal, checkpoint_seconds, show, processes)
            finished = train_networks(context)
        for stage in stack.enter_context(closing(finished)):  # closed before the lock is released
            add_records([stage.name])
            show(stage.name, None)
    return FinishedRun(folder, [records[name] for name in names if name in records], len(records) - n_before)


def _check_engine(engine: Engine, ray: RayOptions | None, processes: Processes) -> None:
    check_choice("engine", engine, get_args(Engine))
    if engine == "process" and ray is not None:
        raise OptionError(
            f"{ray} says how to use Ray, but the engine is 'process'", fix="pass engine='ray' (--engine ray)"
        )
    if engine == "ray":
        if processes.world_size > 1:
            raise OptionError(
                "engine 'ray' starts processes of its own", fix="run it without accelerate launch or torchrun"
            )
        check_ray(ray or RayOptions())
