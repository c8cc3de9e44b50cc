"""The command `sipp runs`: which runs and which recipes there are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sipp.cli.errors import REPAIR
from sipp.cli.options import DEFAULT_RUNS
from sipp.cli.output import Json, print_json
from sipp.errors import OptionError, SippError

if TYPE_CHECKING:
    from sipp.experiments.runs.listing import Listed
    from sipp.storage.files import Values

BROKEN = "broken"  # the state of a run folder that cannot be read


@dataclass(frozen=True)
class Broken:
    """A run folder that cannot be read: the others are listed all the same."""

    folder: Path
    what: str
    fix: str


def runs(
    out: Annotated[Path, typer.Option(help="Folder that holds one folder per run.")] = DEFAULT_RUNS,
    recipes: Annotated[bool, typer.Option("--recipes", help="List the recipes there are instead.")] = False,
    as_json: Json = False,
) -> None:
    """List the runs in a folder, and how far each is."""
    from sipp.experiments.recipes import recipe_descriptions

    if out.exists() and not out.is_dir():
        raise OptionError(f"{out} is a file", fix="give the folder that holds the runs")
    console = Console()
    table = Table(box=box.SIMPLE_HEAD)
    if as_json:
        found = recipe_descriptions() if recipes else {}
        named = [{"name": name, "description": description} for name, description in found.items()]
        listed = [] if recipes else [_values(one) for one in _look(out)]
        print_json({"kind": "recipes", "recipes": named} if recipes else {"kind": "runs", "runs": listed})
        return
    if recipes:
        table.add_column("recipe", no_wrap=True)
        table.add_column("what it does")
        for name, description in recipe_descriptions().items():
            table.add_row(name, description)
        console.print(table)
        return
    for column in ("run", "pipeline", "networks", "state"):
        table.add_column(column, overflow="fold")
    looked = _look(out)
    for one in looked:
        if isinstance(one, Broken):
            table.add_row(escape(one.folder.name), "", "", BROKEN)
            continue
        note = "" if one.n_origins == 1 else f", {one.n_origins} origins (resumed with changes)"
        table.add_row(one.folder.name, one.pipeline, f"{one.n_done} of {one.n_stages}", one.state + note)
    console.print(table if table.row_count else f"no runs in {out}")
    for one in looked:
        if isinstance(one, Broken):
            console.print(f"{BROKEN}: {one.what}; {one.fix}", markup=False, highlight=False, soft_wrap=True)


def _look(out: Path) -> list[Listed | Broken]:
    """Every run below `out`, by name; one that cannot be read does not hide the others."""
    from sipp.experiments.runs.listing import how_far
    from sipp.experiments.runs.store import MANIFEST

    found: list[Listed | Broken] = []
    for folder in sorted(one for one in out.iterdir() if one.is_dir()) if out.is_dir() else ():
        try:
            if (folder / MANIFEST).exists():
                found.append(how_far(folder))
        except SippError as error:
            found.append(Broken(folder, error.fault, error.fix or REPAIR))
        except OSError as error:
            found.append(Broken(folder, f"{error.filename or folder}: {error.strerror or error}", "allow reading it"))
    return found


def _values(one: Listed | Broken) -> Values:
    """A run in JSON's types; of a broken one only its folder is known, what is wrong with it and what to do."""
    place = {"name": one.folder.name, "folder": one.folder}
    if isinstance(one, Broken):
        unknown = dict.fromkeys(("pipeline", "n_done", "n_stages", "n_origins"))
        return {**place, **unknown, "state": BROKEN, "what": one.what, "do": one.fix}
    return {
        **place,
        "pipeline": one.pipeline,
        "n_done": one.n_done,
        "n_stages": one.n_stages,
        "state": one.state,
        "n_origins": one.n_origins,
        "what": None,
        "do": None,
    }
