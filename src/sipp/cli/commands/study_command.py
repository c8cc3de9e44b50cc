"""`sipp study`: reproduces a figure of the paper, from training to page."""

from __future__ import annotations

from typing import Annotated

import typer

from sipp.cli.errors import naming_option
from sipp.cli.options import load_code
from sipp.cli.output import Answer, listing
from sipp.cli.run_work import RunOptions, plan_of, records_table, run_recipes, work_done
from sipp.files import check_file
from sipp.results import Option


def study(
    name: Annotated[str | None, typer.Argument(help="A study; without one, all of them are listed.")] = None,
    full: Annotated[bool, Option("Use the paper's schedules, not the short form.", "Model and data")] = False,
    settings: list[str] | None = None,
    dry_run: bool = False,
    *,
    how: RunOptions,
) -> Answer | None:
    """Reproduce a figure of the paper: all runs of a study, then one page; without a name, list the studies.

    Stop and resume it like `sipp run`. The short form reproduces no figure: it is the same with a tenth of the epochs.
    """
    from sipp_lab.studies import STUDIES, load_study

    if name is None:
        return listing("study", "what it shows", "studies", {name: row.description for name, row in STUDIES.items()})
    from sipp_lab.page import StudySummary, read_results, write_results

    load_code(how.code)
    chosen = load_study(name, form="full" if full else "short", settings=settings or ())
    notes = [chosen.note] if chosen.note else []
    if dry_run:
        return plan_of(chosen.recipes, how, {"kind": "study plan", "name": chosen.name, "form": chosen.form}, *notes)
    page = how.out / f"{chosen.name}-{chosen.form}.html"
    with naming_option(f"--out {how.out}", "give another folder"):
        check_file(page, force=True, makes_folder=True)
    done = run_recipes(chosen.recipes, how)
    if done is None:
        return None
    write_results(page, read_results([one.folder for one in done]), force=True, study=StudySummary.of(chosen))
    runs = [{"folder": one.folder, "n_made": one.n_made, "records": one.records} for one in done]
    tables = [part for one in done for part in (one.folder.name, records_table(one.records))]
    values = {"kind": "study", "name": chosen.name, "form": chosen.form, "page": page, "runs": runs}
    return Answer([*tables, f"{work_done(sum(one.n_made for one in done))}; page: {page}", *notes], values)
