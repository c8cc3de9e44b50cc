"""The command `sipp prune`: a network and data in, the sparse network and its report out, as a folder or one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sipp.cli.options import (
    GUARANTEE_PANEL,
    OUTPUT_PANEL,
    PRUNE_PANEL,
    REPAIR_PANEL,
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
from sipp.records.options import (
    CONFIDENCE,
    DEFAULT_METHOD,
    DELTA,
    HOLDOUT_DELTA,
    Draws,
    Method,
    Mode,
    Precision,
    Reduce,
)
from sipp.scoring.methods import NAMES
from sipp.storage.outputs import FILE_SUFFIX, RECORD_NAME, WEIGHTS_NAME

if TYPE_CHECKING:
    from sipp.cli.prune_request import PruneRequest

Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Instead of --keep: prune as far as this relative error is certified (T15).", rich_help_panel=PRUNE_PANEL
    ),
]
AccuracyDrop = Annotated[
    float | None,
    typer.Option(
        help="Instead of --keep: prune as far as this accuracy drop is certified.", rich_help_panel=PRUNE_PANEL
    ),
]
HoldoutData = Annotated[
    str | None,
    typer.Option(
        help="Points for a certificate, new to the network; default with --epsilon: split off the data.",
        rich_help_panel=GUARANTEE_PANEL,
    ),
]
HoldoutDelta = Annotated[
    float,
    typer.Option(
        help="Share of inputs that may be further off than the certificate says.", rich_help_panel=GUARANTEE_PANEL
    ),
]
MethodName = Annotated[
    Method, typer.Option(help=f"How weights are chosen: {', '.join(NAMES)}.", rich_help_panel=PRUNE_PANEL)
]
OwnReduce = Annotated[
    Reduce | None,
    typer.Option(
        help="How scores on many patches become one; mean has no bounds (T3). Default: the method's own.",
        rich_help_panel=PRUNE_PANEL,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help=f"New folder for {WEIGHTS_NAME} and {RECORD_NAME}; or one small file, name{FILE_SUFFIX}.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Values = Annotated[
    Precision,
    typer.Option(
        help=f"Values in name{FILE_SUFFIX}: fp32, lossless; fp16, bf16 and int8 round, and are certified as stored.",
        metavar="FORMAT",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
PatternOption = Annotated[
    str | None,
    typer.Option(help="Instead of --keep: n of every m weights of a row, such as 2:4.", rich_help_panel=PRUNE_PANEL),
]
NoStatements = Annotated[
    bool,
    typer.Option(
        "--no-statements",
        help="Do not score the weights that another method chose (T17): faster.",
        rich_help_panel=GUARANTEE_PANEL,
    ),
]
Repair = Annotated[
    bool,
    typer.Option("--repair", help="Refit the kept weights on the data, without labels.", rich_help_panel=REPAIR_PANEL),
]
FloorOption = Annotated[
    str,
    typer.Option(
        help="What each row and layer keeps at least: a share of an even cut such as 0.1, off, or the method's own.",
        rich_help_panel=PRUNE_PANEL,
    ),
]


Keep = Annotated[
    float | None,
    typer.Option(help="Share of the prunable weights to keep, in (0, 1].", rich_help_panel=PRUNE_PANEL),
]
Budget = Annotated[
    int | None, typer.Option(help="Instead of --keep: the number of weights to keep.", rich_help_panel=PRUNE_PANEL)
]
Delta = Annotated[
    float,
    typer.Option(help="Theory: probability that the inequality of T4 fails.", rich_help_panel=GUARANTEE_PANEL),
]
DrawsOption = Annotated[
    Draws,
    typer.Option(
        help="Methods that draw weights: to the number kept, or so many draws (T8).", rich_help_panel=PRUNE_PANEL
    ),
]
Bound = Annotated[
    Mode,
    typer.Option(help="Theory: the paper's bound (T12), or operator norms (T13).", rich_help_panel=GUARANTEE_PANEL),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print what would be done and what it costs; write nothing.", rich_help_panel=OUTPUT_PANEL
    ),
]


def prune(
    model: Model,
    data: Data = None,
    weights: Weights = None,
    normalise: Normalise = None,
    points: PointsOption = None,
    keep: Keep = None,
    method: MethodName = DEFAULT_METHOD,
    epsilon: Epsilon = None,
    max_accuracy_drop: AccuracyDrop = None,
    budget: Budget = None,
    pattern: PatternOption = None,
    include: Include = None,
    exclude: Exclude = None,
    floor: FloorOption = "method",
    reduce: OwnReduce = None,
    draws: DrawsOption = "until",
    holdout: HoldoutData = None,
    holdout_points: HoldoutPoints = None,
    holdout_delta: HoldoutDelta = HOLDOUT_DELTA,
    confidence: Confidence = CONFIDENCE,
    output: OutputPart = None,
    ledger: Ledger = None,
    delta: Delta = DELTA,
    bound: Bound = "paper",
    no_statements: NoStatements = False,
    repair: Repair = False,
    out: Out = None,
    dry_run: DryRun = False,
    values: Values = "fp32",
    force: Force = False,
    as_json: Json = False,
    device: Device = "auto",
    batch_size: BatchSize = None,
    seed: Seed = 0,
) -> None:
    """Prune a network to a share of its weights, or as far as a certificate allows.

    For example: sipp prune --model digits-cnn --data digits --keep 0.3 --dry-run. T1 to T20 stand in docs/theory.md.
    """
    from sipp.cli.prune_request import PruneRequest

    request = PruneRequest(
        model=model, weights=weights, data=data, keep=keep, budget=budget, pattern=pattern, epsilon=epsilon,
        max_accuracy_drop=max_accuracy_drop, holdout=holdout, normalise=normalise, method=method, include=include,
        exclude=exclude, points=points, holdout_points=holdout_points, delta=delta, holdout_delta=holdout_delta,
        confidence=confidence, draws=draws, reduce=reduce, floor=floor_of(floor), repair=repair,
        statements=not no_statements, bound=bound, output=output, ledger=ledger, seed=seed, batch_size=batch_size,
        device=device, dry_run=dry_run, out=out, values=values, force=force,
    )  # fmt: skip
    _answer(request, as_json)


def _answer(request: PruneRequest, as_json: bool) -> None:
    """Does what was asked for, and says so."""
    from sipp.cli.prune_request import check
    from sipp.cli.pruning import not_certified, record_of, tell, work, write

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
