"""The command `sipp prune`: a network and data in, a folder with the sparse network and its report out."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

import sipp
from sipp.certificates.evidence import model_hash
from sipp.certificates.record import AnyCertificate, Certificate
from sipp.cli.errors import NOT_CERTIFIED, Trouble, at
from sipp.cli.files import write_folder
from sipp.cli.models import load_model, weights_file
from sipp.cli.options import (
    BatchSize,
    Confidence,
    Data,
    Device,
    Exclude,
    Force,
    HoldoutPoints,
    Include,
    Model,
    OutputPart,
    PointsOption,
    Seed,
    Weights,
    output_of,
)
from sipp.cli.output import Json, only_json, plain, print_json, show, shows_progress, size, too_wide
from sipp.cli.points import Points, check_fits, summary
from sipp.cli.pruned_record import certificate_record, layer_table, path_record, pruned_record, statements
from sipp.cli.request import CONFIDENCE, DELTA, HOLDOUT_DELTA, Ask, check, check_enough, points_for
from sipp.options import Draws, Mode, Reduce
from sipp.pruning.result import Pruned
from sipp.pruning.tolerance import PrunedTo
from sipp.scoring.methods import NAMES, Method, method_of
from sipp.storage.files import file_hash, seal
from sipp.storage.marks import RECORD_NAME, WEIGHTS_NAME
from sipp.storage.tensors import tensors_to_bytes

LOOKED = "; the holdout was looked at: a claim on the same points is no longer a first look"


@dataclass(frozen=True)
class Outcome:
    """What came of it; `pruned` is None where no level was certified."""

    dense: nn.Module
    pruned: Pruned | None
    walk: PrunedTo | None
    certificate: AnyCertificate | None
    calibration: Points | None
    holdout: Points | None
    seconds: dict[str, float]

    @property
    def certified(self) -> bool:
        """Whether what was asked for was reached; a walk that ends where it began has pruned nothing (T15)."""
        if self.pruned is None or (self.walk is not None and self.pruned.kept == self.pruned.n_weights):
            return False
        return getattr(self.certificate, "verdict", "certified") == "certified"


def prune(
    model: Model,
    weights: Weights = None,
    data: Data = None,
    keep: Annotated[float | None, typer.Option(help="Share of the prunable weights to keep, in (0, 1].")] = None,
    budget: Annotated[int | None, typer.Option(help="Number of weights to keep, instead of --keep.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Instead of --keep: prune as far as this relative error is certified (T15).")
    ] = None,
    max_accuracy_drop: Annotated[
        float | None, typer.Option(help="Instead of --keep: prune as far as this accuracy drop is certified.")
    ] = None,
    holdout: Annotated[
        str | None, typer.Option(help="Points for the certificate; default with --epsilon: split off the data.")
    ] = None,
    method: Annotated[Method, typer.Option(help=f"How weights are chosen: {', '.join(NAMES)}.")] = "sipp-hybrid",
    include: Include = None,
    exclude: Exclude = None,
    points: PointsOption = None,
    holdout_points: HoldoutPoints = None,
    delta: Annotated[float, typer.Option(help="Probability that the inequality of T4 fails.")] = DELTA,
    holdout_delta: Annotated[
        float, typer.Option(help="Share of inputs that may be further off than the certificate says.")
    ] = HOLDOUT_DELTA,
    confidence: Confidence = CONFIDENCE,
    draws: Annotated[Draws, typer.Option(help="How sampled rows are drawn (T8).")] = "until",
    reduce: Annotated[
        Reduce | None, typer.Option(help="Over patches; mean has no bounds (T3). The default is the method's own.")
    ] = None,
    bound: Annotated[Mode, typer.Option(help="How the network bound is computed (T12, T13).")] = "paper",
    output: OutputPart = None,
    ledger: Annotated[Path | None, typer.Option(help="File that records every use of a holdout.")] = None,
    seed: Seed = 0,
    batch_size: BatchSize = None,
    device: Device = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table and the bounds; write nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help=f"New folder for {WEIGHTS_NAME} and {RECORD_NAME}.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Prune a network to a share of its weights, or as far as a certificate allows."""
    ask = Ask(
        model=model, weights=weights, data=data, keep=keep, budget=budget, epsilon=epsilon,
        max_accuracy_drop=max_accuracy_drop, holdout=holdout, method=method, include=include, exclude=exclude,
        points=points, holdout_points=holdout_points, delta=delta, holdout_delta=holdout_delta, confidence=confidence,
        draws=draws, reduce=reduce, bound=bound, output=output, ledger=ledger, seed=seed,
        batch_size=batch_size, device=device, dry_run=dry_run, out=out, force=force, progress=shows_progress(as_json),
    )  # fmt: skip
    with only_json(as_json):
        check(ask)
        outcome = _work(ask)
        record = _record(ask, outcome)
        written = _write(ask, outcome, record)
        if not as_json:
            _tell(ask, outcome, written)
    if as_json:
        print_json(record | {"written": written})
    if not outcome.certified:
        raise _not_certified(ask, outcome)


