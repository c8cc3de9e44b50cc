"""`sipp report`: writes a page about runs and pruned networks, and figures for print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.errors import HOW_TO_REPAIR, CommandError, naming_option
from sipp.cli.options import Force
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.extras import needed_for
from sipp.results.display import counted


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, folders of runs, or folders that `sipp prune` wrote.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("page.html"),
    figures: Annotated[Path | None, typer.Option(help="Folder for figures as PDF and PNG.")] = None,
    force: Force = False,
) -> Answer:
    """Write a page about runs or pruned networks that works offline, and figures for print.

    It refuses records that were changed after they were written, and marks what it cannot check.
    """
    from sipp.cli.out_option import check_out
    from sipp.files import check_place
    from sipp.report import figure_names, read_intact_results, write_figures, write_page

    check_out(out, force=force, reads={}, makes_folder=True)
    if figures is not None:
        with naming_option(f"--figures {figures}", "give another folder"):
            check_place(figures / out.name)
    with naming_option(f"sipp report {' '.join(map(str, runs))}", "give the folder of a run, or one sipp prune wrote"):
        results, broken = read_intact_results(runs)
    if not results:
        raise CommandError(broken[0].what, where=f"sipp report {broken[0].folder}", fix=HOW_TO_REPAIR)
    if figures is not None:
        _check_figures(figures, figure_names(results), force)
    title = runs[0].resolve().name if len(runs) == 1 else ""  # such as the folder of a study
    write_page(out, results, force=force, broken=broken, title=title)
    drawn = [] if figures is None else write_figures(results, figures)
    n_bytes = out.stat().st_size
    marked = [{"name": result.name, "what": mark} for result in results for mark in result.notes]
    values = {
        "page": out,
        "bytes": n_bytes,
        "figures": drawn,
        "of": [result.name for result in results],
        "marked": marked,
        "broken": [{"folder": one.folder, "what": one.what, "do": HOW_TO_REPAIR} for one in broken],
    }
    lines = [f"page: {out} ({n_bytes / 1e6:.2f} MB, {counted(len(results), 'result')})"]
    lines += [] if figures is None else [f"figures: {len(drawn)} files in {figures}"]
    lines += [f"marked: {mark['name']}: {mark['what']}" for mark in marked]
    lines += [f"broken: {one.what}; {HOW_TO_REPAIR}" for one in broken]
    return Answer(lines, values)


def _check_figures(folder: Path, names: list[str], force: bool) -> None:
    """Refuses to write figures where some are, without --force."""
    from sipp.files import check_file

    with needed_for("drawing figures"):
        import matplotlib  # noqa: F401  before the page is written
    with naming_option(f"--figures {folder}", "give another folder"):
        if not names:
            raise OptionError(
                "there is nothing to draw: figures need a pruned level of a run, or several pruned networks",
                fix="leave it out",
            )
        for name in names:
            check_file(folder / name, force=force, makes_folder=True)
