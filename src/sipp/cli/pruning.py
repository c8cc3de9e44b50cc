"""The work of `sipp prune`: points read, the network pruned or walked to a tolerance, files written, words said."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn

import sipp
from sipp.cli.errors import NOT_CERTIFIED, Trouble, at
from sipp.cli.hugging_face import PREFIX
from sipp.cli.models import load_model, weights_file
from sipp.cli.options import output_of
from sipp.cli.output import show, size, too_wide
from sipp.cli.points import Points, check_fits, images_lines, summary
from sipp.cli.prune_request import PruneRequest, check_enough, points_for
from sipp.cli.pruned_table import layer_table, path_record, statements
from sipp.records.binomial import points_to_prove
from sipp.records.certificate import AnyCertificate, Certificate, certificate_values
from sipp.records.contents import Contents
from sipp.records.network_hash import model_hash
from sipp.records.pruned import Pruned
from sipp.records.pruned_to import PrunedTo
from sipp.records.serialising import pruned_values
from sipp.scoring.methods import method_of
from sipp.storage.files import file_hash
from sipp.storage.network_tensors import as_stored
from sipp.storage.outputs import NETWORK, check_file
from sipp.storage.pruned_folder import write_pruned

IN_WALK = "what the certificate below says."
LOOKED = "; the holdout was looked at: a claim on the same points is no longer a first look"


@dataclass(frozen=True)
class Outcome:
    """What came of it; `pruned` is None where no level was certified."""

    dense: nn.Module
    pruned: Pruned | None
    stored: nn.Module | None  # with the values that the file gives back, which the certificate is about
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


def not_certified(request: PruneRequest, outcome: Outcome) -> Trouble:
    """The end with exit code 3: nothing below the dense network passed, and nothing was written."""
    verdict = getattr(outcome.certificate, "verdict", "")
    if outcome.walk is not None:
        verdict = "not certified: no level below the dense network passes"
    loosened = "--max-accuracy-drop" if request.max_accuracy_drop is not None else "--epsilon, --holdout-delta"
    spec = outcome.holdout.spec if outcome.holdout is not None else request.data
    return Trouble(
        f"{verdict}; nothing was written",
        where=f"--holdout {spec}" if request.holdout else f"--data {spec}, the holdout taken from it",
        fix=f"allow more ({loosened}), or give more holdout points",
        code=NOT_CERTIFIED,
    )


def work(request: PruneRequest) -> Outcome:
    """The pruned network with everything it was made from."""
    begun = time.perf_counter()
    model = load_model(request.model, request.weights, seed=request.seed, device=request.device)
    calibration, holdout = points_for(request, model)
    if calibration is not None:
        check_fits(model, calibration, request.model, "--data")
    if holdout is not None:
        check_fits(model, holdout, request.model, "--holdout" if request.holdout else "--data")
        check_enough(request, holdout)
    loaded = time.perf_counter()
    where = f"--model {request.model}" + (f", --data {calibration.spec}" if calibration is not None else "")
    where += f", --holdout {request.holdout}" if request.holdout else ""
    with at(where, "see sipp prune --help"):
        if request.has_tolerance:
            assert calibration is not None and holdout is not None
            pruned, walk, certificate = _prune_to(request, model, calibration, holdout)
            stored = None if pruned is None else pruned.model  # a walk rounds nothing
        else:
            walk = None
            pruned, stored, certificate = _prune(request, model, calibration, holdout)
    ended = time.perf_counter()
    seconds = {"load": loaded - begun, "prune": ended - loaded}
    return Outcome(model, pruned, stored, walk, certificate, calibration, holdout, seconds)


def _prune(
    request: PruneRequest, model: nn.Module, calibration: Points | None, holdout: Points | None
) -> tuple[Pruned, nn.Module, Certificate | None]:
    pruned = sipp.prune(
        model,
        None if calibration is None else calibration.batches,
        keep=request.keep,
        budget=request.budget,
        pattern=request.pattern,
        method=request.method,
        delta=request.delta,
        confidence=request.confidence,
        seed=request.seed,
        draws=request.draws,
        reduce=request.reduce,
        floor=request.floor,
        repair=request.repair,
        statements=request.statements,
        include=request.include,
        exclude=request.exclude,
        bound=request.bound,
    )
    stored = as_stored(pruned.model, request.values) if request.rounds else pruned.model
    if holdout is None:
        return pruned, stored, None
    certificate = sipp.certify(
        model,
        stored,
        holdout.batches,
        delta=request.holdout_delta,
        confidence=request.confidence,
        output=output_of(request.output),
        calibration=None if calibration is None else calibration.batches,
        ledger=request.ledger,
    )
    return pruned, stored, certificate


def _prune_to(
    request: PruneRequest, model: nn.Module, calibration: Points, holdout: Points
) -> tuple[Pruned | None, PrunedTo, AnyCertificate | None]:
    walk = sipp.prune_to(
        model,
        calibration.batches,
        holdout.batches,
        epsilon=request.epsilon,
        max_accuracy_drop=request.max_accuracy_drop,
        delta=request.holdout_delta,
        confidence=request.confidence,
        method=request.method,
        seed=request.seed,
        reduce=request.reduce,
        floor=request.floor,
        repair=request.repair,
        include=request.include,
        exclude=request.exclude,
        output=output_of(request.output),
        ledger=request.ledger,
    )
    return walk.pruned, walk, walk.certificate


def record_of(request: PruneRequest, outcome: Outcome) -> dict[str, Any]:
    """What report.json and --json hold."""
    if outcome.pruned is not None:
        record = pruned_values(outcome.pruned)
    else:
        record = {
            "kind": "not certified",
            "sipp": sipp.__version__,
            "method": request.method,
            "seed": request.seed,
            "keep": 1.0,
        }
    return record | {
        "model": request.model,
        "weights": None if request.weights is None else str(request.weights),
        "weights_sha256": None if request.weights is None else file_hash(weights_file(request.weights)),
        "dense_hash": model_hash(outcome.dense),
        "pruned_hash": None if outcome.stored is None else model_hash(outcome.stored),
        "data": summary(outcome.calibration),
        "holdout": summary(outcome.holdout),
        "keep_asked": request.keep,
        "pattern": request.pattern,
        "epsilon_asked": request.epsilon,
        "max_accuracy_drop_asked": request.max_accuracy_drop,
        "include": request.include,
        "exclude": request.exclude,
        "delta": request.delta,
        "holdout_delta": request.holdout_delta,
        "confidence": request.confidence,
        "draws": request.draws,
        "reduce": request.reduce or method_of(request.method).reduce,
        "floor": request.floor,
        "repair": request.repair,
        "verdict": None if outcome.walk is None else outcome.walk.verdict,
        "path": [] if outcome.walk is None else path_record(outcome.walk.path),
        "certificate": certificate_values(outcome.certificate),
        "dry_run": request.dry_run,
        "seconds": {name: round(value, 3) for name, value in outcome.seconds.items()},
    }


@dataclass(frozen=True)
class Written:
    """The files that were written, and what is in the one small file, where it is one."""

    files: dict[str, int]  # {path: bytes}
    contents: Contents | None = None

    @property
    def record(self) -> dict[str, Any]:
        """What --json says of it."""
        if self.contents is None:
            return {"written": self.files}
        values = {
            "format": self.contents.precision,
            "moved": self.contents.moved,
            "largest_change": max(one.largest_change for one in self.contents.tensors),
            "norm_change": max(one.norm_change for one in self.contents.tensors),
            "certificate_about": self.contents.certificate_about,
            "statements_about": self.contents.statements_about,
        }
        return {"written": self.files, "values": values}


def write(request: PruneRequest, outcome: Outcome, record: dict[str, Any]) -> Written:
    """Writes the network; nothing in a dry run, and nothing where nothing is certified."""
    if request.out is None or request.dry_run or outcome.pruned is None or not outcome.certified:
        return Written({})
    if request.is_one_file:
        with at(f"--out {request.out}", "give another place"):
            check_file(request.out, NETWORK, force=request.force)
            saved = sipp.save(outcome.pruned, request.out, values=request.values, certificate=outcome.certificate)
        return Written({str(request.out): saved.n_bytes}, saved)
    with at(f"--out {request.out}", "give another folder"):
        files = write_pruned(request.out, outcome.pruned.model.state_dict(), record, force=request.force)
    return Written({str(path): n_bytes for path, n_bytes in files.items()})


def more_points_words(request: PruneRequest, outcome: Outcome) -> str:
    """How many points would certify the first level that failed, where what was seen there is no obstacle (T15)."""
    if outcome.walk is None or outcome.holdout is None:
        return ""
    failed = next((level for level in outcome.walk.path if not level.passed), None)
    if failed is None:
        return ""
    n, beta = outcome.holdout.n_points, 1.0 - request.confidence
    if request.max_accuracy_drop is None:
        bad, limit = "further off", request.holdout_delta
    else:  # half of beta goes to points that gained, of which none are counted on here (T16)
        bad, limit, beta = "worse", request.max_accuracy_drop, beta / 2
    needed = points_to_prove(failed.count, n, limit, beta)
    if needed is None or needed <= n:
        return ""
    return (
        f"more points:     keep {failed.keep:.2%} failed with {failed.count:,} of {n:,} points {bad}: if that share "
        f"stays, about {_rounded_up(needed):,} holdout points certify it"
    )


def _rounded_up(n: int) -> int:
    """Two digits of a number are enough for a plan."""
    step = 10 ** max(0, len(str(n)) - 2)
    return -(-n // step) * step


def tell(request: PruneRequest, outcome: Outcome, written: Written) -> None:
    """Prints what was done."""
    if request.weights is not None:
        origin = f"weights {request.weights}"
    else:
        is_folder = request.model.startswith(PREFIX)
        origin = "weights of that folder" if is_folder else f"freshly initialised (seed {request.seed})"
    calibration = "not used" if outcome.calibration is None else outcome.calibration.words
    show(f"network: {request.model}, {origin}", f"data:    {calibration}")
    if outcome.holdout is not None:
        show(f"holdout: {outcome.holdout.words}")
    show(*images_lines(outcome.calibration, outcome.holdout))
    if outcome.pruned is not None:
        table = layer_table(outcome.pruned)
        certified = "" if outcome.certificate is None else IN_WALK  # a walk says it itself
        if outcome.certificate is not None and outcome.walk is None:
            certified = ("about the stored values: " if request.rounds else "") + outcome.certificate.sentence
        said = statements(outcome.pruned, certified)
        show(layer_table(outcome.pruned, compact=True) if too_wide(table) else table, *said)
    if outcome.calibration is not None and outcome.calibration.kind == "random":
        show("noise:           the scores and bounds above are about random inputs, not about yours")
    if outcome.walk is not None:
        show(str(outcome.walk))
        if words := more_points_words(request, outcome):
            show(words)
    for path, n_bytes in written.files.items():
        show(f"written:         {path} ({size(n_bytes)})")
    if written.contents is not None:
        ratio = written.contents.dense_bytes / written.contents.n_bytes
        show(f"                 {ratio:.2f} x smaller than dense; see sipp inspect, sipp bench")
        if written.contents.moved:
            show(f"values:          {written.contents.moved}; the statements above are about the values before that")
    elif written.files:
        show("                 zeros are stored in place: the file is as large as before pruning")
    if request.dry_run:
        show("dry run:         nothing was written" + (LOOKED if outcome.holdout is not None else ""))
    show(f"time:            {outcome.seconds['load']:.1f} s loading, {outcome.seconds['prune']:.1f} s pruning")
