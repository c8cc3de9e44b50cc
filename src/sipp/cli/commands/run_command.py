"""The commands `sipp run` and `sipp runs`: a recipe's experiments, stopped and resumed at will."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from sipp.cli.errors import REPAIR, Trouble, at
from sipp.cli.files import refuse_inputs
from sipp.cli.output import Json, print_json
from sipp.errors import OptionError

if TYPE_CHECKING:
    from sipp.experiments.runs.listing import Listed
    from sipp.experiments.runs.run_recipe import Progress
    from sipp.storage.files import Values

DEFAULT_OUT = Path("runs")
PROCESSES = "WORLD_SIZE"  # set by accelerate launch and torchrun
BROKEN = "broken"  # the state of a run folder that cannot be read


@dataclass(frozen=True)
class Broken:
    """A run folder that cannot be read: the others are listed all the same."""

    folder: Path
    what: str
    fix: str


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `sipp runs --recipes`) or a .yaml file.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value: train.epochs=10.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder that holds one folder per run; what is no run stays as it is.")
    ] = DEFAULT_OUT,
    data: Annotated[Path, typer.Option(help="Folder with cifar-10-batches-bin/ or imagenet/.")] = Path("data"),
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to train.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that decode image files.", min=0)] = 0,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume although data, code or device changed.")
    ] = False,
    as_json: Json = False,
    engine: Annotated[
        Literal["process", "ray"],
        typer.Option(help="Train one network after another in this process, or several at once on Ray: same records."),
    ] = "process",
    at_once: Annotated[
        int | None, typer.Option(help="Ray: networks at once; without it, as CPUs or GPUs allow.", min=1)
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Ray: a running one (auto, HOST:PORT); --out and --data are on a disk all machines share."),
    ] = None,
) -> None:
    """Run a recipe, or go on with it where it was stopped; Ctrl-C and SIGTERM stop it after the step under way.

    Several processes: accelerate launch --num_processes 2 -m sipp run RECIPE ...
    """
    from sipp.experiments.parallel.on_ray import LOCAL, RayOptions
    from sipp.experiments.parallel.processes import ALONE, join_processes, leave_processes
    from sipp.experiments.recipes import config_of, load_recipe
    from sipp.experiments.recipes.catalog import SUFFIX
    from sipp.experiments.runs.run_recipe import run as run_recipe
    from sipp.experiments.runs.store import run_name
    from sipp.experiments.training.signals import Interrupted

    chosen = load_recipe(recipe, settings=settings or ())
    with at(f"--out {out}", "give another folder"):
        reads = [("RECIPE", Path(recipe))] if recipe.endswith(SUFFIX) else []
        refuse_inputs(out / run_name(config_of(chosen)), [*reads, ("--data", data)])
    asked = RayOptions(ray_address or LOCAL, at_once) if ray_address or at_once else None
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
                ray=asked,
            )
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(stop.exit_status) from None
    finally:
        leave_processes(processes)
    if as_json:
        if processes.leads:
            print_json({"kind": "run", "folder": done.folder, "n_made": done.n_made, "records": done.records})
        return
    console.print(records_table(done.records))
    made = f"{done.n_made} networks made now" if done.n_made else "nothing left to do"
    console.print(f"{made}; records: {done.folder / 'records.jsonl'}", soft_wrap=True)


def runs(
    out: Annotated[Path, typer.Option(help="Folder that holds one folder per run.")] = DEFAULT_OUT,
    recipes: Annotated[bool, typer.Option("--recipes", help="List the recipes there are instead.")] = False,
    as_json: Json = False,
) -> None:
    """List the runs in a folder, and how far each is."""
    from sipp.experiments.recipes import recipe_descriptions

    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file; give the folder that holds the runs")
    console = Console()
    table = Table(box=box.SIMPLE_HEAD)
    if as_json:
        found = recipe_descriptions() if recipes else {}
        named = [{"name": name, "description": description} for name, description in found.items()]
        listed = [] if recipes else [_values(one) for one in _look(out)]
        print_json({"kind": "recipes", "recipes": named} if recipes else {"kind": "runs", "runs": listed})
        return
    if recipes:
        table.add_column("recipe", no_wrap=True)
        table.add_column("what it does")
        for name, description in recipe_descriptions().items():
            table.add_row(name, description)
        console.print(table)
        return
    for column in ("run", "pipeline", "networks", "state"):
        table.add_column(column, overflow="fold")
    looked = _look(out)
    for one in looked:
        if isinstance(one, Broken):
            table.add_row(escape(one.folder.name), "", "", BROKEN)
            continue
        note = "" if one.n_origins == 1 else f", {one.n_origins} origins (resumed with changes)"
        table.add_row(one.folder.name, one.pipeline, f"{one.n_done} of {one.n_stages}", one.state + note)
    console.print(table if table.row_count else f"no runs in {out}")
    for one in looked:
        if isinstance(one, Broken):
            console.print(f"{BROKEN}: {one.what}; {one.fix}", markup=False, highlight=False, soft_wrap=True)


def _look(out: Path) -> list[Listed | Broken]:
    """Every run below `out`, by name; one that cannot be read does not hide the others."""
    from sipp.experiments.runs.listing import how_far
    from sipp.experiments.runs.store import MANIFEST

    found: list[Listed | Broken] = []
    for folder in sorted(one for one in out.iterdir() if one.is_dir()) if out.is_dir() else ():
        try:
            if (folder / MANIFEST).exists():
                with at(str(folder), REPAIR):
                    found.append(how_far(folder))
        except Trouble as trouble:
            found.append(Broken(folder, trouble.what, trouble.fix))
        except OSError as error:
            found.append(Broken(folder, f"{error.filename or folder}: {error.strerror or error}", "allow reading it"))
    return found


def _values(one: Listed | Broken) -> Values:
    """A run in JSON's types; of a broken one only its folder is known, what is wrong with it and what to do."""
    place = {"name": one.folder.name, "folder": one.folder}
    if isinstance(one, Broken):
        unknown = dict.fromkeys(("pipeline", "n_done", "n_stages", "n_origins"))
        return {**place, **unknown, "state": BROKEN, "what": one.what, "do": one.fix}
    return {
        **place,
        "pipeline": one.pipeline,
        "n_done": one.n_done,
        "n_stages": one.n_stages,
        "state": one.state,
        "n_origins": one.n_origins,
        "what": None,
        "do": None,
    }


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
