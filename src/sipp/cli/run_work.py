"""What `sipp run` and `sipp study` share: their options, the work on recipes, how far it is, and tables of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from sipp.cli.options import DEFAULT_ROOT, Device, out
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.progress import progress_bar, write_line
from sipp.results import Option, words

Record = dict[str, Any]
Recipe = Any  # of the laboratory, which imports torch

UNITS = 1000  # of progress in a network
RESUME = "what is done is kept: run the same command again to resume"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where runs are kept, and how their networks are trained."""

    data: Annotated[Path, Option("Folder with cifar-10-batches-bin/, mnist/ or imagenet/.", "Model and data")] = (
        DEFAULT_ROOT
    )
    code: list[Path] | None = None
    out: Annotated[Path, out("Folder that holds one folder per run; other files in it are left alone.")] = Path("runs")
    accept_changes: Annotated[bool, out("Resume even though data, code or device changed.")] = False
    device: Device = "auto"
    engine: Annotated[
        Literal["process", "ray"],
        Option(
            "Train one network after another in this process, or several at once on Ray; the records are the same.",
            "Machine",
        ),
    ] = "process"
    at_once: Annotated[
        int | None,
        Option("Ray: how many networks at once; default: as many as the CPUs or GPUs allow.", "Machine", least=1),
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            "Ray: a running cluster (auto, HOST:PORT); --out and --data must be on a disk all machines share.",
            "Machine",
        ),
    ] = None


def run_recipes(recipes: Sequence[Recipe], how: RunOptions) -> list[Any] | None:
    """Runs the recipes in order. None in a process that only helps."""
    from sipp_lab.parallel.on_ray import LOCAL, RayOptions
    from sipp_lab.parallel.processes import join_processes, leave_processes
    from sipp_lab.runs.running import run
    from sipp_lab.runs.stages import plan
    from sipp_lab.training.setup import device_named

    if how.engine != "ray" and (how.ray_address or how.at_once):
        raise OptionError("--ray-address and --at-once are for Ray", fix="add --engine ray")
    ray = RayOptions(how.ray_address or LOCAL, how.at_once, tuple(how.code or ())) if how.engine == "ray" else None
    processes = join_processes(cpu=device_named(how.device).type == "cpu")
    if processes.world_size > 1 and processes.is_leader:
        write_line(f"{processes.world_size} processes take part: each trains on its share of every batch")
    elif processes.world_size == 1 and any(name.startswith("ACCELERATE_") for name in os.environ):
        write_line("1 process takes part; several on a CPU: torchrun --nproc-per-node 2 -m sipp run ...")
    done = []
    try:
        for recipe in recipes:
            n_units = UNITS * len(plan(recipe))
            with progress_bar(recipe.name, n_units, shown=processes.is_leader, in_percent=True) as advance:
                done.append(
                    run(
                        recipe, out=how.out, data_root=how.data, device=how.device, on_progress=_shown(advance),
                        accept_changes=how.accept_changes, processes=processes, ray=ray,
                    )
                )  # fmt: skip
    except (KeyboardInterrupt, SystemExit):
        typer.echo(RESUME, err=True)
        raise
    finally:
        leave_processes(processes)
    return done if processes.is_leader else None


def plan_of(recipes: Sequence[Recipe], how: RunOptions, values: Record, *notes: str) -> Answer:
    """What is left to train in each run, and how long that may take here: a few steps of each are timed."""
    from sipp.report import numbers
    from sipp_lab.runs.planning import planned_run

    planned = [planned_run(recipe, out=how.out, device=how.device) for recipe in recipes]
    table = words.plain_table("run", "networks", "there", "to train", "epochs", "time", texts=("time",))
    for one in planned:
        counts = (f"{n:,}" for n in (one.n_all, one.n_there, one.n_new, one.n_epochs))
        table.add_row(one.run, *counts, numbers.seconds(one.seconds))
    sums = {key: sum(getattr(one, key) for one in planned) for key in ("n_new", "n_epochs", "seconds")}
    networks = words.counted(sums["n_new"], "network")
    left = f"{networks} and {sums['n_epochs']:,} epochs to train: about {numbers.seconds(sums['seconds'])}"
    note = "one network after another; pruning, tests and reading images come on top"
    runs = [vars(one) for one in planned]
    return Answer([table, f"{left} here, {note}", *notes], {**values, "runs": runs, **sums})


def _shown(advance: Callable[[int], None]) -> Callable[[Any], None]:
    """Advances the bar to where a run is, which says so after each network and now and then in between."""
    at = 0

    def show(progress: Any) -> None:
        nonlocal at
        share = 0.0 if progress.is_end or not progress.n_epochs else progress.epochs / progress.n_epochs
        now = max(at, int(UNITS * (progress.n_done + share)))
        advance(now - at)
        at = now

    return show


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
