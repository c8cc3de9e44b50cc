"""`sipp data`: lists the data sets, and downloads CIFAR-10 or MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sipp.cli.errors import naming_option
from sipp.cli.options import DEFAULT_ROOT
from sipp.cli.output import Answer
from sipp.progress import progress_bar
from sipp.results import Sheet, Table


def data(
    name: Annotated[
        Literal["list", "cifar10", "mnist"],
        typer.Argument(help="What to download (CIFAR-10: 170 MB, MNIST: 11 MB), unless it is there; list shows all."),
    ] = "list",
    folder: Annotated[Path, typer.Argument(help="Folder of the data sets.")] = DEFAULT_ROOT,
) -> Answer:
    """List the data sets and which of them you have, or download CIFAR-10 or MNIST."""
    from sipp_lab.data.sets import CIFAR10, MNIST, data_sets

    for one in (CIFAR10, MNIST):
        if name == one.command:
            with (
                naming_option(f"sipp data {name} {folder}", f"put {one.by_hand} into {folder / one.folder}"),
                progress_bar(f"fetching {name}, bytes", one.n_bytes, shown=True) as advance,
            ):
                one.fetch(folder, progress=advance)
    sets = data_sets(folder)
    rows = tuple((known, "yes" if here else "no", what) for known, (here, what) in sets.items())
    table = Table(("set", "here", "what"), rows, texts=("here", "what"))
    values = [{"name": known, "here": here, "what": what} for known, (here, what) in sets.items()]
    return Answer([Sheet("data sets", tables=(table,))], {"kind": "data", "sets": values})
