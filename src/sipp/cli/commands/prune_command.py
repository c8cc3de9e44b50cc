"""`sipp prune`: prunes a network, and writes it with a report as a folder or one file."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sipp
from sipp.cli.errors import NOT_CERTIFIED, CommandError, naming_option
from sipp.cli.options import load_code
from sipp.cli.output import ANOTHER, Answer, record_of
from sipp.cli.prune_request import EXACT, Request
from sipp.errors import OptionError
from sipp.files import FILE_SUFFIX, RECORD_NAME, WEIGHTS_NAME
from sipp.results import SHARE, AnyCertificate, Sheet, to_json, words

FIX = "see sipp prune --help"


def prune(request: Request) -> Answer:
    """Prune a network to a share of its weights, or as far as a certificate allows.

    For example: sipp prune --model digits-cnn --data digits --keep 0.3 --dry-run
    """
    goal = request.goal
    load_code(request.code)
    if request.on_disk:
        return _prune_on_disk(request)
    request.check()
    if request.has_tolerance:
        arguments = request.arguments(sipp.prune_to, f"with {goal}")
    else:
        of_certificate = () if request.holdout is None else ("share", "output")
        arguments = request.arguments(sipp.prune, "without --holdout or --epsilon", *of_certificate)
    done = _prune(request, arguments)
    if done.failure:
        fix = "allow more (--epsilon, --share, --max-accuracy-drop), or give more holdout inputs"
        error = CommandError(
            f"{done.failure}; nothing was written", where=f"--holdout {request.holdout}", fix=fix, code=NOT_CERTIFIED
        )
        return Answer(done.lines, done.values, error)
    if request.dry_run:
        used = "" if request.holdout is None else "; but the holdout was used: certify on other inputs next time"
        return Answer([*done.lines, words.labelled_line("dry run", f"nothing was written{used}")], done.values)
    with naming_option(f"--out {request.out}", ANOTHER):
        return _written(request, done)


@dataclass(frozen=True)
class Done:
    """The pruned network, its certificate, and the lines to print."""

    pruned: Any  # a `Pruned`, whose file imports torch; None: no level passed
    certificate: AnyCertificate | None
    lines: list[str]
    values: dict[str, Any]  # of report.json and --json
    failure: str  # why nothing is written; empty if what was asked for is certified


def _prune(request: Request, arguments: dict[str, Any]) -> Done:
    """Prunes to a share and certifies that on a holdout, if there is one; or prunes as far as can be certified."""
    from time import perf_counter

    from sipp.cli.inputs import Reader, input_lines, summary_of
    from sipp.cli.networks import load_model, norm_stats_of
    from sipp.results import SavedNetwork, hashing

    options = request.options
    model = load_model(request.model, request.weights, seed=options.seed, device=request.device)
    norm_stats, of_norms = norm_stats_of(model, request.batchnorm)
    calibration, holdout = _inputs(request, Reader(model, request.model, request.reading, options.seed))
    origin = "weights of that folder" if request.model.startswith("hf:") else "freshly initialised"
    lines = [words.labelled_line("network", f"{request.model}, {request.weights or origin}")]
    lines += [words.labelled_line("data", "not used")] if calibration is None else of_norms
    lines += input_lines(calibration, holdout)
    read = {"--model": request.model, "--data": request.data, "--holdout": request.holdout}
    batches: Any = None if calibration is None else calibration.batches
    walk, certificate, began = None, None, perf_counter()
    with naming_option(", ".join(f"{option} {name}" for option, name in read.items() if name is not None), FIX):
        if request.has_tolerance:
            walk = sipp.prune_to(model, batches, holdout.batches, norm_stats=norm_stats, **arguments)
            pruned, certificate = walk.pruned, walk.certificate
        else:
            pruned = sipp.prune(model, batches, norm_stats=norm_stats, **arguments)
            certificate = None if holdout is None else _certified(request, model, pruned, holdout)
    seconds = perf_counter() - began
    values: dict[str, Any] = {"kind": "not certified", "keep": 1.0}
    values = (values if pruned is None else SavedNetwork.of(pruned).values) | {
        "asked": request,
        "model": request.model,
        "weights": request.weights,
        "dense_hash": hashing.of_model(model),
        "norm_stats": norm_stats,
        "data": summary_of(calibration),
        "holdout": summary_of(holdout),
        "verdict": None if walk is None else walk.verdict,
        "path": [] if walk is None else walk.path,
        "certificate": certificate,
        "seconds": round(seconds, 3),
        "written": {},
    }
    lines += [*_shown(request, pruned, certificate, walk), words.labelled_line("time", f"{seconds:.1f} s for pruning")]
    return Done(pruned, certificate, lines, to_json(values), _failure(pruned, certificate, walk))


def _inputs(request: Request, reader: Any) -> tuple[Any, Any]:
    """Calibration and holdout inputs; None if there are none."""
    holdout = None if request.holdout is None else reader.holdout(request.holdout)
    if holdout is not None and request.holdout == request.data and not holdout.source.has_holdout:
        raise CommandError(
            "these are the inputs of --data; a certificate needs new ones",
            where=holdout.source.where,
            fix="give inputs that were not used for pruning",
        )
    if request.data is None:
        return None, holdout
    options = request.options
    theory = {"include": options.include, "exclude": options.exclude, "k_constant": options.k_constant}
    return reader.calibration(request.data, request.points, options.method, **theory), holdout


def _certified(request: Request, model: Any, pruned: Any, holdout: Any) -> AnyCertificate:
    """The certificate of the network as it is stored, which rounding may change."""
    import copy
    import tempfile

    from sipp.results import inputs_seen

    stored = pruned.model
    if request.values not in EXACT:
        with tempfile.TemporaryDirectory() as folder:
            sipp.save(pruned, f"{folder}/net", values=request.values)
            stored = sipp.load(f"{folder}/net", into=copy.deepcopy(stored))
    return sipp.certify(
        model, stored, holdout.batches, share=request.share or SHARE, confidence=request.options.confidence,
        output=request.part, calibration=inputs_seen(pruned),
    )  # fmt: skip


def _failure(pruned: Any, certificate: AnyCertificate | None, walk: Any) -> str:
    if walk is not None and pruned is None:
        return str(walk.verdict)
    if walk is not None and pruned.kept == pruned.n_weights:
        return "not certified: no level below the dense network passes"
    verdict: str = getattr(certificate, "verdict", "certified")
    return "" if verdict == "certified" else verdict


def _shown(request: Request, pruned: Any, certificate: AnyCertificate | None, walk: Any) -> list[str]:
    """The lines about the pruned network and the levels that were tried."""
    certified = ""
    if certificate is not None:
        certified = f"{'' if request.values in EXACT else 'about the stored values: '}{certificate.sentence}"
    lines = [] if pruned is None else [str(_sheet_of(request, pruned, certified))]
    lines += [] if walk is None else [str(replace(walk.sheet, note=""))]  # the certificate is above
    if walk is not None and not request.options.repair:
        hint = "with --repair, which chooses the weights and fits them to the dense outputs, fewer are enough"
        lines.append(words.labelled_line("further", hint))
    return lines


def _sheet_of(request: Request, pruned: Any, certified: str) -> Sheet:
    """The pruned network with all layers, and what to do next in the shell."""
    from sipp.results import ways_to_lose_less

    bounds = "" if certified else "; --holdout bounds the error on new inputs"
    out = shlex.quote(str(request.out or "OUT"))
    networks = f"--model {shlex.quote(request.model)} --pruned {out}"
    networks += "" if request.weights is None else f" --dense {shlex.quote(str(request.weights))}"
    step = f"sipp eval {networks} --data NEW measures what was lost"
    step += f"; sipp report {out} makes a page{bounds}" if not request.is_one_file else bounds
    if pruned.warning:
        step += f". If too much is lost, {ways_to_lose_less(pruned, in_shell=True)}"
    facts = [*pruned.facts(certified=certified), ("next", step)]
    return Sheet(pruned.headline, tuple(facts), (pruned.layers_table(),), "--json prints every bound")


def _written(request: Request, done: Done) -> Answer:
    """Writes the network; returns the lines to print."""
    path, values, lines = Path(request.out or ""), done.values, done.lines
    if not request.is_one_file:
        sipp.save_folder(done.pruned, path, about={name: value for name, value in values.items() if name != "written"})
        sizes = {str(file): file.stat().st_size for file in (path / WEIGHTS_NAME, path / RECORD_NAME)}
        small = f"sipp export {path} --model {request.model} --out small{FILE_SUFFIX}"
        lines += [words.labelled_line("written", f"{file} ({words.of_bytes(n)})") for file, n in sizes.items()]
        lines.append(words.labelled_line("", f"this folder stores the zeros too; for a small file: {small}"))
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
    return Answer(lines, values | {"written": {str(path): saved.n_bytes}, "file": saved.values})


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
            raise OptionError(f"--{name.replace('_', '-')} has no effect with --on-disk", fix="leave it out")
    arguments = request.arguments(sipp.prune_on_disk, "with --on-disk")
    with naming_option(f"--model {request.model}", "give hf:DIR"):
        folder = folder_of(request.model)
        with naming_option(f"--out {request.out}", "give another folder"):
            check_place(request.out)
            refuse_input(request.out, "--model", folder)
        model = hf_model_without_weights(request.model)
    reader = Reader(model, request.model, request.reading, request.options.seed)
    drawn, device = reader.calibration(request.data, request.points), device_of(request.device)
    with naming_option(f"--model {request.model}, --data {request.data}, --out {request.out}", FIX):
        done = sipp.prune_on_disk(model, folder, drawn.batches, request.out, **arguments, device=device)
    return Answer([str(done)], record_of("pruned on disk", done))
