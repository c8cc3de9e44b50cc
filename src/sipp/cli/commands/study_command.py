"""The command `sipp study`: a figure of the paper, from training to page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sipp.cli.errors import at
from sipp.cli.options import (
    DEFAULT_ROOT,
    DEFAULT_RUNS,
    MODEL_PANEL,
    OUTPUT_PANEL,
    AcceptChanges,
    DataRoot,
    Device,
    RunsOut,
    Settings,
    Workers,
)
from sipp.cli.output import Json, plain_table, print_json, show
from sipp.storage.outputs import PAGE, check_file, refuse_inputs

if TYPE_CHECKING:
    from sipp.experiments.studies import Study


def study(
    name: Annotated[str | None, typer.Argument(help="A study; without one, all of them are listed.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's schedules, not the short form.", rich_help_panel=MODEL_PANEL)
    ] = False,
    settings: Settings = None,
    out: RunsOut = DEFAULT_RUNS,
    data: DataRoot = DEFAULT_ROOT,
    device: Device = "auto",
    workers: Workers = 0,
    accept_changes: AcceptChanges = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what is there and what would be trained.", rich_help_panel=OUTPUT_PANEL),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a figure of the paper: all runs of a named study, then one page; without a name, list the studies.

    Stopped and resumed like `sipp run`. What any run in --out has made already is taken over: a method or a seed that
    is added (--set "prune.methods=[...]", --set repetitions=3) trains only what is new.
    """
    from sipp.experiments.studies import load_study, study_descriptions

    if name is None:
        _list(study_descriptions(), as_json)
        return
    chosen = load_study(name, form="full" if full else "short", settings=settings or ())
    if dry_run:
        _plan(chosen, out, accept_changes, as_json)
        return
    page = out / f"{chosen.name}-{chosen.form}.html"
    with at(f"--out {out}", "give another folder"):
        refuse_inputs(page, [("--data", data)])
        check_file(page, PAGE, force=True, makes_folder=True)
    _run(chosen, out, data, device, workers, accept_changes, page, as_json)


def _list(found: dict[str, str], as_json: bool) -> None:
    if as_json:
        print_json({"kind": "studies", "studies": [{"name": n, "description": words} for n, words in found.items()]})
        return
    table = plain_table("study", "what it shows", texts=("what it shows",))
    for name, words in found.items():
        table.add_row(name, words)
    show(table)


def _plan(chosen: Study, out: Path, accept_changes: bool, as_json: bool) -> None:
    from sipp.cli.studying import planned_runs

    rows = planned_runs(chosen, out, accept_changes=accept_changes)
    values = [vars(row) for row in rows]
    if as_json:
        print_json({"kind": "study plan", "name": chosen.name, "form": chosen.form, "runs": values})
        return
    columns = ("run", "networks", "there", "taken over", "to train", "epochs to train")
    table = plain_table(*columns)
    for row in rows:
        table.add_row(row.run, *(f"{n:,}" for n in (row.n_all, row.n_there, row.n_shared, row.n_new, row.n_epochs)))
    total = sum(row.n_new for row in rows), sum(row.n_epochs for row in rows)
    show(table, f"{total[0]:,} networks and {total[1]:,} epochs to train (if the data are those of the runs there)")


def _run(
    chosen: Study, out: Path, data: Path, device: Device, workers: int, accept_changes: bool, page: Path, as_json: bool
) -> None:
    from sipp.cli.run_display import display, records_table
    from sipp.cli.studying import run_study, write_page
    from sipp.experiments.training.signals import Interrupted

    console = Console(stderr=as_json)
    try:
        with display(console) as on_progress:
            done = run_study(
                chosen,
                out=out,
                data_root=data,
                device=device,
                n_workers=workers,
                accept_changes=accept_changes,
                on_progress=on_progress,
            )
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(stop.exit_status) from None
    write_page(chosen, [one.folder for one in done], page)
    if as_json:
        runs = [{"folder": one.folder, "n_made": one.n_made, "records": one.records} for one in done]
        print_json({"kind": "study", "name": chosen.name, "form": chosen.form, "page": page, "runs": runs})
        return
    for one in done:
        console.print(one.folder.name, highlight=False)
        console.print(records_table(one.records))
    n_made = sum(one.n_made for one in done)
    made = f"{n_made} networks made now" if n_made else "nothing left to do"
    console.print(f"{made}; page: {page}", soft_wrap=True, highlight=False)
