"""`sipp runs`: lists the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from sipp.cli.errors import HOW_TO_REPAIR
from sipp.cli.options import DEFAULT_RUNS
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.results.display import plain_table

if TYPE_CHECKING:
    from sipp.experiments.runs.reading import RunStatus, UnreadableFolder

BROKEN = "broken"  # the state of a run folder that cannot be read


def runs(
    out: Annotated[Path, typer.Option(help="Folder that holds one folder per run.")] = DEFAULT_RUNS,
) -> Answer:
    """List the runs in a folder and how far each has got."""
    from sipp.experiments.runs.reading import UnreadableFolder, list_runs

    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file", fix="give the folder that holds the runs")
    table = plain_table("run", "pipeline", "networks", "state", texts=("pipeline", "state"))
    statuses, broken = list_runs(out), list[str]()
    for run in statuses:
        if isinstance(run, UnreadableFolder):
            table.add_row(escape(run.folder.name), "", "", BROKEN)
            broken.append(f"{BROKEN}: {run.what}; {run.fix or HOW_TO_REPAIR}")
            continue
        note = "" if run.n_origins == 1 else f", {run.n_origins} origins (resumed with changes)"
        table.add_row(run.folder.name, run.pipeline, f"{run.n_done} of {run.n_stages}", run.state + note)
    shown = [table if table.row_count else f"no runs in {out}", *broken]
    return Answer(shown, {"kind": "runs", "runs": [_as_json(run) for run in statuses]})


def _as_json(run: RunStatus | UnreadableFolder) -> dict[str, Any]:
    """A run as JSON values; for a broken one, only its folder, the problem and what to do."""
    from sipp.experiments.runs.reading import UnreadableFolder

    place = {"name": run.folder.name, "folder": run.folder}
    if isinstance(run, UnreadableFolder):
        unknown = dict.fromkeys(("pipeline", "n_done", "n_stages", "n_origins"))
        return {**place, **unknown, "state": BROKEN, "what": run.what, "do": run.fix or HOW_TO_REPAIR}
    keys = ("pipeline", "n_done", "n_stages", "state", "n_origins")
    return {**place, **{key: getattr(run, key) for key in keys}, "what": None, "do": None}
