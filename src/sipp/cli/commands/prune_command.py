"""`sipp prune`: prunes a network, and writes it with a report as a folder or one file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sipp
from sipp.cli.errors import NOT_CERTIFIED, CommandError, naming_option
from sipp.cli.options import check_method, load_code, typed_values
from sipp.cli.output import ANOTHER, Answer, record_of
from sipp.cli.prune_request import EXACT, Request
from sipp.errors import OptionError
from sipp.files import FILE_SUFFIX, RECORD_NAME, WEIGHTS_NAME
from sipp.results import SHARE, NormStats, to_json, words

# of torch, and of files that import it; None where there is none
Pruned = Any
Points = Any
AnyCertificate = Any

FIX = "see sipp prune --help"


def prune(request: Request) -> Answer:
    """Prune a network to a share of its weights, or as far as a certificate allows.

    For example: sipp prune --model digits-cnn --data digits --keep 0.3 --dry-run
    """
    goal = request.goal
    load_code(request.code)
    check_method(str(request.options.method), f"--method {request.options.method}")
    if request.on_disk:
        return _prune_on_disk(request)
    request.check_output()
    if request.has_tolerance:
        arguments = request.arguments(sipp.prune_to, f"with {goal}")
    else:
        of_certificate = () if request.holdout is None else ("share", "output")
        arguments = request.arguments(sipp.prune, "without --holdout or --epsilon", *of_certificate)
    done = _prune(request, arguments)
    lines, values = _lines(request, done), _values(request, done)
    if done.failure:
        return Answer(lines, values, _not_certified(request, done))
    if request.dry_run:
        used = "" if done.holdout is None else "; but the holdout was used, so take other inputs for your next claim"
        return Answer([*lines, words.labelled_line("dry run", f"nothing was written{used}")], values)
    with naming_option(f"--out {request.out}", ANOTHER):
        return _written(request, done, lines, values)


@dataclass(frozen=True)
class Done:
    """What was pruned and certified, and on what."""

    model: Any
    calibration: Points  # None: no data is used
    holdout: Points  # None: nothing is certified
    norm_stats: NormStats
    pruned: Pruned  # None: no level passed
    certificate: AnyCertificate
    walk: Any  # with a tolerance
    seconds: float
    lines: list[str]  # about the network and the inputs

    @property
    def failure(self) -> str:
        """Why nothing is written; empty if what was asked for is certified."""
        if self.walk is not None and self.pruned is None:
            return str(self.walk.verdict)
        if self.walk is not None and self.pruned.kept == self.pruned.n_weights:
            return "not certified: no level below the dense network passes"
        verdict: str = getattr(self.certificate, "verdict", "certified")
        return "" if self.certificate is None or verdict == "certified" else verdict


def _prune(request: Request, arguments: dict[str, Any]) -> Done:
    """Prunes to a share, and certifies that on a holdout if there is one; or as far as a tolerance is certified."""
    from time import perf_counter

    from sipp.cli.inputs import Reader, input_lines
    from sipp.cli.networks import load_model, norm_stats_of

    model = load_model(request.model, request.weights, seed=request.options.seed, device=request.device)
    norm_stats, of_norms = norm_stats_of(model, request.batchnorm)
    reader = Reader(model, request.model, request.reading, request.options.seed)
    calibration, holdout = _read_inputs(request, reader)
    origin = "weights of that folder" if request.model.startswith("hf:") else "freshly initialised"
    lines = [
        words.labelled_line("network", f"{request.model}, {origin if request.weights is None else request.weights}")
    ]
    lines += [words.labelled_line("data", "not used")] if calibration is None else of_norms
    lines += input_lines(calibration, holdout)
    read = {"--model": request.model, "--data": request.data, "--holdout": request.holdout}
    batches: Any = None if calibration is None else calibration.batches
    began, arguments = perf_counter(), arguments | {"norm_stats": norm_stats}
    walk, certificate = None, None
    with naming_option(", ".join(f"{option} {name}" for option, name in read.items() if name is not None), FIX):
        if request.has_tolerance:
            walk = sipp.prune_to(model, batches, holdout.batches, **arguments)
            pruned, certificate = walk.pruned, walk.certificate
        else:
            pruned = sipp.prune(model, batches, **arguments)
            certificate = None if holdout is None else _certified(request, model, pruned, holdout)
    seconds = perf_counter() - began
    return Done(model, calibration, holdout, norm_stats, pruned, certificate, walk, seconds, lines)


def _read_inputs(request: Request, reader: Any) -> tuple[Points, Points]:
    """Disjoint calibration and holdout inputs; None if there are none."""
    options = request.options
    holdout = None if request.holdout is None else reader.holdout(request.holdout)
    if holdout is not None and request.holdout == request.data and not holdout.source.has_holdout:
        raise CommandError(
            "it is --data too, and a certificate needs inputs that the pruning has not seen",
            where=holdout.source.where,
            fix="give other inputs",
        )
    if request.data is None:
        if request.has_tolerance:
            raise OptionError("certifying a tolerance needs data", fix="give --data")
        return None, holdout
    theory = {name: getattr(options, name) for name in ("include", "exclude", "k_constant")}
    if request.has_tolerance and holdout is None:
        both: tuple[Points, Points] = reader.calibration_and_holdout(
            request.data, request.points, options.method, **theory
        )
        return both
    return reader.calibration(request.data, request.points, options.method, **theory), holdout


def _certified(request: Request, model: Any, pruned: Pruned, holdout: Points) -> AnyCertificate:
    """The certificate of the network as it is stored, which rounding may change."""
    import copy
    import tempfile

    from sipp.results import points_seen

    stored = pruned.model
    if request.values not in EXACT:
        with tempfile.TemporaryDirectory() as folder:
            sipp.save(pruned, f"{folder}/net", values=request.values)
            stored = sipp.load(f"{folder}/net", into=copy.deepcopy(stored))
    return sipp.certify(
        model, stored, holdout.batches, share=request.share or SHARE, confidence=request.options.confidence,
        output=request.part, calibration=points_seen(pruned),
    )  # fmt: skip


def _values(request: Request, done: Done) -> dict[str, Any]:
    """What report.json and --json say."""
    from sipp.results import Report, hashing

    about = {
        "asked": typed_values(request),
        "model": request.model,
        "weights": None if request.weights is None else str(request.weights),
        "dense_hash": hashing.of_model(done.model),
        "norm_stats": done.norm_stats,
        "data": None if done.calibration is None else done.calibration.summary,
        "holdout": None if done.holdout is None else done.holdout.summary,
        "verdict": None if done.walk is None else done.walk.verdict,
        "path": [] if done.walk is None else done.walk.path,
        "certificate": done.certificate,
        "seconds": round(done.seconds, 3),
        "written": {},
    }
    facts = {"kind": "not certified", "keep": 1.0} if done.pruned is None else Report.of(done.pruned).values
    values: dict[str, Any] = to_json(facts | about)
    return values


def _lines(request: Request, done: Done) -> list[str]:
    """The printed report."""
    lines, certified = done.lines, ""
    if done.certificate is not None:
        certified = done.certificate.sentence if done.walk is None else "see the certificate below."
        certified = certified if request.values in EXACT else f"about the stored values: {certified}"
    if done.pruned is not None:
        lines = [*lines, str(done.pruned.sheet_with(in_shell=True, certified=certified))]
    if done.walk is not None:
        lines = [*lines, str(done.walk)]
        if not request.options.repair:
            hint = "--repair fits the kept weights to the dense outputs: fewer are enough then"
            lines.append(words.labelled_line("further", hint))
    return [*lines, words.labelled_line("time", f"{done.seconds:.1f} s for pruning")]


def _not_certified(request: Request, done: Done) -> CommandError:
    """The error with exit code 3."""
    loosened = "--max-accuracy-drop" if request.max_accuracy_drop is not None else "--epsilon, --share"
    return CommandError(
        f"{done.failure}; nothing was written",
        where=done.holdout.source.where + ("" if request.holdout else ", the holdout taken from it"),
        fix=f"allow more ({loosened}), or give more holdout inputs",
        code=NOT_CERTIFIED,
    )


def _written(request: Request, done: Done, lines: list[str], values: dict[str, Any]) -> Answer:
    """Writes the network, and says so."""
    path = Path(request.out or "")
    if not request.is_one_file:
        sipp.save_folder(done.pruned, path, about={name: value for name, value in values.items() if name != "written"})
        sizes = {str(file): file.stat().st_size for file in (path / WEIGHTS_NAME, path / RECORD_NAME)}
        small = f"sipp export {path} --model {request.model} --out small{FILE_SUFFIX}"
        lines += [words.labelled_line("written", f"{file} ({words.of_bytes(n)})") for file, n in sizes.items()]
        lines.append(
            words.labelled_line("", f"zeros are stored too, so this is not smaller; {small} makes a small file")
        )
        return Answer(lines, values | {"written": sizes})
    saved = sipp.save(done.pruned, path, values=request.values, certificate=done.certificate)
    lines.append(words.labelled_line("written", f"{path} ({words.of_bytes(saved.n_bytes)})"))
    lines.append(
        words.labelled_line("", f"{words.size(saved.n_bytes, saved.dense_bytes)}; see sipp inspect, sipp bench")
    )
    if text := saved.rounding_words:
        lines.append(
            words.labelled_line("values", f"{text}; the statements above are about the values before rounding")
        )
    return Answer(lines, values | {"written": {str(path): saved.n_bytes}, "file": to_json(saved)})


def _prune_on_disk(request: Request) -> Answer:
    """Prunes a Hugging Face folder block by block into the folder --out, or resumes that."""
    from sipp.cli.hugging_face import folder_of, hf_model_without_weights
    from sipp.cli.inputs import Reader
    from sipp.cli.networks import device_of
    from sipp.files import check_place, refuse_input

    if request.data is None or request.out is None or request.is_one_file:
        raise OptionError("--on-disk needs data and a folder to write to", fix="give --data and --out DIR")
    for name in ("weights", "holdout", "batchnorm", "dry_run", "force"):
        if getattr(request, name):
            raise OptionError(f"--{name.replace('_', '-')} does nothing with --on-disk", fix="leave it out")
    arguments = request.arguments(sipp.prune_on_disk, "with --on-disk")
    with naming_option(f"--model {request.model}", "give hf:DIR"):
        folder = folder_of(request.model)
        with naming_option(f"--out {request.out}", "give another folder"):
            check_place(request.out)
            refuse_input(request.out, "--model", folder)
        model = hf_model_without_weights(request.model)
    reader = Reader(model, request.model, request.reading, request.options.seed)
    points, device = reader.calibration(request.data, request.points), device_of(request.device)
    with naming_option(f"--model {request.model}, --data {request.data}, --out {request.out}", FIX):
        done = sipp.prune_on_disk(model, folder, points.batches, request.out, **arguments, device=device)
    return Answer([str(done)], record_of("pruned on disk", done))