def _not_certified(ask: Ask, outcome: Outcome) -> Trouble:
    """The end with exit code 3: nothing below the dense network passed, and nothing was written."""
    verdict = getattr(outcome.certificate, "verdict", "")
    if outcome.walk is not None:
        verdict = "not certified: no level below the dense network passes"
    spec = outcome.holdout.spec if outcome.holdout is not None else ask.data
    return Trouble(
        f"{verdict}; nothing was written",
        f"--holdout {spec}" if ask.holdout else f"--data {spec}, the holdout taken from it",
        f"allow more ({'--max-accuracy-drop' if ask.max_accuracy_drop is not None else '--epsilon, --holdout-delta'}), "
        "or give more holdout points",
        NOT_CERTIFIED,
    )


def _work(ask: Ask) -> Outcome:
    """The pruned network with everything it was made from."""
    begun = time.perf_counter()
    model = load_model(ask.model, ask.weights, seed=ask.seed, device=ask.device)
    calibration, holdout = points_for(ask, model)
    if calibration is not None:
        check_fits(model, calibration, ask.model, "--data")
    if holdout is not None:
        check_fits(model, holdout, ask.model, "--holdout" if ask.holdout else "--data")
        check_enough(ask, holdout)
    loaded = time.perf_counter()
    where = f"--model {ask.model}" + (f", --data {calibration.spec}" if calibration is not None else "")
    where += f", --holdout {ask.holdout}" if ask.holdout else ""
    with at(where, "see sipp prune --help"):
        if ask.has_tolerance:
            assert calibration is not None and holdout is not None
            pruned, walk, certificate = _prune_to(ask, model, calibration, holdout)
        else:
            walk = None
            pruned, certificate = _prune(ask, model, calibration, holdout)
    ended = time.perf_counter()
    seconds = {"load": loaded - begun, "prune": ended - loaded}
    return Outcome(model, pruned, walk, certificate, calibration, holdout, seconds)


def _prune(
    ask: Ask, model: nn.Module, calibration: Points | None, holdout: Points | None
) -> tuple[Pruned, Certificate | None]:
    pruned = sipp.prune(
        model,
        None if calibration is None else calibration.batches,
        keep=ask.keep,
        budget=ask.budget,
        method=ask.method,
        delta=ask.delta,
        confidence=ask.confidence,
        seed=ask.seed,
        draws=ask.draws,
        reduce=ask.reduce,
        include=ask.include,
        exclude=ask.exclude,
        bound=ask.bound,
        progress=ask.progress,
    )
    if holdout is None:
        return pruned, None
    certificate = sipp.certify(
        model,
        pruned.model,
        holdout.batches,
        delta=ask.holdout_delta,
        confidence=ask.confidence,
        output=output_of(ask.output),
        calibration=None if calibration is None else calibration.batches,
        ledger=ask.ledger,
    )
    return pruned, certificate


