"""The command `sipp data`: which sets there are, whether they are here, and fetching those that can be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from sipp.cli.errors import naming_option
from sipp.cli.options import DEFAULT_ROOT, Json
from sipp.cli.output import only_json, plain_table, print_json, show
from sipp.progress import console_of_person

IMAGENET = "imagenet"
PLAIN_STEP_S = 5.0  # between two lines of progress where no bar can be drawn


def data(
    name: Annotated[
        Literal["list", "digits", "cifar10", "imagenet"], typer.Argument(help="The set, or list to see what is here.")
    ] = "list",
    folder: Annotated[Path, typer.Argument(help="Where sets lie, or are put.")] = DEFAULT_ROOT,
    as_json: Json = False,
) -> None:
    """List the data sets and whether they are here; download CIFAR-10, checked."""
    with only_json(as_json):
        if name == "list":
            found = [_digits(), _cifar10(folder), _imagenet(folder)]
        elif name == "digits":
            found = [_digits()]
        elif name == IMAGENET:
            found = [_checked_imagenet(folder)]
        else:
            found = [_fetched(folder)]
        if not as_json:
            table = plain_table("set", "here", "what", texts=("here", "what"))
            for one in found:
                table.add_row(one["name"], "yes" if one["here"] else "no", one["what"])
            show(table)
    if as_json:
        print_json({"kind": "data", "sets": found})


def _digits() -> dict[str, Any]:
    from sipp.experiments.data import load_digits

    images = load_digits()
    what = f"{images.n_train:,} training and {images.n_test:,} test images, 1 x 8 x 8, part of scikit-learn"
    return {"name": "digits", "here": True, "folder": None, "what": what}


def _cifar10(folder: Path) -> dict[str, Any]:
    """Whether a folder of CIFAR-10 is there; its bytes are checked where it is read or fetched."""
    from sipp.experiments.data.cifar10 import BIN_FOLDER, PY_FOLDER

    here = next((folder / name for name in (BIN_FOLDER, PY_FOLDER) if (folder / name).is_dir()), None)
    what = "50,000 training and 10,000 test images, 3 x 32 x 32"
    what += f", in {here}" if here else f"; fetch it (170 MB) with: sipp data cifar10 {folder}"
    return {"name": "cifar10", "here": here is not None, "folder": here, "what": what}


def _imagenet(folder: Path) -> dict[str, Any]:
    root = folder / IMAGENET
    here = (root / "train").is_dir() and (root / "val").is_dir()
    what = f"images in {root}" if here else f"put it there yourself: {root}/train/CLASS/*.jpg, {root}/val/CLASS/*.jpg"
    return {"name": IMAGENET, "here": here, "folder": root if here else None, "what": what}


def _checked_imagenet(folder: Path) -> dict[str, Any]:
    """The index of the folder, or what to put where: its licence forbids to fetch it for you."""
    from sipp.experiments.data import index_folders

    root = folder / IMAGENET if (folder / IMAGENET).is_dir() else folder
    with naming_option(
        f"sipp data {IMAGENET} {folder}", f"put images at {root}/train/CLASS/*.jpg and {root}/val/CLASS/*.jpg"
    ):
        index = index_folders(root)
    n_val = len(index.paths) - index.n_train
    what = f"{index.n_train:,} training and {n_val:,} validation images of {len(index.classes):,} classes in {root}"
    return {"name": IMAGENET, "here": True, "folder": root, "what": what}


def _fetched(folder: Path) -> dict[str, Any]:
    """CIFAR-10, downloaded if it is not here."""
    from sipp.experiments.data import fetch_cifar10
    from sipp.experiments.data.cifar10 import BIN_FOLDER

    with naming_option(f"sipp data cifar10 {folder}", f"put the official {BIN_FOLDER} into {folder}"), _told() as told:
        source = "present" if (folder / BIN_FOLDER).exists() else "official"
        place = fetch_cifar10(folder, progress=told)
    came = "was here already" if source == "present" else f"came from the {source} source"
    what = f"50,000 training and 10,000 test images in {place}, checked; {came}"
    return {"name": "cifar10", "here": True, "folder": place, "source": source, "what": what}


@contextmanager
def _told() -> Iterator[Callable[[str, int, int | None], None]]:
    """A function that shows how far a download is: a bar at a terminal, a line on stderr now and then elsewhere."""
    console = console_of_person()
    if console is not None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Bars(*columns, console=console, transient=True) as bars:
            task = bars.add_task("connecting", total=None)
            yield lambda stage, done, total: bars.update(task, description=stage, completed=done, total=total)
        return
    last_time, last_stage = -PLAIN_STEP_S, ""

    def line(stage: str, done: int, total: int | None) -> None:
        nonlocal last_time, last_stage
        if stage != last_stage or time.monotonic() - last_time >= PLAIN_STEP_S:
            last_time, last_stage = time.monotonic(), stage
            typer.echo(f"{stage}: {done:,}" + (f" of {total:,}" if total else ""), err=True)

    yield line
