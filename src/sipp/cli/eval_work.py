"""Runs `sipp eval`: accuracy, loss and output error of a pruned network compared with the dense one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

import sipp
from sipp.certificates.evidence import measure_outputs
from sipp.certificates.measures import PointComparisons, compare_outputs
from sipp.certificates.running import Output
from sipp.cli.commands.eval_command import EvalRequest
from sipp.cli.data_option import Reader, normalisation_lines, summary
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.hugging_face_models import PREFIX
from sipp.cli.language_text import is_language_model, is_text, windows
from sipp.cli.model_option import both_networks
from sipp.cli.out_option import check_out, write_record
from sipp.cli.output import Answer
from sipp.inputs.data import data_of
from sipp.inputs.labels import why_not_measured
from sipp.inputs.point_hashes import hash_of_points
from sipp.results.display import labelled_line
from sipp.results.evaluation import EVAL_FORMAT, EVAL_KIND, EvalMeasures
from sipp.results.json_values import json_value
from sipp.results.network_hash import model_hash


def evaluate(dense: nn.Module, pruned: nn.Module, data: Any, output: Output) -> EvalMeasures:
    """Measures both networks on these points, and how much their outputs differ."""
    why: set[str] = set()
    measured_nk = measure_outputs(
        dense, pruned, data, lambda f, g, batch: compare_outputs(f, g, batch, why), output, None, progress=True,
        title="measuring",
    ).measured  # fmt: skip
    comparisons = PointComparisons(*measured_nk.unbind(1))
    is_labelled, is_finite_n = bool(comparisons.has_label.all()), comparisons.ratio.isfinite()
    n_outside, no_accuracy = int(comparisons.label_outside.sum()), ""
    if n_outside:
        no_accuracy = f"{n_outside:,} labels are outside the output's classes"
    elif not is_labelled:
        no_accuracy = why_not_measured(why, comparisons.has_label)
    return EvalMeasures(
        n_points=len(comparisons.ratio),
        dense_accuracy=float(comparisons.dense_right.mean()) if is_labelled else None,
        pruned_accuracy=float(comparisons.pruned_right.mean()) if is_labelled else None,
        dense_loss=_finite(comparisons.dense_loss.mean()) if is_labelled else None,
        pruned_loss=_finite(comparisons.pruned_loss.mean()) if is_labelled else None,
        same_class=float(comparisons.same_class.mean()) if bool(comparisons.has_classes.all()) else None,
        error_mean=_finite(comparisons.ratio.mean()),
        error_median=_finite(comparisons.ratio.median()) if bool(is_finite_n.all()) else None,
        error_max=_finite(comparisons.ratio.max()),
        n_not_finite=int((~is_finite_n).sum()),
        why_no_accuracy=no_accuracy,
    )


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


# --- the command ----------------------------------------------------------------------------------------------------


def run_eval(request: EvalRequest) -> Answer:
    """Measures both networks, prints the result and writes its record if requested.

    Refuses an unwritable --out, and records of noise, before any work.
    """
    is_noise = request.data.startswith("random:")
    reads = {f"--{name}": getattr(request, name) for name in ("pruned", "dense", "data")}
    check_out(request.out, force=request.force, reads=reads)
    if request.out is not None and is_noise:
        raise CommandError(
            "results on noise do not show how good a network is",
            where=f"--out {request.out}",
            fix="leave it out, or give --data of your own",
        )
    dense, pruned = both_networks(request.model, request.dense, request.pruned, request.device)
    is_language = not is_noise and is_language_model(request.model) and is_text(Path(request.data))
    if is_language:
        return _evaluate_text(request, dense, pruned)
    reader = Reader(dense, request.model, request.inputs, request.seed)
    if is_noise:  # only checks shapes
        drawn = reader.draw(reader.open(request.data), request.points)
    else:
        drawn = reader.holdout(request.data, request.points, "--data")
    with naming_option(f"--model {request.model}, --data {request.data}", "see sipp eval --help"):
        evaluation = evaluate(dense, pruned, drawn.batches, request.output)
        hashes = {"dense_hash": model_hash(dense), "pruned_hash": model_hash(pruned)}  # as in certificates
    if evaluation.dense_accuracy is None and drawn.unlabelled:
        evaluation = evaluation.model_copy(update={"why_no_accuracy": drawn.unlabelled})
    record = _describe(request, hashes, summary(drawn)) | evaluation.model_dump()
    lines = [_network(request), labelled_line("data", drawn.words), *normalisation_lines(drawn), str(evaluation)]
    lines.append(labelled_line("", "measured on these inputs only; sipp certify bounds the error on new inputs"))
    if is_noise:
        lines.append(labelled_line("noise", "this shows what the networks do on random inputs, not on yours"))
    return Answer([*lines, *write_record(request.out, record, force=request.force)], record)


def _network(request: EvalRequest) -> str:
    dense = request.dense or "weights of that folder"
    return labelled_line("network", f"{request.model}, dense {dense}, pruned {request.pruned}")


def _describe(request: EvalRequest, hashes: dict[str, str], data: dict[str, Any] | None) -> dict[str, Any]:
    """The part of the record that describes networks and data."""
    about = {"kind": EVAL_KIND, "format": EVAL_FORMAT, "sipp": sipp.__version__, "model": request.model, **hashes}
    asked = {"dense": request.dense, "pruned": request.pruned, "output": request.output}
    record: dict[str, Any] = json_value(about | {"data": data} | asked)
    return record


def _evaluate_text(request: EvalRequest, dense: nn.Module, pruned: nn.Module) -> Answer:
    """Measures the perplexity of both networks on a text, and how much they differ."""
    with naming_option(f"--model {request.model}, --data {request.data}", "see sipp eval --help"):
        all_nT = windows(Path(request.data), request.model, request.inputs.length)
        read_nT = all_nT[: request.points]
        measured = sipp.perplexity(pruned, read_nT, dense=dense, output=request.output)
        hashes = {"dense_hash": model_hash(dense), "pruned_hash": model_hash(pruned)}
    first = f"the first {len(read_nT):,} of {len(all_nT):,}" if len(read_nT) < len(all_nT) else f"{len(all_nT):,}"
    words = f"{first} windows of {measured.window:,} tokens of {Path(request.data).name}, read as one text"
    data = {"spec": request.data, "kind": "text", "what": words, "hash": hash_of_points(data_of(read_nT).hashes())}
    tokenizer = f"of {request.model.removeprefix(PREFIX)}"
    values = {
        "n_points": measured.n_windows, "dense_loss": measured.dense_loss, "pruned_loss": measured.loss,
        "same_class": measured.same_token, "dense_perplexity": measured.dense_perplexity,
        "pruned_perplexity": measured.perplexity, "kl": measured.kl, "same_token": measured.same_token,
        "window": measured.window, "stride": measured.window, "n_tokens": measured.n_tokens, "tokenizer": tokenizer,
    }  # fmt: skip
    record = _describe(request, hashes, data) | json_value(values)
    lines = [
        _network(request),
        labelled_line("data", f"{words}, tokenizer {tokenizer}"),
        str(measured),
        labelled_line("", "measured on this text only; sipp certify bounds the error on new text"),
    ]
    return Answer([*lines, *write_record(request.out, record, force=request.force)], record)
