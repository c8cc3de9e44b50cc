"""Runs recipes: loads their data, opens their folders, trains the networks that are missing, and writes the records."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from sipp.errors import OptionError
from sipp.progress import progress_bar, write_line
from sipp.results import Sheet, Table, shown, words
from sipp_lab.processes import from_leader, join_processes, leave_processes, n_processes, rank
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs.context import RunContext, code_version_of, device_named, load_feed, torch_settings
from sipp_lab.runs.folder import Values, is_done, open_run, records_of, write_records
from sipp_lab.runs.on_ray import RunOnRay, import_ray, train_on_ray
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.records import Origin
from sipp_lab.runs.stages import plan, remove_orphans, train_networks

CHECKPOINT_SECONDS = 30.0
RESUME = "what is done is kept: run the same command again to resume"


@dataclass(frozen=True)
@shown
class FinishedRun:
    """The records of a run, and its folder."""

    folder: Path
    records: list[Values]
    n_made: int  # networks trained by this call

    @property
    def sheet(self) -> Sheet:
        """Test accuracy before and after training and multiply-adds of one input, a row per method and keep."""
        seeds = sorted({record["seed"] for record in self.records})
        lines: dict[tuple[str, int], dict[int, Values]] = {}
        for record in self.records:
            lines.setdefault((record["method"] or "dense", record["level"]), {})[record["seed"]] = record
        rows = []
        for (method, _), by_seed in lines.items():
            found = list(by_seed.values())
            counts = [record["multiply_adds"] for record in found if record["multiply_adds"] is not None]
            products = f"{sum(counts) / len(counts):,.0f}" if counts else ""  # their mean
            dead = ", ".join(str(record["dead_rows"]) for record in found)
            accuracies = (_accuracy_words(by_seed.get(seed)) for seed in seeds)
            rows.append((method, f"{found[0]['keep']:.2%}", products, *accuracies, dead))
        columns = ("method", "keep", "multiply-adds", *(f"seed {seed}" for seed in seeds), "dead rows")
        title = f"{self.folder.name}: test accuracy, pruned -> trained"
        return Sheet(title, tables=(Table(columns, tuple(rows)),))


def _accuracy_words(record: Values | None) -> str:
    if record is None:
        return ""
    before = f"{record['before']['top1']:.2%} -> " if record["before"] else ""
    return f"{before}{record['after']['top1']:.2%}"


def work_done(runs: Sequence[FinishedRun]) -> str:
    """How many networks were trained now."""
    n_made = sum(one.n_made for one in runs)
    return f"{words.counted(n_made, 'network')} trained now" if n_made else "nothing left to do"


def run_each(recipes: Sequence[Recipe], how: RunOptions) -> list[FinishedRun] | None:
    """Runs the recipes in order as a command does, with a bar each. None in a process that only helps."""
    join_processes(cpu=device_named(how.device).type == "cpu")
    is_leader = rank() == 0
    if n_processes() > 1 and is_leader:
        write_line(f"{n_processes()} processes take part: each trains on its share of every batch")
    elif n_processes() == 1 and any(name.startswith("ACCELERATE_") for name in os.environ):
        write_line("1 process takes part; several on a CPU: torchrun --nproc-per-node 2 -m sipp run ...")
    try:
        done = [run(recipe, how, progress=True) for recipe in recipes]
    except (KeyboardInterrupt, SystemExit):
        write_line(RESUME)
        raise
    finally:
        leave_processes()
    return done if is_leader else None


def run(
    recipe: Recipe,
    how: RunOptions,
    *,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    progress: bool = False,
) -> FinishedRun:
    """Runs a recipe, or resumes it from where it was stopped, and returns all its records.

    Stop it in any way: finished networks stay, and the one under way goes on from its last checkpoint, which is made
    after an epoch if the last one is `checkpoint_seconds` old. With several processes, all call this with the same
    arguments, and only the leader writes. Ray trains several networks at once, with the same records.
    """
    on_ray = how.engine == "ray"
    if on_ray:
        if n_processes() > 1:
            raise OptionError("Ray starts processes of its own", fix="run it without torchrun or accelerate launch")
        import_ray()  # before any work
    # On Ray the GPUs may be on other machines, and this process trains nothing.
    device = torch.device("cuda") if on_ray and how.device == "cuda" else device_named(how.device)
    stages, version = plan(recipe), code_version_of(recipe)  # calls the user's own code before anything is written
    n_epochs = {stage: recipe.hyper_of(stage.method).epochs for stage in stages}
    with torch_settings(recipe.n_threads), ExitStack() as stack:
        feed = load_feed(recipe, how.data, torch.device("cpu") if on_ray else device)
        device_name = device.type if n_processes() == 1 else f"{device.type} x {n_processes()}"
        origin = Origin(data=feed.splits.digest, code=version, device=device_name)

        def begin() -> tuple[Path, int]:
            """The folder, and how many epochs of training are in its networks."""
            opened = open_run(how.out, config_of(recipe), origin, accept_changes=how.accept_changes)
            folder = stack.enter_context(opened)
            remove_orphans(recipe, folder)
            write_records(folder, stages)
            return folder, sum(n_epochs[stage] for stage in stages if is_done(folder, stage.name))

        folder, n_before = from_leader(begin)
        is_shown = progress and rank() == 0
        advance = stack.enter_context(progress_bar(f"{recipe.name}, epochs", sum(n_epochs.values()), shown=is_shown))
        advance(n_before)
        if on_ray:
            finished = train_on_ray(RunOnRay(recipe, folder, how, checkpoint_seconds, origin))
        else:
            finished = train_networks(RunContext(recipe, folder, feed, checkpoint_seconds, advance))
        n_made = 0
        for stage in stack.enter_context(closing(finished)):  # before the lock is released
            n_made += 1
            if on_ray:
                advance(n_epochs[stage])
            from_leader(lambda: write_records(folder, stages))
        return FinishedRun(folder, from_leader(lambda: records_of(folder, stages)), n_made)
