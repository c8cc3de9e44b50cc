"""`sipp study`: reproduces a figure of the paper, from training to page."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from sipp.cli.errors import naming_option
from sipp.cli.options import load_code
from sipp.cli.output import Answer, listing, record_of
from sipp.files import check_file
from sipp.results import Option
from sipp_lab.runs.options import RunOptions


def study(
    name: Annotated[str | None, typer.Argument(help="A study; without one, all of them are listed.")] = None,
    full: Annotated[bool, Option("Use the paper's schedules, not the short form.", "Model and data")] = False,
    settings: list[str] | None = None,
    dry_run: bool = False,
    *,
    how: RunOptions,
) -> Answer | None:
    """Reproduce a figure of the paper: all runs of a study, then one page; without a name, list the studies.

    Stop and resume it like `sipp run`. The short form has a tenth of the epochs: it shows how a study works,
    but not the paper's numbers.
    """
    from sipp_lab.studies import STUDIES, study_named

    if name is None:
        return listing("studies", {name: one.description for name, one in STUDIES.items()})
    from sipp_lab.page import read_results, write_results
    from sipp_lab.runs.planning import Plan, planned_run
    from sipp_lab.runs.running import run_each, work_done

    load_code(how.code)
    form: Literal["short", "full"] = "full" if full else "short"
    chosen = study_named(name)
    recipes, about = chosen.recipes(form, settings or ()), {"name": name, "form": form}
    notes = [note] if (note := chosen.note(form)) else []
    if dry_run:
        planned = Plan(tuple(planned_run(recipe, how) for recipe in recipes))
        return Answer([planned, *notes], record_of("study plan", planned, about))
    page = how.out / f"{name}-{form}.html"
    with naming_option(f"--out {how.out}", "give another folder"):
        check_file(page, force=True, makes_folder=True)
    done = run_each(recipes, how)
    if done is None:
        return None
    write_results(page, *read_results([one.folder for one in done]), force=True, study=chosen, form=form)
    end = f"{work_done(done)}; page: {page}"
    return Answer([*done, end, *notes], {"kind": "study", **about, "page": page, "runs": done})
