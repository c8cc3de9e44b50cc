"""Options that several commands share, so that a word means the same in all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from sipp.cli.errors import Trouble, at
from sipp.records.options import Floor, Reduce, check_floor

KINDS = (
    "a set (digits, cifar10 or cifar10:DIR), a file (.npy, .npz, .safetensors; .txt for hf:DIR), a folder of images, "
    "or noise (random:16x3x32x32)"
)
REAL_KINDS = KINDS.rpartition(", or")[0]  # of which a certificate can be made
DEFAULT_ROOT = Path("data")  # where sets lie

# The groups in which --help lists options, in the order of a command's arguments
MODEL_PANEL = "Model and data"
PRUNE_PANEL = "What to prune"
GUARANTEE_PANEL = "Guarantee"
REPAIR_PANEL = "Repair"
OUTPUT_PANEL = "Output"
MACHINE_PANEL = "Machine"

DEFAULT_RUNS = Path("runs")

Model = Annotated[
    str,
    typer.Option(
        help="A built-in network (resnet20, ...), package.module:callable of your own code, or hf:DIR.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help=".safetensors, .pt or a folder of `sipp prune`; default: freshly initialised.", rich_help_panel=MODEL_PANEL
    ),
]
Data = Annotated[str | None, typer.Option(help=f"Calibration points: {KINDS}.", rich_help_panel=MODEL_PANEL)]
Normalise = Annotated[
    str | None,
    typer.Option(
        help="How images become numbers: imagenet (the default), cifar10, none, or MEAN/STD by channel.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(help="Only layers of this name or glob; may be repeated.", rich_help_panel=PRUNE_PANEL),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="All but layers of this name or glob; may be repeated.", rich_help_panel=PRUNE_PANEL),
]
PointsOption = Annotated[
    str | None,
    typer.Option(
        help="How many calibration points: a number, all, or theory (T4). Default: all of a file, theory of a set.",
        rich_help_panel=MODEL_PANEL,
    ),
]
HoldoutPoints = Annotated[
    int | None,
    typer.Option(
        help="How many holdout points; default: all of a file or a set, up to 5,000 images of a folder.",
        min=1,
        rich_help_panel=GUARANTEE_PANEL,
    ),
]
Confidence = Annotated[
    float,
    typer.Option(
        help="Confidence of certificates and of statements about shares of inputs.", rich_help_panel=GUARANTEE_PANEL
    ),
]
OutputPart = Annotated[
    str | None,
    typer.Option(
        help="Which part of a network's output is compared: a number or a name (logits).",
        rich_help_panel=GUARANTEE_PANEL,
    ),
]
Ledger = Annotated[
    Path | None,
    typer.Option(
        help="File that records every use of a holdout; a check of a certificate only reads it.",
        rich_help_panel=GUARANTEE_PANEL,
    ),
]
ReduceOver = Annotated[
    Reduce, typer.Option(help="Over patches: max (with bounds) or mean (without, T3).", rich_help_panel=PRUNE_PANEL)
]
MOST_SEED = 2**63 - 1  # what torch.Generator takes
Seed = Annotated[
    int, typer.Option(help="Seed of everything that is drawn.", min=0, max=MOST_SEED, rich_help_panel=MACHINE_PANEL)
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        help="Points per forward pass; by default more, the smaller they are.", min=1, rich_help_panel=MACHINE_PANEL
    ),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.", rich_help_panel=MACHINE_PANEL)
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value: train.epochs=10.", rich_help_panel=MODEL_PANEL),
]
RunsOut = Annotated[
    Path,
    typer.Option(
        help="Folder that holds one folder per run; what is no run stays as it is.", rich_help_panel=OUTPUT_PANEL
    ),
]
DataRoot = Annotated[
    Path, typer.Option(help="Folder with cifar-10-batches-bin/, mnist/ or imagenet/.", rich_help_panel=MODEL_PANEL)
]
Workers = Annotated[int, typer.Option(help="Processes that decode image files.", min=0, rich_help_panel=MACHINE_PANEL)]
AcceptChanges = Annotated[
    bool,
    typer.Option(
        "--accept-changes", help="Resume although data, code or device changed.", rich_help_panel=OUTPUT_PANEL
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Replace what this command wrote there before; never what it reads, nor other files.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]


def n_points_of(
    text: str | None, n_all: int, theory: Callable[[], int], default: Callable[[], int | None]
) -> int | None:
    """The number of points that --points asks for, of `n_all`; None: all."""
    if text is None:
        return default()
    if text == "all":
        return None
    if text == "theory":
        return theory()
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise Trouble(
            f"{text!r} is no number of points", where=f"--points {text}", fix="give a number from 1 on, all or theory"
        )
    if int(text) > n_all:
        warnings.warn(f"--points {text}: there are only {n_all:,}, all of them are used", stacklevel=2)
    return int(text)


def output_of(text: str | None) -> int | str | None:
    """The index or the name that --output gives."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


def floor_of(text: str) -> Floor:
    """The floor that --floor names: a share, or a word."""
    with suppress(ValueError):
        return check_floor(float(text))
    with at("--floor", "give off, method, or a share such as 0.1"):
        return check_floor(text)
