"""Runs the recipes of `sipp run` and `sipp study`, in this process, in several, or on Ray, and shows how far it is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress as Bars,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from sipp.cli.options import RunOptions
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.progress import QUIET_S, write_line
from sipp.report import seconds
from sipp.results import words
from sipp_lab.parallel.on_ray import LOCAL, RayOptions
from sipp_lab.parallel.processes import Processes, join_processes, leave_processes
from sipp_lab.recipes import Recipe
from sipp_lab.runs.planning import planned_run, total_of
from sipp_lab.runs.running import FinishedRun, Progress, run as run_recipe
from sipp_lab.training.setup import device_named

Record = dict[str, Any]

RESUME = "what is done is kept: run the same command again to resume"


def run_recipes(recipes: Sequence[Recipe], how: RunOptions) -> list[FinishedRun] | None:
    """Runs the recipes in order. None in a process that only helps."""
    if how.engine != "ray" and (how.ray_address or how.at_once):
        raise OptionError("--ray-address and --at-once are for Ray", fix="add --engine ray")
    ray = RayOptions(how.ray_address or LOCAL, how.at_once, tuple(how.code or ())) if how.engine == "ray" else None
    processes = join_processes(cpu=device_named(how.device).type == "cpu")
    _say_how_many(processes)
    try:
        with show_progress(Console(quiet=not processes.is_leader)) as on_progress:
            done = [
                run_recipe(
                    recipe,
                    out=how.out,
                    data_root=how.data,
                    device=how.device,
                    accept_changes=how.accept_changes,
                    on_progress=on_progress,
                    processes=processes,
                    ray=ray,
                )
                for recipe in recipes
            ]
    except (KeyboardInterrupt, SystemExit):
        typer.echo(RESUME, err=True)
        raise
    finally:
        leave_processes(processes)
    return done if processes.is_leader else None


def _say_how_many(processes: Processes) -> None:
    """Says how many processes take part, if somebody tried to start several."""
    if processes.world_size > 1 and processes.is_leader:
        write_line(f"{processes.world_size} processes take part: each trains on its share of every batch")
    elif processes.world_size == 1 and any(name.startswith("ACCELERATE_") for name in os.environ):
        write_line("1 process takes part; several on a CPU: torchrun --nproc-per-node 2 -m sipp run ...")


# --- dry runs ---------------------------------------------------------------------------------------------------------


def dry_run(recipes: Sequence[Recipe], how: RunOptions, values: Record, *notes: str) -> Answer:
    """What is left to train in each run, and how long that may take here: a few steps of each are timed."""
    planned = [planned_run(recipe, out=how.out, device=how.device) for recipe in recipes]
    table = words.plain_table("run", "networks", "there", "to train", "epochs", "time", texts=("time",))
    for one in planned:
        table.add_row(
            one.run, *(f"{n:,}" for n in (one.n_all, one.n_there, one.n_new, one.n_epochs)), seconds(one.seconds)
        )
    total = total_of(planned)
    networks = words.counted(total.n_new, "network")
    left = f"{networks} and {total.n_epochs:,} epochs to train: about {seconds(total.seconds)} here"
    note = "one network after another; pruning, tests and reading images come on top"
    runs = [vars(one) for one in planned]
    sums = {"n_new": total.n_new, "n_epochs": total.n_epochs, "seconds": total.seconds}
    return Answer([table, f"{left}, {note}", *notes], {**values, "runs": runs, **sums})


# --- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Gives a function that displays the progress of a run: a live line on a terminal, else a line now and then."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task("preparing", total=None)

        def show(progress: Progress) -> None:
            share = progress.epochs / progress.n_epochs if progress.n_epochs else 0.0
            done = progress.n_done + (0.0 if progress.is_end else share)
            bars.update(task, description=_words(progress), total=progress.n_stages, completed=done)

        yield show


def _lines(console: Console) -> Callable[[Progress], None]:
    """A line when a network is done, and at least one in `QUIET_S` seconds."""
    last = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last
        if progress.is_end or time.monotonic() - last >= QUIET_S:
            last = time.monotonic()
            console.print(_words(progress), highlight=False, soft_wrap=True)
            sys.stdout.flush()

    return show


def _words(progress: Progress) -> str:
    """seed0.dense: epoch 2.5 of 182, test 45.30 %; 0 of 12 networks done."""
    done = f"{progress.n_done} of {progress.n_stages} networks done"
    if progress.is_end:
        return f"{progress.stage}: {done}"
    test = "" if progress.top1 is None else f", test {progress.top1:.2%}"
    return f"{progress.stage}: epoch {progress.epochs:.1f} of {progress.n_epochs}{test}; {done}"


# --- results ----------------------------------------------------------------------------------------------------------


def records_table(records: list[Record]) -> Table:
    """Test accuracy before -> after training and multiply-adds of one input, a row per method and keep."""
    seeds = sorted({record["seed"] for record in records})
    table = Table(box=box.SIMPLE_HEAD, title="test accuracy, pruned -> trained")
    for column in ("method", "keep", "multiply-adds", *(f"seed {seed}" for seed in seeds), "dead rows"):
        table.add_column(column, justify="left" if column == "method" else "right")
    lines: dict[tuple[str, int], dict[int, Record]] = {}
    for record in records:
        lines.setdefault((record["method"] or "dense", record["level"]), {})[record["seed"]] = record
    for (method, _), by_seed in lines.items():
        first = next(iter(by_seed.values()))
        cells = [_cell(by_seed.get(seed)) for seed in seeds]
        dead = ", ".join(str(record["dead_rows"]) for record in by_seed.values())
        table.add_row(method, f"{first['keep']:.2%}", _products(by_seed.values()), *cells, dead)
    return table


def work_done(n_trained: int) -> str:
    """How many networks were trained by this command."""
    return f"{n_trained} networks trained now" if n_trained else "nothing left to do"


def _products(records: Iterable[Record]) -> str:
    """The mean number of multiply-adds of one input."""
    counts = [record["multiply_adds"] for record in records if record.get("multiply_adds") is not None]
    return f"{sum(counts) / len(counts):,.0f}" if counts else ""


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    before = f"{record['before']['top1']:.2%} -> " if record["before"] else ""
    return f"{before}{record['after']['top1']:.2%}"
