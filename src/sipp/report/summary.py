"""The first card of a pruned network's page: accuracy, size, speed, guarantee, and next steps."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sipp.report.contents import Finding, NextStep, SummaryTile
from sipp.report.numbers import number
from sipp.report.results import PrunedModel
from sipp.results import AccuracyCertificate, AnyCertificate, Certificate, claim_about_tokens, limit_words, words

UNKNOWN = "not measured"
MUCH_LOST = 0.01  # of the accuracy
MUCH_MOVED = 0.1  # of the output's norm; above either, suggest repair or more weights
ARROW = " \N{RIGHTWARDS ARROW} "


def lead(pruned: PrunedModel) -> Finding:
    """What is left and what it cost, in one sentence; then what was done."""
    facts = pruned.pruned
    heading = f"{number(facts.keep, 'share')} of the weights are left"
    if pruned.accuracies is not None:
        before, after = (number(share, "share") for share in pruned.accuracies)
        heading += f", and the accuracy is {after} (before: {before})"
    elif (scores := pruned.text_scores) is not None and scores.dense_perplexity is not None:
        heading += f", and the perplexity is {scores.perplexity:.2f} (before: {scores.dense_perplexity:.2f})"
    elif (moved := shown_output_change(pruned)) is not None:
        heading += f", and the output moves by {number(moved[0], 'share')}"
    dead = facts.dead_rows
    rows = "no row lost all its weights" if not dead else f"{words.counted(dead, 'row')} lost all weights"
    repaired = "" if facts.repair is None else " and repaired"
    how = "Given weights" if facts.method == "given" else f"Pruned with {facts.method}"
    return Finding(
        heading,
        f"{how}{repaired}: {facts.kept:,} of {facts.n_weights:,} prunable weights kept in "
        f"{words.counted(len(facts.layers), 'layer')}; {rows}.",
    )


def shown_output_change(pruned: PrunedModel) -> tuple[float, str] | None:
    """How far outputs move, and on which points; on new points if that was measured."""
    measured = pruned.evaluation
    if measured is not None and measured.error is not None:
        return measured.error, f"on average, on {measured.inputs}"
    return None if pruned.output_change is None else (pruned.output_change, "on a few calibration inputs")


def tiles_of(pruned: PrunedModel) -> list[SummaryTile]:
    """Tiles for accuracy, size, speed, guarantee and output change; unknown values say how to measure them."""
    bench = pruned.bench
    accuracy = SummaryTile("accuracy", UNKNOWN, "sipp eval measures it on data with labels")
    if pruned.accuracies is not None:
        before, after = (number(share, "share") for share in pruned.accuracies)
        accuracy = SummaryTile("accuracy", f"{before}{ARROW}{after}", f"before and after, on {pruned.measured_on}")
    elif (scores := pruned.text_scores) is not None:
        before = "" if scores.dense_perplexity is None else f"{scores.dense_perplexity:.2f}{ARROW}"
        text = f"{'before and after, ' if before else ''}on {scores.inputs}"
        accuracy = SummaryTile("perplexity", f"{before}{scores.perplexity:.2f}", text)
    size = SummaryTile(
        "weights", f"{number(pruned.pruned.keep, 'share')} left", "sipp bench measures the size of the file"
    )
    speed = SummaryTile("speed", UNKNOWN, "sipp bench measures it; zeros alone do not make a network faster")
    if bench is not None:
        stored, dense = words.of_bytes(bench.bytes.file), words.of_bytes(bench.bytes.dense)
        size = SummaryTile(
            "size",
            bench.size_headline,
            f"{stored} as a small file (sipp export --to small), {dense} before{bench.why_larger}",
        )
        run = bench.runs[-1]
        place = f"{words.counted(run.n_inputs, 'input')} per call on {words.counted(bench.n_threads, 'CPU thread')}"
        than = " than PyTorch, with" if run.faster.headline.endswith(("faster", "slower")) else ": with"
        speed = SummaryTile("speed", run.faster.headline, f"{run.faster.words}{than} sipp.sparse, {place}")
    change = shown_output_change(pruned)
    moved = SummaryTile("output moves by", UNKNOWN, "sipp eval measures it")
    if change is not None:
        text = f"of its norm, {change[1]}; this was measured, the guarantee is a limit for new inputs"
        moved = SummaryTile("output moves by", number(change[0], "share"), text)
    return [accuracy, size, speed, _guarantee(pruned), moved]


def _guarantee(pruned: PrunedModel) -> SummaryTile:
    """The tile for the guarantee: a certificate on accuracy if there is one, else on outputs."""
    about_accuracy = pruned.certified_drop
    about_outputs = next((claim for claim in _with_claims(pruned) if isinstance(claim, Certificate)), None)
    text = ". ".join(claim_of(known) for known in (about_accuracy, about_outputs) if known is not None)
    if about_accuracy is not None:
        drop = about_accuracy.drop_upper
        points = words.points_up(drop).replace("percentage ", "").removeprefix("-")  # said below
        limit = f"drop at most {points}" if drop >= 0 else f"rises by at least {points}"
        return SummaryTile("guarantee", limit, text)
    if about_outputs is not None:
        within = f"within {limit_words(about_outputs)}"
        return SummaryTile("guarantee", "useless" if about_outputs.is_useless else within, text)
    if isinstance(pruned.identity.certificate, Certificate):
        return SummaryTile("guarantee", "none", f"Certificate: {pruned.identity.certificate.verdict}")
    if pruned.pruned.bound.holds:
        return SummaryTile("guarantee", "in theory", "The theory's bound holds, for the share of inputs given below")
    return SummaryTile("guarantee", "none", "sipp certify makes one from inputs that are new to both networks")


def _with_claims(pruned: PrunedModel) -> list[AnyCertificate]:
    """The certificates that claim something."""
    return [certificate for certificate in pruned.all_certificates if claim_of(certificate)]


def claim_of(certificate: AnyCertificate) -> str:
    """What a certificate claims, in one sentence; empty if it claims nothing."""
    sure = f"({words.percent(certificate.confidence)} confidence)"
    if isinstance(certificate, AccuracyCertificate):
        return f"On new inputs, pruning {certificate.change} {sure}"
    if certificate.verdict != "certified" or not math.isfinite(certificate.epsilon):
        return ""
    share = words.percent(1 - certificate.share)
    if certificate.measure != "output":
        return f"For {share} of new sequences {claim_about_tokens(certificate)} {sure}"
    limit = words.percent_up(certificate.epsilon)
    if certificate.is_useless:
        return f"The certificate is useless: it allows an error of {limit} of the output's norm"
    return f"For {share} of new inputs the output stays within {limit} of the original {sure}"


def next_steps(pruned: PrunedModel) -> list[NextStep]:
    """Next steps, most useful first: measure what is unknown, repair what is bad, use the network."""
    asked = pruned.rest.get("asked")
    is_in_shell = isinstance(asked, dict) and pruned.folder is not None  # else it is from Python
    at = Shell.of(pruned, asked if isinstance(asked, dict) else {})
    stored = f"{at.folder} --model {at.model}"
    steps: list[tuple[str, str, str]] = []  # why, in the shell, in Python
    if pruned.accuracies is None and pruned.text_scores is None:
        command = f"sipp eval {at.networks} --data {at.inputs} --out {at.folder}/eval.json"
        python = "sipp.certify_accuracy(model, pruned, labelled_holdout)"
        steps.append(("Measure its accuracy on new data with labels:", command, python))
    if not _with_claims(pruned):
        command = f"sipp certify {at.networks} --holdout {at.inputs} --out {at.folder}/certificate.json"
        steps.append(("Get a guarantee:", command, "sipp.certify(model, pruned, holdout)"))
    lost = 0.0 if pruned.accuracies is None else pruned.accuracies[0] - pruned.accuracies[1]
    moved = shown_output_change(pruned)
    is_measured = pruned.evaluation is not None or pruned.text_scores is not None
    is_bad = lost > MUCH_LOST or (not is_measured and moved is not None and moved[0] > MUCH_MOVED)
    if is_bad and pruned.pruned.repair is None:
        repair = "sipp.prune(model, data, keep=..., repair=True)"
        steps.append(("Bring back most of what was lost, without training:", "sipp prune ... --repair", repair))
    elif is_bad:
        hold = "sipp.hold(model, pruned, optimizer=optimizer)"
        steps.append(("Too much lost? Keep more weights, or retrain with the zeros held at zero:", hold, hold))
    if pruned.bench is None:
        command = f"sipp bench {stored} --data {at.inputs} --out {at.folder}/bench.json"
        steps.append(("See how small and fast it is:", command, "sipp.bench(pruned, example)"))
    if len(steps) < 2:
        command = f"sipp export {stored} --out small.safetensors"
        fast = "fast = sipp.sparse(pruned, example)"
        from_file = _python_line(pruned.identity.model)
        steps.append(("Store it in a small file:", command, 'sipp.save(pruned, "small.safetensors")'))
        steps.append(("Run it faster on a CPU, in Python:", from_file, fast))
    return [NextStep(why, command if is_in_shell else python) for why, command, python in steps[:3]]


def _python_line(model: str) -> str:
    """How a network that the shell named, and stored in the small file, runs in Python."""
    module, _, function = model.replace(".py:", ":").partition(":")
    is_own = function.isidentifier() and module.replace(".", "").isidentifier() and module != "hf"
    network, imported = (f"{module}.{function}()", f"sipp, {module}") if is_own else ("network", "sipp")
    return f'import {imported}; fast = sipp.sparse(sipp.load("small.safetensors", {network}), example)'


@dataclass(frozen=True)
class Shell:
    """Words of commands about a network that `sipp prune` wrote: they run as they are, if NEW is given."""

    model: str
    folder: str
    networks: str  # --model, --dense and --pruned
    inputs: str  # new data, and how they are read

    @classmethod
    def of(cls, pruned: PrunedModel, asked: Mapping[str, Any]) -> Shell:
        """From what was asked for when it was pruned."""
        model, folder = shlex.quote(pruned.identity.model), shlex.quote(str(pruned.folder))
        dense = "" if model.startswith("hf:") else f" --dense {shlex.quote(pruned.identity.weights or 'WEIGHTS')}"
        is_data_set = (pruned.rest.get("data") or {}).get("kind") == "built-in"  # its test part is new
        new = asked.get("holdout") or (asked.get("data") if is_data_set else None) or "NEW"
        reading = {name: asked.get(name) for name in ("normalise", "size", "length", "part")}
        options = "".join(f" --{name} {value}" for name, value in reading.items() if value is not None)
        return cls(model, folder, f"--model {model}{dense} --pruned {folder}", f"{shlex.quote(str(new))}{options}")


def outputs_rows(pruned: PrunedModel) -> list[list[Any]]:
    """All numbers on how far outputs move, with their meaning."""
    rows, of = [], pruned.evaluation
    if of is not None and of.error is not None:
        mean, median, largest = (number(error, "share") for error in (of.error_mean, of.error_median, of.error_max))
        rows.append(["on average", f"{mean}: the mean over {of.inputs}; the number at the top of the page"])
        rows.append(["half of the inputs", f"at most {median}"])
        rows.append(["the worst input", largest])
    if pruned.output_change is not None:
        at_top = "" if rows else "; the number at the top of the page"
        rows.append(
            [
                "on calibration inputs",
                f"{number(pruned.output_change, 'share')}: over all inputs together, so large outputs count more"
                f"{at_top}",
            ]
        )
    rows += [["guaranteed", claim_of(certificate)] for certificate in _with_claims(pruned)]
    return rows
