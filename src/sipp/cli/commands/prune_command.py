"""`sipp prune`: prunes a network, and writes it with a report as a folder or one file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import NOT_CERTIFIED, CommandError, naming_option
from sipp.cli.options import option_name
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.files import FILE_SUFFIX, RECORD_NAME, WEIGHTS_NAME
from sipp.results import SHARE, AnyCertificate, Option, Precision, PruneOptions, check, to_json, words

# of torch, and of files that import it
Module = Any
Points = Any
Reader = Any
Pruned = Any
PrunedTo = Any

EXACT = ("fp32", "lossless")  # values that are not rounded
SEE_BELOW = "see the certificate below."
HOLDOUT_USED = "; but the holdout was used, so take other inputs for your next claim"
FIX = "see sipp prune --help"


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """The options of the command: `PruneOptions` and those that only the command line has."""

    model: shared.Model
    data: shared.Data = None
    weights: shared.Weights = None
    device: shared.Device = "auto"
    inputs: shared.InputOptions
    code: shared.CodeFiles = None
    points: shared.PointsOption = None
    holdout: Annotated[
        str | None,
        Option(
            "Inputs for a certificate; must be new to the network. Default with --epsilon: a part of the data.",
            "Guarantee",
        ),
    ] = None
    share: Annotated[
        float | None,
        Option(f"Share of inputs that may be further off than the certificate says. Default: {SHARE}.", "Guarantee"),
    ] = None
    part: shared.Part = None
    options: PruneOptions
    batchnorm: shared.BatchNorm = None
    epsilon: Annotated[
        float | None,
        Option("Instead of --keep: prune as far as this relative error can be certified.", "What to prune"),
    ] = None
    max_accuracy_drop: Annotated[
        float | None, Option("Instead of --keep: prune as far as this accuracy drop can be certified.", "What to prune")
    ] = None
    out: Annotated[
        Path | None,
        Option(f"New folder for {WEIGHTS_NAME} and {RECORD_NAME}; or one small file, name{FILE_SUFFIX}.", "Output"),
    ] = None
    dry_run: Annotated[bool, Option("Print what would be done and what it costs; write nothing.", "Output")] = False
    on_disk: Annotated[
        bool,
        Option(
            "For hf:DIR larger than memory: prune it block by block, from files to files; run it again to resume. "
            "wanda takes the place of sipp-blend.",
            "Machine",
        ),
    ] = False
    values: Annotated[
        Precision,
        Option(
            f"Values in name{FILE_SUFFIX}: fp32 or lossless (exact), or rounded to fp16, bf16 or int8. The "
            "certificate is about what is stored.",
            "Output",
            metavar="FORMAT",
        ),
    ] = "fp32"
    force: shared.Force = False

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            check.number("epsilon", self.epsilon, least=0)
        if self.max_accuracy_drop is not None:
            check.share("max_accuracy_drop", self.max_accuracy_drop)
        if self.share is not None:
            check.share("share", self.share)

    @property
    def is_one_file(self) -> bool:
        """Whether --out names a file from `sipp.save`, not a folder."""
        return self.out is not None and self.out.suffix == FILE_SUFFIX

    @property
    def has_tolerance(self) -> bool:
        return self.epsilon is not None or self.max_accuracy_drop is not None

    @property
    def chosen(self) -> dict[str, Any]:
        """The options about pruning and certificates that differ from their defaults, as arguments of a verb."""
        defaults = {field.name: field.default for field in fields(PruneOptions)}
        given = {name: value for name in defaults if (value := getattr(self.options, name)) != defaults[name]}
        own = {"epsilon": self.epsilon, "max_accuracy_drop": self.max_accuracy_drop, "share": self.share}
        return given | {name: value for name, value in (own | {"output": self.part}).items() if value is not None}


def prune(request: PruneRequest) -> Answer:
    """Prune a network to a share of its weights, or as far as a certificate allows.

    For example: sipp prune --model digits-cnn --data digits --keep 0.3 --dry-run
    """
    goals = {
        "--keep": request.options.keep,
        "--pattern": request.options.pattern,
        "--epsilon": request.epsilon,
        "--max-accuracy-drop": request.max_accuracy_drop,
    }
    chosen = [name for name, value in goals.items() if value is not None]
    if len(chosen) != 1:
        raise OptionError(
            "nothing says how far to prune" if not chosen else f"{' and '.join(chosen)} exclude each other",
            fix=f"give exactly one of {', '.join(goals)}",
        )
    if request.out is None and not request.dry_run:
        raise OptionError(
            "no output given",
            fix="give --out DIR or --out NAME.safetensors, or --dry-run to see the table",
        )
    if request.values != "fp32" and not request.is_one_file:
        raise OptionError(
            f"--values {request.values} is for one small file; a folder holds plain weights",
            fix=f"give --out NAME{FILE_SUFFIX}, or leave it out",
        )
    shared.load_code(request.code)
    shared.check_method(str(request.options.method), f"--method {request.options.method}")
    if request.on_disk:
        return _prune_on_disk(request)
    _check(request, chosen[0])
    return _prune_in_memory(request)


def _arguments(request: PruneRequest, verb: Any, because: str, *elsewhere: str) -> dict[str, Any]:
    """The chosen options as arguments of the verb; OptionError for one that neither it nor `elsewhere` takes."""
    import inspect

    taken = inspect.signature(verb).parameters
    for name in request.chosen.keys() - taken - {*elsewhere}:
        option = {"output": "part"}.get(name) or option_name(name, getattr(PruneOptions, name, None))
        raise OptionError(f"--{option.replace('_', '-')} does nothing {because}", fix="leave it out")
    return {name: value for name, value in request.chosen.items() if name in taken}


# --- a network in memory ----------------------------------------------------------------------------------------------


def _check(request: PruneRequest, goal: str) -> None:
    """Refuses, before any work, options that would do nothing, and places that cannot be written."""
    from sipp.cli.out_option import check_out

    if request.has_tolerance:
        _arguments(request, sipp.prune_to, f"with {goal}")
        if request.values not in EXACT:
            raise OptionError(
                f"--values {request.values} does not fit {goal}, which certifies the values before rounding",
                fix="give --values lossless; or --keep with --holdout, which certifies what is stored",
            )
        if request.max_accuracy_drop is not None and request.share is not None:
            raise OptionError(
                "--share is for --epsilon; an accuracy drop leaves no inputs out",
                fix="leave it out, or give --epsilon instead of --max-accuracy-drop",
            )
    else:
        of_certificates = ("share", "output") if request.holdout is not None else ()
        _arguments(request, sipp.prune, "without --holdout or --epsilon", *of_certificates)
    reads = {"--weights": request.weights, "--model": request.model if request.model.startswith("hf:") else None}
    if not request.dry_run:
        check_out(request.out, force=request.force, reads=reads, is_folder=not request.is_one_file)


def _prune_in_memory(request: PruneRequest) -> Answer:
    """Prunes, certifies, writes, and shows the report."""
    import time

    from sipp.cli.data_option import Reader, summary
    from sipp.cli.model_option import load_model, norm_stats_of
    from sipp.results import hashing, report_values

    model = load_model(request.model, request.weights, seed=request.options.seed, device=request.device)
    reader = Reader(model, request.model, request.inputs, request.options.seed)
    calibration, holdout = _read_inputs(request, reader)
    norm_stats = norm_stats_of(model, request.batchnorm)
    where = f"--model {request.model}" + (f", {calibration.source.where}" if calibration is not None else "")
    walk: PrunedTo | None = None
    certificate: AnyCertificate | None = None
    began = time.perf_counter()
    with naming_option(where + (f", --holdout {request.holdout}" if request.holdout else ""), FIX):
        if request.has_tolerance:
            assert calibration is not None and holdout is not None
            arguments = _arguments(request, sipp.prune_to, "")
            walk = sipp.prune_to(model, calibration.batches, holdout.batches, **arguments, norm_stats=norm_stats)
            pruned, certificate = walk.pruned, walk.certificate
        else:
            arguments = _arguments(request, sipp.prune, "", "share", "output")
            pruned = sipp.prune(
                model, None if calibration is None else calibration.batches, **arguments, norm_stats=norm_stats
            )
            if holdout is not None:
                certificate = _certificate(request, model, pruned, holdout)
    seconds = time.perf_counter() - began
    about = {
        "asked": _asked(request),
        "model": request.model,
        "weights": None if request.weights is None else str(request.weights),
        "dense_hash": hashing.of_model(model),
        "norm_stats": norm_stats,
        "data": summary(calibration),
        "holdout": summary(holdout),
        "verdict": None if walk is None else walk.verdict,
        "path": [] if walk is None else walk.path,
        "certificate": certificate,
        "dry_run": request.dry_run,
        "seconds": round(seconds, 3),
    }
    values = {"kind": "not certified", "sipp": sipp.__version__, "method": request.options.method, "keep": 1.0}
    values = to_json((values if pruned is None else report_values(pruned)) | about)
    failure = _not_certified(request, walk, certificate, holdout)
    shown = _lines(request, model, pruned, walk, certificate, calibration, holdout)
    if failure is None and not request.dry_run:
        assert pruned is not None
        lines, written = _write(request, pruned, certificate, values)
        shown, values = shown + lines, values | written
    if request.dry_run or failure is not None:
        values["written"] = {}
    if request.dry_run:
        shown.append(
            words.labelled_line("dry run", f"nothing was written{HOLDOUT_USED if holdout is not None else ''}")
        )
    return Answer([*shown, words.labelled_line("time", f"{seconds:.1f} s for pruning")], values, failure)


def _read_inputs(request: PruneRequest, reader: Reader) -> tuple[Points | None, Points | None]:
    """Disjoint calibration and holdout inputs; None if there are none."""
    from sipp.results import holdout_needed

    options = request.options
    calibration = None
    holdout = None if request.holdout is None else reader.holdout(request.holdout, None)
    needs_both = request.has_tolerance and holdout is None
    if holdout is not None and request.holdout == request.data and not holdout.source.has_holdout:  # before the work
        raise CommandError(
            "it is --data too, and a certificate needs inputs that the pruning has not seen",
            where=holdout.source.where,
            fix="give other inputs",
        )
    if request.data is None:
        if request.has_tolerance:
            raise OptionError("certifying a tolerance needs data", fix="give --data")
    else:
        calibration, split_off = reader.calibration_and_holdout(
            request.data, request.points, has_holdout=needs_both, method=options.method, include=options.include,
            exclude=options.exclude, k_constant=options.k_constant,
        )  # fmt: skip
        holdout = holdout or split_off
    if request.has_tolerance and calibration is not None and calibration.is_noise:
        raise CommandError(
            "a certificate on noise says nothing about your inputs",
            where=calibration.source.where,
            fix="give real inputs",
        )
    if holdout is not None and request.max_accuracy_drop is None:  # before the work
        needed = holdout_needed(request.share or SHARE, 1.0 - options.confidence)
        if holdout.n_points < needed:
            raise CommandError(
                f"not certified: it takes {needed} holdout inputs, and there are {holdout.n_points}; nothing was "
                "written",
                where=holdout.source.where + ("" if request.holdout else ", the half split off as holdout"),
                fix=f"give {needed} inputs or more, or a larger --share",
                code=NOT_CERTIFIED,
            )
    return calibration, holdout


def _certificate(request: PruneRequest, model: Module, pruned: Pruned, holdout: Points) -> AnyCertificate:
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


def _not_certified(
    request: PruneRequest, walk: PrunedTo | None, certificate: AnyCertificate | None, holdout: Points | None
) -> CommandError | None:
    """The error with exit code 3, if what was asked for could not be certified."""
    if walk is not None and (walk.pruned is None or walk.pruned.kept == walk.pruned.n_weights):
        verdict = "not certified: no level below the dense network passes"
        if walk.pruned is None and walk.path:  # no other was tried
            verdict = f"not certified: keep {walk.path[0].keep:.2%}, the first level tested, does not pass"
    else:
        verdict = getattr(certificate, "verdict", "certified")
        if certificate is None or verdict == "certified":
            return None
    assert holdout is not None
    loosened = "--max-accuracy-drop" if request.max_accuracy_drop is not None else "--epsilon, --share"
    return CommandError(
        f"{verdict}; nothing was written",
        where=holdout.source.where + ("" if request.holdout else ", the holdout taken from it"),
        fix=f"allow more ({loosened}), or give more holdout inputs",
        code=NOT_CERTIFIED,
    )


def _asked(request: PruneRequest) -> dict[str, Any]:
    """Every option of the command and its value."""
    options = {name: getattr(request.options, name) for name in shared.names_of(PruneOptions)}
    own = {field.name: getattr(request, field.name) for field in fields(request)}
    del own["options"], own["inputs"]
    return own | vars(request.inputs) | options


def _write(
    request: PruneRequest, pruned: Pruned, certificate: AnyCertificate | None, values: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Writes the network; returns the lines and JSON values that say so."""
    assert request.out is not None
    with naming_option(f"--out {request.out}", "give another place"):
        if not request.is_one_file:
            sipp.save_folder(pruned, request.out, about=values)
            files = [request.out / name for name in (WEIGHTS_NAME, RECORD_NAME)]
            sizes = {str(file): file.stat().st_size for file in files}
            small = f"sipp export {request.out} --model {request.model} --out small{FILE_SUFFIX}"
            lines = [
                *(words.labelled_line("written", f"{file} ({words.of_bytes(n)})") for file, n in sizes.items()),
                words.labelled_line("", f"zeros are stored too, so this is not smaller; {small} makes a small file"),
            ]
            return lines, {"written": sizes}
        saved = sipp.save(pruned, request.out, values=request.values, certificate=certificate)
    lines = [
        words.labelled_line("written", f"{request.out} ({words.of_bytes(saved.n_bytes)})"),
        words.labelled_line("", f"{words.size(saved.n_bytes, saved.dense_bytes)}; see sipp inspect, sipp bench"),
    ]
    if text := saved.rounding_words:
        lines.append(
            words.labelled_line("values", f"{text}; the statements above are about the values before rounding")
        )
    return lines, {"written": {str(request.out): saved.n_bytes}, "file": to_json(saved)}


