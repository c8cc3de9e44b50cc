"""`sipp data`: lists the data sets, and downloads CIFAR-10 or MNIST."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sipp.cli.errors import naming_option
from sipp.cli.options import DEFAULT_ROOT
from sipp.cli.output import Answer
from sipp.progress import progress_bar
from sipp.results import words


def data(
    name: Annotated[
        Literal["list", "cifar10", "mnist"],
        typer.Argument(help="List all, or download this one (170 MB, or 11) unless it is there."),
    ] = "list",
    folder: Annotated[Path, typer.Argument(help="Folder of the data sets.")] = DEFAULT_ROOT,
) -> Answer:
    """List the data sets and which of them you have, or download CIFAR-10 or MNIST."""
    from sipp_lab.data.cifar10 import CIFAR10
    from sipp_lab.data.mnist import MNIST

    for one in (CIFAR10, MNIST):
        if name == one.command:
            with (
                naming_option(f"sipp data {name} {folder}", f"put {one.by_hand} into {folder / one.folder}"),
                progress_bar(f"fetching {name}, bytes", one.n_bytes, shown=True) as advance,
            ):
                one.fetch(folder, progress=advance)
    pictures, digits, imagenet = folder / CIFAR10.folder, folder / MNIST.folder, folder / "imagenet"
    sets = {
        "digits": (True, "1,437 training and 360 test images, 1 x 8 x 8, part of scikit-learn"),
        "mnist": (
            digits.is_dir(),
            f"60,000 training and 10,000 test images, 1 x 28 x 28, in {digits}; sipp data mnist {folder} gets it",
        ),
        "cifar10": (
            pictures.is_dir(),
            f"50,000 training and 10,000 test images, 3 x 32 x 32, in {pictures}; sipp data cifar10 {folder} gets it",
        ),
        "imagenet": (
            (imagenet / "train").is_dir() and (imagenet / "val").is_dir(),
            f"put the images there yourself: {imagenet}/train/CLASS/*.jpg and {imagenet}/val/CLASS/*.jpg",
        ),
    }
    table = words.plain_table("set", "here", "what", texts=("here", "what"))
    for known, (here, what) in sets.items():
        table.add_row(known, "yes" if here else "no", what)
    rows = [{"name": known, "here": here, "what": what} for known, (here, what) in sets.items()]
    return Answer([table], {"kind": "data", "sets": rows})
