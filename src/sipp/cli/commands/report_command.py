"""`sipp report`: writes a page about runs and pruned networks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import out_short
from sipp.cli.output import Answer, check_out
from sipp.results import words


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, folders of runs, or folders that `sipp prune` wrote.")
    ],
    out: Annotated[Path, out_short("The page to write.")] = Path("page.html"),
    force: bool = False,
) -> Answer:
    """Write a page about runs or pruned networks that works offline.

    Every plot can be saved from the page as a picture or a table. Unverified results are marked.
    """
    from sipp_lab.page import read_results, write_results

    check_out(out, force=force, reads={}, makes_folder=True)
    with naming_option(f"sipp report {' '.join(map(str, runs))}", "give the folder of a run, or one sipp prune wrote"):
        results, broken = read_results(runs)
    if not results:
        raise CommandError(broken[0].what, where=f"sipp report {broken[0].folder}", fix=broken[0].do)
    title = runs[0].resolve().name if len(runs) == 1 else ""  # such as the folder of a study
    write_results(out, results, broken, force=force, title=title)
    n_bytes = out.stat().st_size
    marked = [{"name": result.name, "what": mark} for result in results for mark in result.notes]
    values = {
        "page": out,
        "bytes": n_bytes,
        "of": [result.name for result in results],
        "marked": marked,
        "broken": broken,
    }
    lines = [f"page: {out} ({n_bytes / 1e6:.2f} MB, {words.counted(len(results), 'result')})"]
    lines += [f"marked: {mark['name']}: {mark['what']}" for mark in marked]
    lines += [f"broken: {one.what}; {one.do}" for one in broken]
    return Answer(lines, values)
