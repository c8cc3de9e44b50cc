"""Displays the progress of a run, and its accuracies at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from sipp.files import Values
from sipp_lab.runs.run_recipe import Progress
from sipp_lab.training.signals import Interrupted


def records_table(records: list[Values]) -> Table:
    """Test accuracy before -> after training and multiply-adds of one input, a row per method and keep."""
    seeds = sorted({record["seed"] for record in records})
    table = Table(box=box.SIMPLE_HEAD, title="test accuracy, pruned -> trained")
    for column in ("method", "keep", "multiply-adds", *(f"seed {seed}" for seed in seeds), "dead rows"):
        table.add_column(column, justify="left" if column == "method" else "right")
    lines: dict[tuple[str, int], dict[int, Values]] = {}
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


def _products(records: Iterable[Values]) -> str:
    """The mean number of multiply-adds of one input."""
    counts = [record["multiply_adds"] for record in records if record.get("multiply_adds") is not None]
    return f"{sum(counts) / len(counts):,.0f}" if counts else ""


def _cell(record: Values | None) -> str:
    if record is None:
        return ""
    before = f"{record['before']['top1']:.2%} -> " if record["before"] else ""
    return f"{before}{record['after']['top1']:.2%}"


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[Progress], None]]:
    """Yields a function that displays the progress of a run; a signal ends the command with its exit code."""
    try:
        with _display(console) as show:
            yield show
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(stop.exit_status) from None


@contextmanager
def _display(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A live line on a terminal, else one line per network."""
    if not console.is_terminal:
        yield lambda progress: _plain_line(console, progress)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"))
    with Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task("preparing", total=None)
        under_way: dict[str, int] = {}  # epochs of unfinished networks; several on Ray

        def show(progress: Progress) -> None:
            epoch = under_way[progress.stage] = 0 if progress.epoch is None else progress.epoch.epoch
            test = None if progress.epoch is None else progress.epoch.test
            text = f"{progress.stage}  {progress.n_done}/{progress.n_stages} networks"
            text += f"  epoch {epoch}/{progress.n_epochs}" if epoch else ""
            text += f"  test {test.top1:.2%}" if test is not None else ""
            total = progress.n_stages * progress.n_epochs
            n_epochs = progress.n_done * progress.n_epochs + sum(under_way.values())
            bars.update(task, description=text, total=total, completed=n_epochs)

        yield show


def _plain_line(console: Console, progress: Progress) -> None:
    if progress.epoch is None:
        console.print(f"{progress.stage}: {progress.n_done} of {progress.n_stages} networks done", highlight=False)
