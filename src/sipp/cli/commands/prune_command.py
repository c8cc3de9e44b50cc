"""The command `sipp prune`: a network and data in, the sparse network and its report out, as a folder or one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.options import (
    BatchSize,
    Confidence,
    Data,
    Device,
    Exclude,
    Force,
    HoldoutPoints,
    Include,
    Ledger,
    Model,
    Normalise,
    OutputPart,
    PointsOption,
    Seed,
    Weights,
    floor_of,
)
from sipp.cli.output import Json, only_json, print_json
from sipp.options import CONFIDENCE, DELTA, HOLDOUT_DELTA, Draws, Mode, Reduce
from sipp.scoring.methods import DEFAULT, NAMES, Method
from sipp.storage.marks import FILE_SUFFIX, RECORD_NAME, WEIGHTS_NAME, Precision

Epsilon = Annotated[
    float | None, typer.Option(help="Instead of --keep: prune as far as this relative error is certified (T15).")
]
AccuracyDrop = Annotated[
    float | None, typer.Option(help="Instead of --keep: prune as far as this accuracy drop is certified.")
]
HoldoutData = Annotated[
    str | None, typer.Option(help="Points for the certificate; default with --epsilon: split off the data.")
]
HoldoutDelta = Annotated[float, typer.Option(help="Share of inputs that may be further off than the certificate says.")]
MethodName = Annotated[Method, typer.Option(help=f"How weights are chosen: {', '.join(NAMES)}.")]
OwnReduce = Annotated[
    Reduce | None, typer.Option(help="Over patches; mean has no bounds (T3). The default is the method's own.")
]
Out = Annotated[
    Path | None,
    typer.Option(help=f"New folder for {WEIGHTS_NAME} and {RECORD_NAME}; or one small file, name{FILE_SUFFIX}."),
]
Values = Annotated[
    Precision,
    typer.Option(help=f"Values in the file name{FILE_SUFFIX}; fp16, bf16 and int8 round, and are certified as stored."),
]
PatternOption = Annotated[
    str | None, typer.Option(help="Instead of --keep: n of every m weights of a row, such as 2:4.")
]
NoStatements = Annotated[
    bool, typer.Option("--no-statements", help="Do not score the weights that another method chose (T17): faster.")
]
Repair = Annotated[bool, typer.Option("--repair", help="Refit the kept weights on the data, without labels.")]
FloorOption = Annotated[
    str, typer.Option(help="Under rows and layers: a share of an even cut such as 0.1, off, or the method's own.")
]


def prune(
    model: Model,
    weights: Weights = None,
    data: Data = None,
    keep: Annotated[float | None, typer.Option(help="Share of the prunable weights to keep, in (0, 1].")] = None,
    budget: Annotated[int | None, typer.Option(help="Number of weights to keep, instead of --keep.")] = None,
    pattern: PatternOption = None,
    epsilon: Epsilon = None,
    max_accuracy_drop: AccuracyDrop = None,
    holdout: HoldoutData = None,
    normalise: Normalise = None,
    method: MethodName = DEFAULT,
    include: Include = None,
    exclude: Exclude = None,
    points: PointsOption = None,
    holdout_points: HoldoutPoints = None,
    delta: Annotated[float, typer.Option(help="Probability that the inequality of T4 fails.")] = DELTA,
    holdout_delta: HoldoutDelta = HOLDOUT_DELTA,
    confidence: Confidence = CONFIDENCE,
    draws: Annotated[Draws, typer.Option(help="How sampled rows are drawn (T8).")] = "until",
    reduce: OwnReduce = None,
    floor: FloorOption = "method",
    repair: Repair = False,
    no_statements: NoStatements = False,
    bound: Annotated[Mode, typer.Option(help="How the network bound is computed (T12, T13).")] = "paper",
    output: OutputPart = None,
    ledger: Ledger = None,
    seed: Seed = 0,
    batch_size: BatchSize = None,
    device: Device = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table and the bounds; write nothing.")] = False,
    out: Out = None,
    values: Values = "fp32",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Prune a network to a share of its weights, or as far as a certificate allows."""
    from sipp.cli.prune_request import PruneRequest, check
    from sipp.cli.pruning import not_certified, record_of, tell, work, write

    request = PruneRequest(
        model=model, weights=weights, data=data, keep=keep, budget=budget, pattern=pattern, epsilon=epsilon,
        max_accuracy_drop=max_accuracy_drop, holdout=holdout, normalise=normalise, method=method, include=include,
        exclude=exclude, points=points, holdout_points=holdout_points, delta=delta, holdout_delta=holdout_delta,
        confidence=confidence, draws=draws, reduce=reduce, floor=floor_of(floor), repair=repair,
        statements=not no_statements, bound=bound, output=output, ledger=ledger, seed=seed, batch_size=batch_size,
        device=device, dry_run=dry_run, out=out, values=values, force=force,
    )  # fmt: skip
    with only_json(as_json):
        check(request)
        outcome = work(request)
        record = record_of(request, outcome)
        written = write(request, outcome, record)
        if not as_json:
            tell(request, outcome, written)
    if as_json:
        print_json(record | written.record)
    if not outcome.certified:
        raise not_certified(request, outcome)
