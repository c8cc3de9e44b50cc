"""`sipp runs`: lists the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sipp.cli.errors import HOW_TO_REPAIR
from sipp.cli.options import DEFAULT_RUNS
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.results.display import plain_table

BROKEN = "broken"  # the state of a run folder that cannot be read
KEYS = ("pipeline", "n_done", "n_stages", "state", "n_origins")  # of a run, for --json


def runs(
    out: Annotated[Path, typer.Option(help="Folder that holds one folder per run.")] = DEFAULT_RUNS,
) -> Answer:
    """List the runs in a folder and how far each has got."""
    from sipp_lab.runs.reading import UnreadableFolder, list_runs

    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file", fix="give the folder that holds the runs")
    table = plain_table("run", "pipeline", "networks", "state", texts=("pipeline", "state"))
    broken, values = list[str](), list[dict[str, Any]]()
    for run in list_runs(out):
        place = {"name": run.folder.name, "folder": run.folder}
        if isinstance(run, UnreadableFolder):
            do = run.fix or HOW_TO_REPAIR
            table.add_row(escape(run.folder.name), "", "", BROKEN)
            broken.append(f"{BROKEN}: {run.what}; {do}")
            values.append({**place, **dict.fromkeys(KEYS), "state": BROKEN, "what": run.what, "do": do})
            continue
        note = "" if run.n_origins == 1 else f", {run.n_origins} origins (resumed with changes)"
        table.add_row(run.folder.name, run.pipeline, f"{run.n_done} of {run.n_stages}", run.state + note)
        values.append({**place, **{key: getattr(run, key) for key in KEYS}, "what": None, "do": None})
    shown = [table if table.row_count else f"no runs in {out}", *broken]
    return Answer(shown, {"kind": "runs", "runs": values})
