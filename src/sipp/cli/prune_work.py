"""Runs `sipp prune`: reads the inputs, prunes to a size or a tolerance, certifies, writes and prints."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from torch import nn

import sipp
from sipp.certificates.evidence import holdout_data, refuse_shared
from sipp.cli.commands.prune_command import PruneRequest
from sipp.cli.data_option import Points, Reader, normalisation_lines, summary
from sipp.cli.data_sources import data_or_noise
from sipp.cli.errors import NOT_CERTIFIED, CommandError, naming_option
from sipp.cli.hugging_face_models import PREFIX
from sipp.cli.model_option import load_model, norm_stats_lines, norm_stats_of, weights_file
from sipp.cli.output import Answer
from sipp.cli.prune_checks import check
from sipp.errors import OptionError
from sipp.inputs.data import HELD_BACK_SHARE
from sipp.results.binomial import holdout_needed
from sipp.results.certificate import AnyCertificate, Certificate
from sipp.results.display import bytes_in_words, labelled_line, size_words
from sipp.results.jsonio import to_json
from sipp.results.network_hash import model_hash
from sipp.results.options import NormStats, PruneOptions, asked_values
from sipp.results.pruned import Pruned, pruned_sheet
from sipp.results.pruned_to import PrunedTo
from sipp.results.saved_file import SavedFile
from sipp.results.sheet import sheet_text
from sipp.results.stored import report_values
from sipp.scoring.methods import method_of
from sipp.scoring.task import sample_size
from sipp.storage.files import file_hash
from sipp.storage.outputs import check_file
from sipp.storage.pruned_folder import write_pruned
from sipp.storage.small_file import with_stored_values
from sipp.verbs.prune import prune_with
from sipp.verbs.prune_to import prune_to_with
from sipp_lab.nets import NETS

SEE_BELOW = "see the certificate below."
HOLDOUT_USED = "; but the holdout was used, so take other inputs for your next claim"
N_NOISE = 16  # noise inputs for a dry run of a built-in network without data


def run_prune(request: PruneRequest) -> Answer:
    """Prunes, writes the network and returns the report."""
    check(request)
    outcome = prune_network(request)
    record = json_record(request, outcome)
    written = write(request, outcome, record)
    failure = None if outcome.certified else not_certified(request, outcome)
    return Answer(report_lines(request, outcome, written), record | written.record, failure)


def points_for(request: PruneRequest, model: nn.Module) -> tuple[Points | None, Points | None]:
    """Disjoint calibration and holdout points for the network; None if not needed."""
    options = request.options
    reader = Reader(model, request.model, request.inputs, options.seed)
    holdout = None if request.holdout is None else reader.holdout(request.holdout, request.holdout_points)
    if not method_of(options.method).needs_data and request.data is None and not request.has_tolerance:
        return None, holdout
    spec = _data_spec(request)
    source = reader.open(spec)
    if request.has_tolerance and source.kind == "random":
        raise CommandError(
            "a certificate on noise says nothing about your inputs", where=source.where, fix="give real inputs"
        )

    def theory(example: Any) -> int:
        with naming_option(f"--model {request.model}", "see sipp prune --help"):
            n = sample_size(
                model, example, options.delta, method=options.method, include=options.include,
                exclude=options.exclude, k_constant=options.k_constant,
            )  # fmt: skip
        # a blend holds back a share of the points, and n must be left
        return math.ceil(n / (1 - HELD_BACK_SHARE)) if method_of(options.method).is_blend else n

    n = reader.n_calibration(source, request.points, theory)
    if request.has_tolerance and holdout is None and not source.has_holdout:
        return reader.split(source, n, request.holdout_points)
    if request.has_tolerance and holdout is None:
        holdout = reader.holdout(spec, request.holdout_points, "--data")
    return reader.draw(source, n), holdout


def _data_spec(request: PruneRequest) -> str:
    """The value of --data; noise for a dry run of a built-in network."""
    if request.data is not None:
        return request.data
    is_known = request.model in NETS
    if is_known and request.dry_run and not request.has_tolerance:
        return data_or_noise(None, request.model, N_NOISE, "sipp prune")
    noise = data_or_noise(None, request.model, N_NOISE, "") if is_known else f"random:{N_NOISE}x3x224x224"
    raise OptionError(
        f"{request.options.method} needs data" if not request.has_tolerance else "certifying a tolerance needs data",
        fix=f"give --data; for a dry run, noise will do: {noise}",
    )


def check_enough(request: PruneRequest, holdout: Points) -> None:
    """Refuses a holdout that is too small for any claim (T14), before the work."""
    if request.max_accuracy_drop is not None:
        return
    needed = holdout_needed(request.allowed_share, 1.0 - request.options.confidence)
    if holdout.n_points < needed:
        raise CommandError(
            f"not certified: it takes {needed} holdout inputs, and there are {holdout.n_points}; nothing was written",
            where=holdout.source.where + ("" if request.holdout else ", the half split off as holdout"),
            fix=f"give {needed} inputs or more, or a larger --share",
            code=NOT_CERTIFIED,
        )


@dataclass(frozen=True)
class PruneOutcome:
    """The result of pruning; `pruned` is None if no level was certified."""

    dense: nn.Module
    pruned: Pruned | None
    stored: nn.Module | None  # with values as stored in the file, which the certificate covers
    pruned_to: PrunedTo | None  # with --epsilon or --max-accuracy-drop
    certificate: AnyCertificate | None
    norm_stats: NormStats
    calibration: Points | None
    holdout: Points | None
    seconds: dict[str, float]

    @property
    def certified(self) -> bool:
        """Whether the goal was reached; a search that ends at the dense network has pruned nothing (T15)."""
        if self.pruned is None or (self.pruned_to is not None and self.pruned.kept == self.pruned.n_weights):
            return False
        return getattr(self.certificate, "verdict", "certified") == "certified"


def not_certified(request: PruneRequest, outcome: PruneOutcome) -> CommandError:
    """The error with exit code 3: no pruned network was certified, and nothing was written."""
    verdict = getattr(outcome.certificate, "verdict", "")
    if outcome.pruned_to is not None:
        verdict = "not certified: no level below the dense network passes"
        if outcome.pruned is None and outcome.pruned_to.path:  # no other was tried
            verdict = f"not certified: keep {outcome.pruned_to.path[0].keep:.2%}, the first level tested, does not pass"
    loosened = "--max-accuracy-drop" if request.max_accuracy_drop is not None else "--epsilon, --share"
    assert outcome.holdout is not None  # without one nothing can fail
    return CommandError(
        f"{verdict}; nothing was written",
        where=outcome.holdout.source.where + ("" if request.holdout else ", the holdout taken from it"),
        fix=f"allow more ({loosened}), or give more holdout inputs",
        code=NOT_CERTIFIED,
    )


def prune_network(request: PruneRequest) -> PruneOutcome:
    """Loads the network and its data, and prunes."""
    begun = time.perf_counter()
    model = load_model(request.model, request.weights, seed=request.options.seed, device=request.device)
    calibration, holdout = points_for(request, model)
    if holdout is not None:
        check_enough(request, holdout)
    loaded = time.perf_counter()
    where = f"--model {request.model}" + (f", {calibration.source.where}" if calibration is not None else "")
    where += f", --holdout {request.holdout}" if request.holdout else ""
    norm_stats = norm_stats_of(model, request.batchnorm)
    options = replace(request.options, scoring=replace(request.options.scoring, norm_stats=norm_stats))
    with naming_option(where, "see sipp prune --help"):
        if request.has_tolerance:
            assert calibration is not None and holdout is not None
            pruned_to = prune_to_with(
                model, calibration.batches, holdout.batches, options, epsilon=request.epsilon,
                max_accuracy_drop=request.max_accuracy_drop, share=request.share,
                output=request.output,
            )  # fmt: skip
            pruned, certificate = pruned_to.pruned, pruned_to.certificate
            stored = None if pruned is None else pruned.model  # a walk rounds nothing
        else:
            pruned_to = None
            pruned, stored, certificate = _prune(request, options, model, calibration, holdout)
    ended = time.perf_counter()
    seconds = {"load": loaded - begun, "prune": ended - loaded}
    return PruneOutcome(model, pruned, stored, pruned_to, certificate, norm_stats, calibration, holdout, seconds)


def _prune(
    request: PruneRequest,
    options: PruneOptions,
    model: nn.Module,
    calibration: Points | None,
    holdout: Points | None,
) -> tuple[Pruned, nn.Module, Certificate | None]:
    # before any work: a shared point would invalidate the certificate
    if holdout is not None and calibration is not None:
        known = set(holdout_data(calibration.batches, "calibration").hashes())
        refuse_shared(holdout_data(holdout.batches).hashes(), known)
    pruned = prune_with(model, None if calibration is None else calibration.batches, options)
    stored = with_stored_values(pruned.model, request.values) if request.rounds else pruned.model
    if holdout is None:
        return pruned, stored, None
    certificate = sipp.certify(
        model, stored, holdout.batches, share=request.allowed_share, confidence=request.options.confidence,
        output=request.output, calibration=None if calibration is None else calibration.batches,
    )  # fmt: skip
    return pruned, stored, certificate


def json_record(request: PruneRequest, outcome: PruneOutcome) -> dict[str, Any]:
    """The content of report.json and --json."""
    options, weights, walk = request.options, request.weights, outcome.pruned_to
    if outcome.pruned is not None:
        record = report_values(outcome.pruned)
    else:
        record = {"kind": "not certified", "sipp": sipp.__version__, "method": options.method, "keep": 1.0}
    tolerance = {name: getattr(request, name) for name in ("epsilon", "max_accuracy_drop", "share")}
    return record | {
        "asked": asked_values(options) | tolerance,
        "model": request.model,
        "weights": None if weights is None else str(weights),
        "weights_sha256": None if weights is None else file_hash(weights_file(weights)),
        "dense_hash": model_hash(outcome.dense),
        "pruned_hash": None if outcome.stored is None else model_hash(outcome.stored),
        "data": summary(outcome.calibration),
        "holdout": summary(outcome.holdout),
        "norm_stats": outcome.norm_stats,
        "reduce": options.reduce or method_of(options.method).reduce,
        "verdict": None if walk is None else walk.verdict,
        "path": [] if walk is None else to_json(walk.path),
        "certificate": to_json(outcome.certificate),
        "dry_run": request.dry_run,
        "seconds": {name: round(value, 3) for name, value in outcome.seconds.items()},
    }


@dataclass(frozen=True)
class Written:
    """The files that were written, and the content of the small file, if it is one."""

    files: dict[str, int]  # {path: bytes}
    contents: SavedFile | None = None

    @property
    def record(self) -> dict[str, Any]:
        """Its part of --json."""
        if self.contents is None:
            return {"written": self.files}
        values = {
            "format": self.contents.precision,
            "moved": self.contents.rounding_words,
            "largest_change": max(tensor.largest_change for tensor in self.contents.tensors),
            "norm_change": max(tensor.norm_change for tensor in self.contents.tensors),
            "certificate_about": self.contents.certificate_about,
            "statements_about": self.contents.statements_about,
        }
        return {"written": self.files, "values": values}


def write(request: PruneRequest, outcome: PruneOutcome, record: dict[str, Any]) -> Written:
    """Writes the network, unless it is a dry run or nothing is certified."""
    if request.out is None or request.dry_run or outcome.pruned is None or not outcome.certified:
        return Written({})
    if request.is_one_file:
        with naming_option(f"--out {request.out}", "give another place"):
            check_file(request.out, force=request.force)
            saved = sipp.save(outcome.pruned, request.out, values=request.values, certificate=outcome.certificate)
        return Written({str(request.out): saved.n_bytes}, saved)
    with naming_option(f"--out {request.out}", "give another folder"):
        files = write_pruned(request.out, outcome.pruned.model.state_dict(), record, force=request.force)
    return Written({str(path): n_bytes for path, n_bytes in files.items()})


def report_lines(request: PruneRequest, outcome: PruneOutcome, written: Written) -> list[RenderableType]:
    """The printed report."""
    if request.weights is not None:
        origin = f"weights {request.weights}"
    else:
        is_folder = request.model.startswith(PREFIX)
        origin = "weights of that folder" if is_folder else f"freshly initialised (seed {request.options.seed})"
    calibration = "not used" if outcome.calibration is None else outcome.calibration.words
    lines: list[RenderableType] = [
        labelled_line("network", f"{request.model}, {origin}"),
        labelled_line("data", calibration),
    ]
    if outcome.holdout is not None:
        lines.append(labelled_line("holdout", outcome.holdout.words))
    lines += normalisation_lines(outcome.calibration, outcome.holdout)
    if outcome.calibration is not None:
        lines += norm_stats_lines(outcome.norm_stats, request.batchnorm)
    if outcome.pruned is not None:
        certified = "" if outcome.certificate is None else SEE_BELOW  # a walk says it itself
        if outcome.certificate is not None and outcome.pruned_to is None:
            certified = ("about the stored values: " if request.rounds else "") + outcome.certificate.sentence
        lines.append(sheet_text(pruned_sheet(outcome.pruned, in_shell=True, certified=certified)))
    if outcome.calibration is not None and outcome.calibration.is_noise:
        lines.append(labelled_line("noise", "the scores and bounds above are about random inputs, not about yours"))
    if outcome.pruned_to is not None:
        lines.append(str(outcome.pruned_to))
        if not request.options.repair:
            lines.append(
                labelled_line("further", "--repair fits the kept weights to the dense outputs: fewer are enough then")
            )
    lines += [
        labelled_line("written", f"{path} ({bytes_in_words(n_bytes)})") for path, n_bytes in written.files.items()
    ]
    if written.contents is not None:
        contents = written.contents
        size = size_words(contents.n_bytes, contents.dense_bytes)
        lines.append(labelled_line("", f"{size}; see sipp inspect, sipp bench"))
        if words := contents.rounding_words:
            lines.append(labelled_line("values", f"{words}; the statements above are about the values before rounding"))
    elif written.files:
        lines.append(
            labelled_line(
                "",
                "zeros are stored too, so this is not smaller; "
                f"sipp export {request.out} --model {request.model} --to small makes a small file",
            )
        )
    if request.dry_run:
        lines.append(
            labelled_line("dry run", "nothing was written" + (HOLDOUT_USED if outcome.holdout is not None else ""))
        )
    seconds = outcome.seconds
    return [*lines, labelled_line("time", f"{seconds['load']:.1f} s loading, {seconds['prune']:.1f} s pruning")]
