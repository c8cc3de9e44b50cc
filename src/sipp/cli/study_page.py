"""What is left to train of a study, and the page of its finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sipp
from sipp.experiments.recipes import config_of
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.plan import plan
from sipp.experiments.runs.reuse import find_reusable, stage_key
from sipp.experiments.studies import Study
from sipp.records.schemas import Manifest
from sipp.report import read_results, render
from sipp.report.contents import About, Finding
from sipp.storage import state_files
from sipp.storage.outputs import PAGE, write_file


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study: its networks, those that are there, and what is left to train."""

    run: str  # the name of its folder
    n_all: int
    n_there: int  # in its own folder
    n_shared: int  # in other runs, or made by a run of this study before it
    n_new: int
    n_epochs: int  # of the new ones


def planned_runs(study: Study, out: Path, *, accept_changes: bool = False) -> list[PlannedRun]:
    """What each run of the study still has to train, by names and manifests alone: data are not compared."""
    planned, before = [], set[str]()
    code = runs.code_version()

    def suits(manifest: Manifest) -> bool:
        return accept_changes or all(origin.code == code for origin in manifest.origins)

    for recipe in study.recipes:
        name, stages = runs.run_name(config_of(recipe)), plan(recipe)
        there = [stage for stage in stages if state_files.has_state(out / name / stage.name, runs.FINAL)]
        todo = [stage for stage in stages if stage not in there]
        reusable = find_reusable(out, recipe, todo, suits)
        new = [stage for stage in todo if stage not in reusable and stage_key(recipe, stage) not in before]
        before |= {stage_key(recipe, stage) for stage in stages}
        n_epochs = sum((recipe.train if stage.method is None else recipe.retraining).epochs for stage in new)
        planned.append(PlannedRun(name, len(stages), len(there), len(todo) - len(new), len(new), n_epochs))
    return planned


def write_page(study: Study, folders: Sequence[Path], page: Path) -> None:
    """Writes the page of the study: its panels, what the paper says of them, then every run."""
    rows = [("study", study.name), ("form", study.form), ("source", study.source), ("the paper's claim", study.claim)]
    finding = Finding(study.description, f"{study.source}. The paper: {study.claim}")
    about = About(f"Study {study.name} ({study.form})", finding, rows)
    text = render(read_results(list(folders)), version=f"sipp {sipp.__version__}", about=about)
    write_file(page, text.encode(errors="replace"), PAGE, force=True)
