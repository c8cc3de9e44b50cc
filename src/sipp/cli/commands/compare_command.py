"""The command `sipp compare`: a network and data in, a table of all methods and which to use out; it writes no file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sipp
from sipp.cli.errors import Trouble, at
from sipp.cli.options import (
    KINDS,
    MODEL_PANEL,
    PRUNE_PANEL,
    REPAIR_PANEL,
    BatchSize,
    Device,
    Exclude,
    HoldoutPoints,
    Include,
    Ledger,
    Model,
    Normalise,
    OutputPart,
    PointsOption,
    Seed,
    Weights,
    n_points_of,
    output_of,
)
from sipp.cli.output import Json, only_json, print_json, show
from sipp.records.options import Method
from sipp.scoring.methods import NAMES, method_of

if TYPE_CHECKING:
    from torch import nn

    from sipp.cli.points import Points
    from sipp.records.comparison import Comparison

HoldoutData = Annotated[
    str | None,
    typer.Option(help="Points that judge; default: the last quarter of the data.", rich_help_panel=MODEL_PANEL),
]
Keeps = Annotated[
    str,
    typer.Option(
        help="Shares of the prunable weights to keep, each in (0, 1], with commas.", rich_help_panel=PRUNE_PANEL
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(help=f"With commas, of: {', '.join(NAMES)}. Default: a usual set.", rich_help_panel=PRUNE_PANEL),
]
Repair = Annotated[
    bool,
    typer.Option("--repair", help="Add every network with its kept weights refitted.", rich_help_panel=REPAIR_PANEL),
]


Calibration = Annotated[str, typer.Option(help=f"Calibration points: {KINDS}.", rich_help_panel=MODEL_PANEL)]


def compare(
    model: Model,
    data: Calibration,
    weights: Weights = None,
    holdout: HoldoutData = None,
    normalise: Normalise = None,
    points: PointsOption = None,
    keeps: Keeps = "0.5,0.3,0.1",
    methods: Methods = None,
    include: Include = None,
    exclude: Exclude = None,
    holdout_points: HoldoutPoints = None,
    ledger: Ledger = None,
    output: OutputPart = None,
    repair: Repair = False,
    as_json: Json = False,
    device: Device = "auto",
    batch_size: BatchSize = None,
    seed: Seed = 0,
) -> None:
    """Prune a network by every method at a few keeps, print what each does to its output, and which to use.

    For example: sipp compare --model digits-cnn --data digits --keeps 0.5,0.2
    """
    from sipp.cli.models import load_model
    from sipp.cli.points import default_points, draw, example_of, images_lines, open_source, summary
    from sipp.scoring.theory_points import sample_size

    with only_json(as_json):
        shares, names = _numbers(keeps), _names(methods)
        _check_holdout(holdout, holdout_points, ledger, (weights, data))
        network = load_model(model, weights, seed=seed, device=device)
        source = open_source(data, "calibration", "--data", seed=seed, model=model, normalise=normalise)

        def needed() -> int:
            example = example_of(source, network, model, seed=seed)
            return sample_size(network, example, include=include, exclude=exclude)

        with at(f"--model {model}, --data {data}", "see sipp compare --help"):
            n = n_points_of(points, source.n_points, needed, lambda: default_points(source, "calibration", needed))
            chosen = draw(source, n, seed=seed, batch_size=batch_size, model=network)
        judging = _judging(holdout, holdout_points, network, model, normalise, seed, batch_size)
        for option, found in (("--data", chosen), ("--holdout", judging)):
            _check(network, found, model, option)
        with at(f"--model {model}, --data {data}", "see sipp compare --help"):
            comparison = sipp.compare(
                network, chosen.batches, keeps=shares, methods=names, repair=repair,
                holdout=None if judging is None else judging.batches, include=include, exclude=exclude,
                output=output_of(output), ledger=ledger, seed=seed,
            )  # fmt: skip
        if not as_json:
            show(f"network: {model}", f"data:    {chosen.words}")
            if judging is not None:
                show(f"holdout: {judging.words}")
            show(*images_lines(chosen, judging), str(comparison))
            if chosen.kind == "random":
                show("noise: this is how methods do on random inputs, not on yours")
    if as_json:
        about = {"kind": "comparison", "sipp": sipp.__version__, "model": model, "seed": seed}
        print_json(about | {"data": summary(chosen), "holdout": summary(judging)} | _record(comparison))


def _check_holdout(
    holdout: str | None, holdout_points: int | None, ledger: Path | None, reads: tuple[Path | None, str]
) -> None:
    """Refuses what serves a holdout where there is none, and a ledger that cannot be written."""
    from sipp.cli.models import weights_read
    from sipp.cli.points import points_read
    from sipp.storage.outputs import check_ledger

    for option, value in (("--holdout-points", holdout_points), ("--ledger", ledger)):
        if holdout is None and value is not None:
            raise Trouble("there is no holdout", where=option, fix="give --holdout, or leave it out")
    if ledger is not None:
        weights, data = reads
        inputs = weights_read("--weights", weights) + points_read("--data", data) + points_read("--holdout", holdout)
        with at(f"--ledger {ledger}", "allow reading and writing, or give another file"):
            check_ledger(ledger, out=None, inputs=inputs)


def _numbers(keeps: str) -> list[float]:
    """The shares between the commas."""
    found = []
    for text in keeps.split(","):
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise Trouble(
                f"{text!r} is no share in (0, 1]", where=f"--keeps {keeps:.60}", fix="give numbers: 0.5,0.3,0.1"
            )
        found.append(share)
    return found


def _names(methods: str | None) -> list[Method] | None:
    """The methods between the commas; None: the usual ones."""
    if methods is None:
        return None
    with at(f"--methods {methods:.60}", f"give some of {','.join(NAMES)}"):
        return [method_of(text.strip()).name for text in methods.split(",")]


def _judging(
    spec: str | None,
    n_points: int | None,
    network: nn.Module,
    model: str,
    normalise: str | None,
    seed: int,
    size: int | None,
) -> Points | None:
    """The points of --holdout, if it was given."""
    from sipp.cli.points import default_points, draw, open_source

    if spec is None:
        return None
    source = open_source(spec, "holdout", "--holdout", seed=seed, model=model, normalise=normalise)
    n = n_points or default_points(source, "holdout", lambda: 0)
    return draw(source, n, seed=seed, batch_size=size, model=network)


def _check(network: nn.Module, points: Points | None, model: str, option: str) -> None:
    from sipp.cli.points import check_fits

    if points is not None:
        check_fits(network, points, model, option)


def _record(comparison: Comparison) -> dict[str, Any]:
    """The comparison in JSON's types, without what every single point did."""
    rows = [{key: value for key, value in asdict(row).items() if key != "moved"} for row in comparison.rows]
    counts = {name: getattr(comparison, name) for name in ("n_weights", "n_calibration", "n_points", "is_aside")}
    best = [comparison.best(keep).name for keep in comparison.keeps]
    about = {"dense_accuracy": comparison.dense_accuracy, "keeps": comparison.keeps, "best": best}
    return counts | about | {"sentence": comparison.sentence, "rows": rows}
