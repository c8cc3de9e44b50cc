"""The command `sipp runs`: which runs there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sipp.cli.errors import HOW_TO_REPAIR
from sipp.cli.options import DEFAULT_RUNS
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.experiments.runs.reading import RunStatus, UnreadableRun
from sipp.records.display import plain_table

BROKEN = "broken"  # the state of a run folder that cannot be read


def runs(
    out: Annotated[Path, typer.Option(help="Folder that holds one folder per run.")] = DEFAULT_RUNS,
) -> Answer:
    """List the runs in a folder and how far each has got."""
    from sipp.experiments.runs.reading import UnreadableRun, list_runs

    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file", fix="give the folder that holds the runs")
    table, looked = plain_table("run", "pipeline", "networks", "state", texts=("pipeline", "state")), list_runs(out)
    for one in looked:
        if isinstance(one, UnreadableRun):
            table.add_row(escape(one.folder.name), "", "", BROKEN)
            continue
        note = "" if one.n_origins == 1 else f", {one.n_origins} origins (resumed with changes)"
        table.add_row(one.folder.name, one.pipeline, f"{one.n_done} of {one.n_stages}", one.state + note)
    broken = [f"{BROKEN}: {one.what}; {one.fix or HOW_TO_REPAIR}" for one in looked if isinstance(one, UnreadableRun)]
    shown = [table if table.row_count else f"no runs in {out}", *broken]
    return Answer(shown, {"kind": "runs", "runs": [_values(one) for one in looked]})


def _values(one: RunStatus | UnreadableRun) -> dict[str, Any]:
    """A run in JSON's types; of a broken one only its folder is known, what is wrong with it and what to do."""
    place = {"name": one.folder.name, "folder": one.folder}
    if isinstance(one, UnreadableRun):
        unknown = dict.fromkeys(("pipeline", "n_done", "n_stages", "n_origins"))
        return {**place, **unknown, "state": BROKEN, "what": one.what, "do": one.fix or HOW_TO_REPAIR}
    keys = ("pipeline", "n_done", "n_stages", "state", "n_origins")
    return {**place, **{key: getattr(one, key) for key in keys}, "what": None, "do": None}
