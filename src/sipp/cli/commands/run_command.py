"""The command `sipp run`: a recipe's experiments, stopped and resumed at will."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from sipp.cli.errors import at
from sipp.cli.options import (
    DEFAULT_ROOT,
    DEFAULT_RUNS,
    MACHINE_PANEL,
    MODEL_PANEL,
    AcceptChanges,
    DataRoot,
    Device,
    RunsOut,
    Settings,
    Workers,
)
from sipp.cli.output import Json, print_json
from sipp.cli.run_display import display, records_table
from sipp.storage.outputs import refuse_inputs

if TYPE_CHECKING:
    from sipp.experiments.recipes import Recipe
    from sipp.experiments.runs.run_recipe import Finished

PROCESSES = "WORLD_SIZE"  # set by accelerate launch and torchrun

EngineName = Annotated[
    Literal["process", "ray"],
    typer.Option(
        help="Train one network after another in this process, or several at once on Ray: same records.",
        rich_help_panel=MACHINE_PANEL,
    ),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        help="Ray: networks at once; without it, as CPUs or GPUs allow.", min=1, rich_help_panel=MACHINE_PANEL
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        help="Ray: a running one (auto, HOST:PORT); --out and --data are on a disk all machines share.",
        rich_help_panel=MACHINE_PANEL,
    ),
]


OwnModel = Annotated[
    str | None,
    typer.Option(
        help="A network of your own instead of the recipe's: package.module:callable.", rich_help_panel=MODEL_PANEL
    ),
]
OwnData = Annotated[
    str | None,
    typer.Option(
        help="Data of your own: package.module:callable that gives images and labels, train then test.",
        rich_help_panel=MODEL_PANEL,
    ),
]


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `sipp recipes`) or a .yaml file.")],
    settings: Settings = None,
    data: DataRoot = DEFAULT_ROOT,
    model: OwnModel = None,
    own_data: OwnData = None,
    out: RunsOut = DEFAULT_RUNS,
    accept_changes: AcceptChanges = False,
    as_json: Json = False,
    device: Device = "auto",
    workers: Workers = 0,
    engine: EngineName = "process",
    at_once: AtOnce = None,
    ray_address: RayAddress = None,
) -> None:
    """Run a recipe, or go on with it where it was stopped; Ctrl-C and SIGTERM stop it after the step under way.

    Several processes: accelerate launch --num_processes 2 -m sipp run RECIPE ...
    """
    from sipp.experiments.parallel.on_ray import LOCAL, RayOptions
    from sipp.experiments.parallel.processes import ALONE, join_processes, leave_processes
    from sipp.experiments.recipes import Code, load_recipe
    from sipp.experiments.runs.run_recipe import run as run_recipe
    from sipp.experiments.training.signals import Interrupted

    code = Code(net=model, data=own_data) if model is not None or own_data is not None else None
    chosen = load_recipe(recipe, settings=settings or (), code=code)
    _check_out(out, recipe, chosen, data)
    processes = join_processes(cpu=device == "cpu") if int(os.environ.get(PROCESSES, "1")) > 1 else ALONE
    console = Console(quiet=not processes.leads, stderr=as_json)
    try:
        with display(console) as on_progress:
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
