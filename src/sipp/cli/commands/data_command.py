"""`sipp data`: lists the data sets, and downloads CIFAR-10."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sipp.cli.errors import naming_option
from sipp.cli.options import DEFAULT_ROOT
from sipp.cli.output import Answer
from sipp.progress import progress_bar
from sipp.records.display import plain_table

IMAGENET = "imagenet"


def data(
    name: Annotated[
        Literal["list", "digits", "cifar10", "imagenet"], typer.Argument(help="A data set, or list.")
    ] = "list",
    folder: Annotated[Path, typer.Argument(help="Folder of the data sets.")] = DEFAULT_ROOT,
) -> Answer:
    """List the data sets and which of them you have, or download CIFAR-10."""
    if name == "list":
        data_sets = [_digits(), _cifar10(folder), _imagenet(folder)]
    elif name == "digits":
        data_sets = [_digits()]
    elif name == IMAGENET:
        data_sets = [_imagenet(folder, is_checked=True)]
    else:
        data_sets = [_download(folder)]
    table = plain_table("set", "here", "what", texts=("here", "what"))
    for data_set in data_sets:
        table.add_row(data_set["name"], "yes" if data_set["here"] else "no", data_set["what"])
    return Answer([table], {"kind": "data", "sets": data_sets})


def _digits() -> dict[str, Any]:
    from sipp.experiments.data import load_digits

    images = load_digits()
    what = f"{images.n_train:,} training and {images.n_test:,} test images, 1 x 8 x 8, part of scikit-learn"
    return {"name": "digits", "here": True, "folder": None, "what": what}


def _cifar10(folder: Path) -> dict[str, Any]:
    """Whether CIFAR-10 is there; its bytes are verified when it is read or downloaded."""
    from sipp.experiments.data.cifar10 import BIN_FOLDER

    here = folder / BIN_FOLDER if (folder / BIN_FOLDER).is_dir() else None
    what = "50,000 training and 10,000 test images, 3 x 32 x 32"
    what += f", in {here}" if here else f"; download it (170 MB): sipp data cifar10 {folder}"
    return {"name": "cifar10", "here": here is not None, "folder": here, "what": what}


def _imagenet(folder: Path, *, is_checked: bool = False) -> dict[str, Any]:
    """Whether the images are there and, if checked, how many. Its licence does not allow us to download them."""
    from sipp.experiments.data import index_folders

    root = folder / IMAGENET if (folder / IMAGENET).is_dir() or not is_checked else folder
    places = f"{root}/train/CLASS/*.jpg and {root}/val/CLASS/*.jpg"
    here = (root / "train").is_dir() and (root / "val").is_dir()
    what = f"images in {root}" if here else f"put the images there yourself: {places}"
    if is_checked:
        with naming_option(f"sipp data {IMAGENET} {folder}", f"put images at {places}"):
            index = index_folders(root)
        counts = f"{index.n_train:,} training and {index.n_test:,} validation images"
        what = f"{counts} of {len(index.classes):,} classes in {root}"
    return {"name": IMAGENET, "here": here, "folder": root if here else None, "what": what}


def _download(folder: Path) -> dict[str, Any]:
    """Downloads CIFAR-10 unless it is there."""
    from sipp.experiments.data import fetch_cifar10
    from sipp.experiments.data.cifar10 import BIN_FOLDER, N_BYTES

    with (
        naming_option(f"sipp data cifar10 {folder}", f"put the official {BIN_FOLDER} into {folder}"),
        progress_bar("fetching CIFAR-10, bytes", N_BYTES, shown=True) as advance,
    ):
        source = "present" if (folder / BIN_FOLDER).exists() else "official"
        place = fetch_cifar10(folder, progress=advance)
    came = "was here already" if source == "present" else f"came from the {source} source"
    what = f"50,000 training and 10,000 test images in {place}, checked; {came}"
    return {"name": "cifar10", "here": True, "folder": place, "source": source, "what": what}