def _lines(
    request: PruneRequest,
    model: Module,
    pruned: Pruned | None,
    walk: PrunedTo | None,
    certificate: AnyCertificate | None,
    calibration: Points | None,
    holdout: Points | None,
) -> list[str]:
    """The printed report."""
    from sipp.cli.data_option import normalisation_lines
    from sipp.cli.model_option import norm_stats_lines, norm_stats_of
    from sipp.results import pruned_sheet, sheet_text

    origin = f"freshly initialised (seed {request.options.seed})"
    if request.weights is not None:
        origin = f"weights {request.weights}"
    elif request.model.startswith("hf:"):
        origin = "weights of that folder"
    lines = [
        words.labelled_line("network", f"{request.model}, {origin}"),
        words.labelled_line("data", "not used" if calibration is None else calibration.words),
    ]
    lines += [] if holdout is None else [words.labelled_line("holdout", holdout.words)]
    lines += normalisation_lines(calibration, holdout)
    lines += [] if calibration is None else norm_stats_lines(norm_stats_of(model, request.batchnorm), request.batchnorm)
    if pruned is not None:
        certified = "" if certificate is None else SEE_BELOW
        if certificate is not None and walk is None:
            certified = ("" if request.values in EXACT else "about the stored values: ") + certificate.sentence
        lines.append(sheet_text(pruned_sheet(pruned, in_shell=True, certified=certified)))
    if calibration is not None and calibration.is_noise:
        lines.append(
            words.labelled_line("noise", "the scores and bounds above are about random inputs, not about yours")
        )
    if walk is not None:
        lines.append(str(walk))
        if not request.options.repair:
            hint = "--repair fits the kept weights to the dense outputs: fewer are enough then"
            lines.append(words.labelled_line("further", hint))
    return lines


