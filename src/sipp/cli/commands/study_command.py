"""The command `sipp study`: a figure of the paper, from training to page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sipp.cli import options as shared
from sipp.cli.errors import naming_option
from sipp.cli.options import DEFAULT_ROOT, DEFAULT_RUNS, MODEL_PANEL, OUTPUT_PANEL, option
from sipp.cli.output import Answer, listing
from sipp.experiments.studies import Study, load_study, study_descriptions
from sipp.records.display import plain_table
from sipp.storage.outputs import PAGE, check_file


def study(
    name: Annotated[str | None, typer.Argument(help="A study; without one, all of them are listed.")] = None,
    full: Annotated[bool, option("Use the paper's schedules, not the short form.", MODEL_PANEL, "--full")] = False,
    settings: shared.Settings = None,
    code: shared.CodeFiles = None,
    out: shared.RunsOut = DEFAULT_RUNS,
    data: shared.DataRoot = DEFAULT_ROOT,
    device: shared.Device = "auto",
    workers: shared.Workers = 0,
    accept_changes: shared.AcceptChanges = False,
    dry_run: Annotated[
        bool, option("Show what is there and what would be trained; train nothing.", OUTPUT_PANEL, "--dry-run")
    ] = False,
) -> Answer:
    """Reproduce a figure of the paper: all runs of a study, then one page; without a name, list the studies.

    Stop and resume it like `sipp run`. It reuses what any run in --out has computed: another method or seed
    (--set "prune.methods=[...]", --set repetitions=3) trains only what is new.
    """
    if name is None:
        return listing("study", "what it shows", "studies", study_descriptions())
    shared.load_code(code)
    chosen = load_study(name, form="full" if full else "short", settings=settings or ())
    if dry_run:
        return _plan(chosen, out, accept_changes)
    page = out / f"{chosen.name}-{chosen.form}.html"
    with naming_option(f"--out {out}", "give another folder"):
        check_file(page, PAGE, force=True, makes_folder=True)
    from sipp.cli.run_display import display, records_table
    from sipp.cli.study_page import write_page
    from sipp.experiments.runs.run_recipe import run as run_recipe
    from sipp.experiments.training.signals import Interrupted

    console = Console()
    try:
        with display(console) as on_progress:
            done = [  # one after the other: what one has made, the next take over
                run_recipe(
                    recipe, out=out, data_root=data, device=device, n_workers=workers, accept_changes=accept_changes,
                    on_progress=on_progress,
                )
                for recipe in chosen.recipes
            ]  # fmt: skip
    except Interrupted as stop:
        typer.echo(str(stop), err=True)
        raise typer.Exit(stop.exit_status) from None
    write_page(chosen, [finished.folder for finished in done], page)
    runs = [{"folder": finished.folder, "n_made": finished.n_made, "records": finished.records} for finished in done]
    n_made = sum(finished.n_made for finished in done)
    summary = f"{n_made} networks trained now" if n_made else "nothing left to do"
    tables = [part for finished in done for part in (finished.folder.name, records_table(finished.records))]
    values = {"kind": "study", "name": chosen.name, "form": chosen.form, "page": page, "runs": runs}
    return Answer([*tables, f"{summary}; page: {page}"], values)


def _plan(chosen: Study, out: Path, accept_changes: bool) -> Answer:
    """What each run of the study has, and what is left to train."""
    from sipp.cli.study_page import planned_runs

    rows = planned_runs(chosen, out, accept_changes=accept_changes)
    table = plain_table("run", "networks", "there", "taken over", "to train", "epochs to train")
    for row in rows:
        table.add_row(row.run, *(f"{n:,}" for n in (row.n_all, row.n_there, row.n_shared, row.n_new, row.n_epochs)))
    total = sum(row.n_new for row in rows), sum(row.n_epochs for row in rows)
    left = f"{total[0]:,} networks and {total[1]:,} epochs to train (if the data are those of the runs there)"
    values = {"kind": "study plan", "name": chosen.name, "form": chosen.form, "runs": [vars(row) for row in rows]}
    return Answer([table, left], values)