def _prune_to(
    ask: Ask, model: nn.Module, calibration: Points, holdout: Points
) -> tuple[Pruned | None, PrunedTo, AnyCertificate | None]:
    walk = sipp.prune_to(
        model,
        calibration.batches,
        holdout.batches,
        epsilon=ask.epsilon,
        max_accuracy_drop=ask.max_accuracy_drop,
        delta=ask.holdout_delta,
        confidence=ask.confidence,
        method=ask.method,
        seed=ask.seed,
        reduce=ask.reduce,
        include=ask.include,
        exclude=ask.exclude,
        output=output_of(ask.output),
        ledger=ask.ledger,
        progress=ask.progress,
    )
    return walk.pruned, walk, walk.certificate


def _record(ask: Ask, outcome: Outcome) -> dict[str, Any]:
    """What report.json and --json hold."""
    if outcome.pruned is not None:
        record = pruned_record(outcome.pruned)
    else:
        record = {
            "kind": "not certified",
            "sipp": sipp.__version__,
            "method": ask.method,
            "seed": ask.seed,
            "keep": 1.0,
        }
    return record | {
        "model": ask.model,
        "weights": None if ask.weights is None else str(ask.weights),
        "weights_sha256": None if ask.weights is None else file_hash(weights_file(ask.weights)),
        "dense_hash": model_hash(outcome.dense),
        "pruned_hash": None if outcome.pruned is None else model_hash(outcome.pruned.model),
        "data": summary(outcome.calibration),
        "holdout": summary(outcome.holdout),
        "keep_asked": ask.keep,
        "epsilon_asked": ask.epsilon,
        "max_accuracy_drop_asked": ask.max_accuracy_drop,
        "include": ask.include,
        "exclude": ask.exclude,
        "delta": ask.delta,
        "holdout_delta": ask.holdout_delta,
        "confidence": ask.confidence,
        "draws": ask.draws,
        "reduce": ask.reduce or method_of(ask.method).reduce,
        "verdict": None if outcome.walk is None else outcome.walk.verdict,
        "path": [] if outcome.walk is None else path_record(outcome.walk.path),
        "certificate": certificate_record(outcome.certificate),
        "dry_run": ask.dry_run,
        "seconds": {name: round(value, 3) for name, value in outcome.seconds.items()},
    }


def _write(ask: Ask, outcome: Outcome, record: dict[str, Any]) -> dict[str, int]:
    """The files written, {path: bytes}; none in a dry run, and none where nothing is certified."""
    if ask.out is None or ask.dry_run or outcome.pruned is None or not outcome.certified:
        return {}
    with at(f"--out {ask.out}", "give another folder"):
        tensors = tensors_to_bytes(outcome.pruned.model.state_dict())
        report = json.dumps(seal(plain(record)), indent=1, allow_nan=False).encode()
        write_folder(ask.out, {WEIGHTS_NAME: tensors, RECORD_NAME: report}, force=ask.force)
    return {str(ask.out / WEIGHTS_NAME): len(tensors), str(ask.out / RECORD_NAME): len(report)}


def _tell(ask: Ask, outcome: Outcome, written: dict[str, int]) -> None:
    """Nothing; prints what was done."""
    origin = f"weights {ask.weights}" if ask.weights is not None else f"freshly initialised (seed {ask.seed})"
    calibration = "not used" if outcome.calibration is None else outcome.calibration.words
    show(f"network: {ask.model}, {origin}", f"data:    {calibration}")
    if outcome.holdout is not None:
        show(f"holdout: {outcome.holdout.words}")
    if outcome.pruned is not None:
        table = layer_table(outcome.pruned)
        show(layer_table(outcome.pruned, compact=True) if too_wide(table) else table, *statements(outcome.pruned))
    if outcome.calibration is not None and outcome.calibration.kind == "random":
        show("noise:           the scores and bounds above are about random inputs, not about yours")
    if outcome.walk is not None:
        show(str(outcome.walk))
    elif outcome.certificate is not None:
        show(f"certificate:     {outcome.certificate.sentence}")
    for path, n_bytes in written.items():
        show(f"written:         {path} ({size(n_bytes)})")
    if written:
        show("                 zeros are stored in place: the file is as large as before pruning")
    if ask.dry_run:
        show("dry run:         nothing was written" + (LOOKED if outcome.holdout is not None else ""))
    show(f"time:            {outcome.seconds['load']:.1f} s loading, {outcome.seconds['prune']:.1f} s pruning")