# --- a network in files -----------------------------------------------------------------------------------------------


def _prune_on_disk(request: PruneRequest) -> Answer:
    """Prunes a Hugging Face folder block by block into the folder --out, or resumes that."""
    from sipp.cli.data_option import Reader
    from sipp.cli.hugging_face_models import folder_of, hf_model_without_weights
    from sipp.files import check_place, refuse_input
    from sipp_lab.training.setup import device_named

    if request.data is None or request.out is None or request.is_one_file:
        raise OptionError("--on-disk needs data and a folder to write to", fix="give --data and --out DIR")
    for name in ("weights", "holdout", "batchnorm", "dry_run", "force"):
        if getattr(request, name):
            raise OptionError(f"--{name.replace('_', '-')} does nothing with --on-disk", fix="leave it out")
    arguments = _arguments(request, sipp.prune_on_disk, "with --on-disk")
    with naming_option(f"--model {request.model}", "give hf:DIR"):
        folder = folder_of(request.model)
        with naming_option(f"--out {request.out}", "give another folder"):
            check_place(request.out)
            refuse_input(request.out, "--model", folder)
        model = hf_model_without_weights(request.model)
    with naming_option(f"--device {request.device}", "use --device cpu, or leave it out"):
        device = device_named(request.device)
    points = Reader(model, request.model, request.inputs, request.options.seed).calibration(
        request.data, request.points
    )
    with naming_option(f"--model {request.model}, --data {request.data}, --out {request.out}", FIX):
        done = sipp.prune_on_disk(model, folder, points.batches, request.out, **arguments, device=device)
    return Answer([str(done)], {"kind": "pruned on disk", "sipp": sipp.__version__, **to_json(done)})
