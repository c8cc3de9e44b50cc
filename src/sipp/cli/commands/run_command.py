"""`sipp run`: runs the experiments of a recipe; can be stopped and resumed."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer
from rich.console import Console

from sipp.cli import options as shared
from sipp.cli.options import DEFAULT_ROOT, DEFAULT_RUNS, MACHINE_PANEL, MODEL_PANEL, option
from sipp.cli.output import Answer

PROCESSES = "WORLD_SIZE"  # set by accelerate launch and torchrun


def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `sipp recipes`) or a .yaml file.")],
    settings: shared.Settings = None,
    data: shared.DataRoot = DEFAULT_ROOT,
    model: Annotated[
        str | None,
        option("Your own network instead of the recipe's: package.module:callable.", MODEL_PANEL),
    ] = None,
    own_data: Annotated[
        str | None,
        option(
            "Your own data: package.module:callable that returns images and labels to train on, then to test on.",
            MODEL_PANEL,
        ),
    ] = None,
    code: shared.CodeFiles = None,
    out: shared.RunsOut = DEFAULT_RUNS,
    accept_changes: shared.AcceptChanges = False,
    device: shared.Device = "auto",
    workers: shared.Workers = 0,
    engine: Annotated[
        Literal["process", "ray"],
        option(
            "Train one network after another in this process, or several at once on Ray; the records are the same.",
            MACHINE_PANEL,
        ),
    ] = "process",
    at_once: Annotated[
        int | None,
        option("Ray: how many networks at once; default: as many as the CPUs or GPUs allow.", MACHINE_PANEL, least=1),
    ] = None,
    ray_address: Annotated[
        str | None,
        option(
            "Ray: a running cluster (auto, HOST:PORT); --out and --data must be on a disk all machines share.",
            MACHINE_PANEL,
        ),
    ] = None,
) -> Answer | None:
    """Run a recipe, or resume one that was stopped; Ctrl-C stops it after the current step.

    Several processes: accelerate launch --num_processes 2 -m sipp run RECIPE ...
    """
    from sipp.cli.run_display import records_table, show_progress, work_done
    from sipp.experiments.parallel.on_ray import LOCAL, RayOptions
    from sipp.experiments.parallel.processes import ALONE, join_processes, leave_processes
    from sipp.experiments.recipes import Code, load_recipe
    from sipp.experiments.runs.run_recipe import run as run_recipe

    shared.load_code(code)
    named = Code(net=model, data=own_data) if model is not None or own_data is not None else None
    chosen = load_recipe(recipe, settings=settings or (), code=named)
    processes = join_processes(cpu=device == "cpu") if int(os.environ.get(PROCESSES, "1")) > 1 else ALONE
    console = Console(quiet=not processes.is_leader)
    try:
        with show_progress(console) as on_progress:
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
                code_files=tuple(code or ()),
            )
    finally:
        leave_processes(processes)
    if not processes.is_leader:
        return None
    summary = f"{work_done(done.n_made)}; records: {done.folder / 'records.jsonl'}"
    values = {"kind": "run", "folder": done.folder, "n_made": done.n_made, "records": done.records}
    return Answer([records_table(done.records), summary], values)
