"""The command `sipp report`: runs and pruned models as one page, and as figures for print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

import sipp
from sipp.cli_errors import REPAIR, Trouble, at
from sipp.cli_files import check_place
from sipp.errors import DataError, OptionError


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, folders of runs, or folders that `sipp prune` wrote.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("page.html"),
    figures: Annotated[Path | None, typer.Option(help="Folder for figures as PDF and PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Show runs, finished or not, on one page that needs no network, and as figures for print."""
    from sipp.report import read_whole_sources, render, write_figures

    _check(out, figures)
    sources, broken = read_whole_sources(runs)
    if not sources:
        raise Trouble(broken[0].reason, f"sipp report {broken[0].folder}", REPAIR)
    _write(out, render(sources, version=f"sipp {sipp.__version__}", broken=broken))
    drawn = [] if figures is None else write_figures(sources, figures)
    names = [source.name for source in sources]
    if as_json:
        values = {"page": str(out), "bytes": out.stat().st_size, "figures": [str(path) for path in drawn], "of": names}
        if broken:
            values["broken"] = [{"folder": str(one.folder), "what": one.reason, "do": REPAIR} for one in broken]
        typer.echo(json.dumps(values))
        return
    what = "1 result" if len(names) == 1 else f"{len(names)} results"
    typer.echo(f"page: {out} ({out.stat().st_size / 1e6:.2f} MB, {what})")
    if figures is not None:
        typer.echo(f"figures: {len(drawn)} files in {figures}")
    for one in broken:
        typer.echo(f"broken: {one.reason}; {REPAIR}")


def _check(out: Path, figures: Path | None) -> None:
    """Nothing; refuses a page or figures that could not be written, before any work."""
    with at(f"--out {out}", "give another page"):
        check_place(out)
        if out.is_dir():
            raise OptionError(f"{out} is a folder; give the name of a page, such as page.html")
    if figures is None:
        return
    with at(f"--figures {figures}", "give another folder"):
        check_place(figures / out.name)
        if os.path.realpath(out) in (os.path.realpath(one) for one in (figures, *figures.parents)):
            raise OptionError(f"{figures} would be a folder, and {out} a page; give another folder")


def _write(path: Path, text: str) -> None:
    """Nothing; the page is whole or as it was before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"{path}: the page could not be written ({error.strerror or error}); free space or allow writing"
        ) from error
