"""The command `sipp run`: a recipe's experiments, stopped and resumed at will."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from sipp.cli.errors import at
from sipp.cli.files import refuse_inputs
from sipp.cli.options import DEFAULT_ROOT, DEFAULT_RUNS, Device
from sipp.cli.output import Json, print_json

if TYPE_CHECKING:
    from sipp.experiments.recipes import Recipe
    from sipp.experiments.runs.run_recipe import Finished, Progress
    from sipp.storage.files import Values

PROCESSES = "WORLD_SIZE"  # set by accelerate launch and torchrun

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value: train.epochs=10.")
]
Out = Annotated[Path, typer.Option(help="Folder that holds one folder per run; what is no run stays as it is.")]
Data = Annotated[Path, typer.Option(help="Folder with cifar-10-batches-bin/ or imagenet/.")]
Workers = Annotated[int, typer.Option(help="Processes that decode image files.", min=0)]
AcceptChanges = Annotated[bool, typer.Option("--accept-changes", help="Resume although data, code or device changed.")]
EngineName = Annotated[
    Literal["process", "ray"],
    typer.Option(help="Train one network after another in this process, or several at once on Ray: same records."),
]
AtOnce = Annotated[int | None, typer.Option(help="Ray: networks at once; without it, as CPUs or GPUs allow.", min=1)]
RayAddress = Annotated[
    str | None,
    typer.Option(help="Ray: a running one (auto, HOST:PORT); --out and --data are on a disk all machines share."),
]


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `sipp runs --recipes`) or a .yaml file.")],
    settings: Settings = None,
    out: Out = DEFAULT_RUNS,
    data: Data = DEFAULT_ROOT,
    device: Device = "auto",
    workers: Workers = 0,
    accept_changes: AcceptChanges = False,
    as_json: Json = False,
    engine: EngineName = "process",
    at_once: AtOnce = None,
    ray_address: RayAddress = None,
) -> None:
    """Run a recipe, or go on with it where it was stopped; Ctrl-C and SIGTERM stop it after the step under way.

    Several processes: accelerate launch --num_processes 2 -m sipp run RECIPE ...
    """
    from sipp.experiments.parallel.on_ray import LOCAL, RayOptions
    from sipp.experiments.parallel.processes import ALONE, join_processes, leave_processes
    from sipp.experiments.recipes import load_recipe
    from sipp.experiments.runs.run_recipe import run as run_recipe
    from sipp.experiments.training.signals import Interrupted

    chosen = load_recipe(recipe, settings=settings or ())
    _check_out(out, recipe, chosen, data)
    processes = join_processes(cpu=device == "cpu") if int(os.environ.get(PROCESSES, "1")) > 1 else ALONE
    console = Console(quiet=not processes.leads, stderr=as_json)
    try:
        with _display(console) as on_progress:
            done = run_recipe(
                chosen,
                out=out,
                data_root=data,
                device=device,
                n_workers=workers,
                accept_changes=accept_changes,
                on_progress=on_progress,
                processes=processes,
                engine=engine,
                ray=RayOptions(ray_address or LOCAL, at_once) if ray_address or at_once else None,
            )
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(stop.exit_status) from None
    finally:
        leave_processes(processes)
    if not as_json:
        _tell(console, done)
    elif processes.leads:
        print_json({"kind": "run", "folder": done.folder, "n_made": done.n_made, "records": done.records})


def _check_out(out: Path, name: str, recipe: Recipe, data: Path) -> None:
    """Refuses a run folder that is what the run reads: the file of its recipe, or its data."""
    from sipp.experiments.recipes import config_of
    from sipp.experiments.recipes.catalog import SUFFIX
    from sipp.experiments.runs.store import run_name

    with at(f"--out {out}", "give another folder"):
        reads = [("RECIPE", Path(name))] if name.endswith(SUFFIX) else []
        refuse_inputs(out / run_name(config_of(recipe)), [*reads, ("--data", data)])


def _tell(console: Console, done: Finished) -> None:
    """Prints the accuracies of the run and where its records are."""
    console.print(records_table(done.records))
    made = f"{done.n_made} networks made now" if done.n_made else "nothing left to do"
    console.print(f"{made}; records: {done.folder / 'records.jsonl'}", soft_wrap=True)


def records_table(records: list[Values]) -> Table:
    """Test accuracy before -> after training, one line per method and keep, repetitions in columns."""
    seeds = sorted({record["seed"] for record in records})
    table = Table(box=box.SIMPLE_HEAD, title="test accuracy, pruned -> trained")
    for column in ("method", "keep", *(f"seed {seed}" for seed in seeds), "dead rows"):
        table.add_column(column, justify="left" if column == "method" else "right")
    lines: dict[tuple[str, int], dict[int, Values]] = {}
    for record in records:
        lines.setdefault((record["method"] or "dense", record["level"]), {})[record["seed"]] = record
    for (method, _), by_seed in lines.items():
        first = next(iter(by_seed.values()))
        cells = [_cell(by_seed.get(seed)) for seed in seeds]
        dead = ", ".join(str(record.get("dead_rows", 0)) for record in by_seed.values())
        table.add_row(method, f"{first.get('keep', 1.0):.2%}", *cells, dead)
    return table


def _cell(record: Values | None) -> str:
    if record is None:
        return ""
    before = f"{record['before']['top1']:.2%} -> " if "before" in record else ""
    return f"{before}{record['after']['top1']:.2%}"


@contextmanager
def _display(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A function that shows how far the run is: one live line on a terminal, one line per network elsewhere."""
    if not console.is_terminal:
        yield lambda progress: _plain_line(console, progress)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"))
    with Bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task("preparing", total=None)
        under_way: dict[str, int] = {}  # epochs of networks that are not done: on Ray there are several

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
