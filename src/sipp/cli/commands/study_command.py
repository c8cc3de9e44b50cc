"""`sipp study`: reproduces a figure of the paper, from training to page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sipp.cli import options as shared
from sipp.cli.errors import naming_option
from sipp.cli.options import MODEL_PANEL, OUTPUT_PANEL, option
from sipp.cli.output import Answer, listing
from sipp.files import check_file
from sipp.results.display import plain_table
from sipp.results.manifest import Manifest
from sipp_lab.studies import Study, load_study, study_descriptions


def study(
    name: Annotated[str | None, typer.Argument(help="A study; without one, all of them are listed.")] = None,
    full: Annotated[bool, option("Use the paper's schedules, not the short form.", MODEL_PANEL, "--full")] = False,
    settings: shared.Settings = None,
    dry_run: Annotated[
        bool, option("Show what is there and what would be trained; train nothing.", OUTPUT_PANEL, "--dry-run")
    ] = False,
    *,
    how: shared.RunOptions,
) -> Answer | None:
    """Reproduce a figure of the paper: all runs of a study, then one page; without a name, list the studies.

    Stop and resume it like `sipp run`. It reuses what any run in --out has computed: another method or seed
    (--set "prune.methods=[...]", --set repetitions=3) trains only what is new.
    """
    if name is None:
        return listing("study", "what it shows", "studies", study_descriptions())
    shared.load_code(how.code)
    chosen = load_study(name, form="full" if full else "short", settings=settings or ())
    if dry_run:
        return _show_plan(chosen, how.out, how.accept_changes)
    page = how.out / f"{chosen.name}-{chosen.form}.html"
    with naming_option(f"--out {how.out}", "give another folder"):
        check_file(page, force=True, makes_folder=True)
    from sipp.cli.run_display import records_table, work_done
    from sipp.cli.run_work import run_recipes

    done = run_recipes(chosen.recipes, how)
    if done is None:
        return None
    _write_page(chosen, [finished.folder for finished in done], page)
    runs = [{"folder": finished.folder, "n_made": finished.n_made, "records": finished.records} for finished in done]
    tables = [part for finished in done for part in (finished.folder.name, records_table(finished.records))]
    values = {"kind": "study", "name": chosen.name, "form": chosen.form, "page": page, "runs": runs}
    return Answer([*tables, f"{work_done(sum(finished.n_made for finished in done))}; page: {page}"], values)


def _show_plan(chosen: Study, out: Path, accept_changes: bool) -> Answer:
    """Shows what is left to train in each run of the study."""
    rows = _planned_runs(chosen, out, accept_changes=accept_changes)
    table = plain_table("run", "networks", "there", "taken over", "to train", "epochs to train")
    for run, *counts in (row.values() for row in rows):
        table.add_row(run, *(f"{n:,}" for n in counts))
    n_new, n_epochs = (sum(row[key] for row in rows) for key in ("n_new", "n_epochs"))
    left = f"{n_new:,} networks and {n_epochs:,} epochs to train (if the data are those of the runs there)"
    values = {"kind": "study plan", "name": chosen.name, "form": chosen.form, "runs": rows}
    return Answer([table, left], values)


def _planned_runs(study: Study, out: Path, *, accept_changes: bool = False) -> list[dict[str, Any]]:
    """What each run of the study still has to train, judged by names and manifests, not by the data.

    Counts of all networks, of those in its folder, of those in other runs or earlier in this study, and of new ones.
    """
    from sipp.storage import state_files
    from sipp_lab.recipes import config_of
    from sipp_lab.runs import store
    from sipp_lab.runs.plan import plan
    from sipp_lab.runs.reuse import find_reusable, stage_key

    planned: list[dict[str, Any]] = []
    before = set[str]()
    code = store.code_version()

    def suits(manifest: Manifest) -> bool:
        return accept_changes or all(origin.code == code for origin in manifest.origins)

    for recipe in study.recipes:
        name, stages = store.run_name(config_of(recipe)), plan(recipe)
        there = [stage for stage in stages if state_files.has_state(out / name / stage.name, store.FINAL)]
        todo = [stage for stage in stages if stage not in there]
        reusable = find_reusable(out, recipe, todo, suits)
        new = [stage for stage in todo if stage not in reusable and stage_key(recipe, stage) not in before]
        before |= {stage_key(recipe, stage) for stage in stages}
        n_epochs = sum((recipe.train if stage.method is None else recipe.retraining).epochs for stage in new)
        counts = {"n_all": len(stages), "n_there": len(there), "n_shared": len(todo) - len(new), "n_new": len(new)}
        planned.append({"run": name, **counts, "n_epochs": n_epochs})
    return planned


def _write_page(study: Study, folders: Sequence[Path], page: Path) -> None:
    """Writes the page of the study: its panels with the paper's claim, then every run."""
    from sipp.report import read_results, write_page
    from sipp.report.contents import Finding, StudySummary

    rows = [("study", study.name), ("form", study.form), ("source", study.source), ("the paper's claim", study.claim)]
    finding = Finding(study.description, f"{study.source}. The paper: {study.claim}")
    summary = StudySummary(f"Study {study.name} ({study.form})", finding, rows)
    write_page(page, read_results(folders), force=True, study=summary)
