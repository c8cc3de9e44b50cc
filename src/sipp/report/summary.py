"""The first card of a pruned network's page: accuracy, size, speed, guarantee, and next steps."""

from __future__ import annotations

import math
from typing import Any

from sipp.report.contents import Finding, NextStep, SummaryTile
from sipp.report.numbers import number
from sipp.report.results import PrunedModel
from sipp.results.certificate import (
    AccuracyCertificate,
    AnyCertificate,
    Certificate,
    claim_about_tokens,
    limit_words,
)
from sipp.results.display import bytes_in_words, counted, percent, percent_up, points_up
from sipp.results.evaluation import Evaluation
from sipp.results.text_scores import TextScores

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
    elif (scores := text_scores_of(pruned)) is not None and scores.dense_perplexity is not None:
        heading += f", and the perplexity is {scores.perplexity:.2f} (before: {scores.dense_perplexity:.2f})"
    elif (moved := shown_output_change(pruned)) is not None:
        heading += f", and the output moves by {number(moved[0], 'share')}"
    dead = facts.dead_rows
    rows = "no row lost all its weights" if not dead else f"{counted(dead, 'row')} lost all weights"
    repaired = "" if facts.repair is None else " and repaired"
    return Finding(
        heading,
        f"Pruned with {facts.method}{repaired}: {facts.kept:,} of {facts.n_weights:,} prunable weights kept in "
        f"{counted(len(facts.layers), 'layer')}; {rows}.",
    )


def text_scores_of(pruned: PrunedModel) -> TextScores | None:
    """The perplexity that was measured, of a language model."""
    measured = None if pruned.evaluation is None else pruned.evaluation.measured
    return measured if isinstance(measured, TextScores) else None


def shown_output_change(pruned: PrunedModel) -> tuple[float, str] | None:
    """How far outputs move, and on which points; on new points if that was measured."""
    measured = pruned.evaluation
    if measured is not None and measured.error is not None:
        return measured.error, f"on average, on {measured.data.what}"
    return None if pruned.output_change is None else (pruned.output_change, "on a few calibration inputs")


def tiles_of(pruned: PrunedModel) -> list[SummaryTile]:
    """Tiles for accuracy, size, speed, guarantee and output change; unknown values say how to measure them."""
    measured, bench = pruned.evaluation, pruned.bench
    accuracy = SummaryTile("accuracy", UNKNOWN, "sipp eval measures it on data with labels")
    if measured is not None and measured.accuracies is not None:
        before, after = (number(share, "share") for share in measured.accuracies)
        accuracy = SummaryTile("accuracy", f"{before}{ARROW}{after}", f"before and after, on {measured.data.what}")
    elif measured is not None and (scores := text_scores_of(pruned)) is not None:
        before = "" if scores.dense_perplexity is None else f"{scores.dense_perplexity:.2f}{ARROW}"
        words = f"{'before and after, ' if before else ''}on {measured.data.what}"
        accuracy = SummaryTile("perplexity", f"{before}{scores.perplexity:.2f}", words)
    size = SummaryTile(
        "weights", f"{number(pruned.pruned.keep, 'share')} left", "sipp bench measures the size of the file"
    )
    speed = SummaryTile("speed", UNKNOWN, "sipp bench measures it; zeros alone do not make a network faster")
    if bench is not None:
        stored, dense = bytes_in_words(bench.bytes.file), bytes_in_words(bench.bytes.dense)
        size = SummaryTile(
            "size",
            bench.size_headline,
            f"{stored} as a small file (sipp export --to small), {dense} before{bench.why_larger}",
        )
        run = bench.runs[-1]
        place = f"{counted(run.n_points, 'input')} per call on {counted(bench.n_threads, 'CPU thread')}"
        than = " than PyTorch, with" if run.headline.endswith(("faster", "slower")) else ": with"
        speed = SummaryTile("speed", run.headline, f"{run.words}{than} sipp.sparse, {place}")
    change = shown_output_change(pruned)
    moved = SummaryTile("output moves by", UNKNOWN, "sipp eval measures it")
    if change is not None:
        words = f"of its norm, {change[1]}; this was measured, the guarantee is a limit for new inputs"
        moved = SummaryTile("output moves by", number(change[0], "share"), words)
    return [accuracy, size, speed, _guarantee(pruned), moved]


def _guarantee(pruned: PrunedModel) -> SummaryTile:
    """The tile for the guarantee: a certificate on accuracy if there is one, else on outputs."""
    about_accuracy = pruned.certified_drop
    about_outputs = next((claim for claim in _with_claims(pruned) if isinstance(claim, Certificate)), None)
    words = ". ".join(claim_of(known) for known in (about_accuracy, about_outputs) if known is not None)
    if about_accuracy is not None:
        drop = points_up(about_accuracy.drop_upper).replace("percentage ", "")  # said below
        return SummaryTile("guarantee", f"drop at most {drop}", words)
    if about_outputs is not None:
        within = f"within {limit_words(about_outputs)}"
        return SummaryTile("guarantee", "useless" if about_outputs.is_useless else within, words)
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
    sure = f"({percent(certificate.confidence)} confidence)"
    if isinstance(certificate, AccuracyCertificate):
        what = "accuracy of the next token" if certificate.measure == "next-token" else "accuracy"
        return f"On new inputs, the {what} falls by at most {points_up(certificate.drop_upper)} {sure}"
    if certificate.verdict != "certified" or not math.isfinite(certificate.epsilon):
        return ""
    share = percent(1 - certificate.share)
    if certificate.measure != "output":
        return f"For {share} of new sequences {claim_about_tokens(certificate)} {sure}"
    limit = percent_up(certificate.epsilon)
    if certificate.is_useless:
        return f"The certificate is useless: it allows an error of {limit} of the output's norm"
    return f"For {share} of new inputs the output stays within {limit} of the original {sure}"


def next_steps(pruned: PrunedModel) -> list[NextStep]:
    """Next steps, most useful first: measure what is unknown, repair what is bad, use the network."""
    model = pruned.identity.model if "asked" in pruned.rest else None  # a program's report names a class
    weights = pruned.identity.weights
    of = f"--model {model or 'MODEL'} --dense {weights or 'WEIGHTS'} --pruned {pruned.name}"
    steps = []

    def suggest(words: str, in_shell: str, in_python: str) -> None:
        steps.append(NextStep(words, in_python if model is None else in_shell))

    if pruned.accuracies is None and text_scores_of(pruned) is None:
        suggest(
            "Measure its accuracy on new data with labels:",
            f"sipp eval {of} --data NEW --out {pruned.name}/eval.json",
            "sipp.certify_accuracy(model, pruned, labelled_holdout)",
        )
    if not _with_claims(pruned):
        suggest(
            "Get a guarantee:",
            f"sipp certify {of} --holdout NEW --out {pruned.name}/certificate.json",
            "sipp.certify(model, pruned, holdout)",
        )
    lost = 0.0 if pruned.accuracies is None else pruned.accuracies[0] - pruned.accuracies[1]
    moved = shown_output_change(pruned)
    if lost > MUCH_LOST or (pruned.evaluation is None and moved is not None and moved[0] > MUCH_MOVED):
        if pruned.pruned.repair is not None:
            hold = "sipp.hold(model, pruned, optimizer=optimizer)"
            suggest("Too much lost? Keep more weights, or retrain with the zeros held at zero:", hold, hold)
        else:
            again = "sipp.prune(model, data, keep=..., repair=True)"
            suggest("Bring back most of what was lost, without training:", "sipp prune ... --repair", again)
    if pruned.bench is None and model is not None:
        command = f"sipp bench {pruned.name} --out {pruned.name}/bench.json"
        steps.append(NextStep("See how small and fast it is:", command))
    if len(steps) < 2:  # a record from Python names a class, not how to build it
        steps += _ways_to_use(pruned.name, model)
    return steps[:3]


def _ways_to_use(name: str, model: str | None) -> list[NextStep]:
    """How to store the network in a small file and run it fast, in Python or from the shell."""
    store, run = "Store it in a small file:", "Run it faster on a CPU"
    if model is None:
        fast = NextStep(f"{run}:", "fast = sipp.sparse(pruned, example)")
        return [fast, NextStep(store, 'sipp.save(pruned, "small.safetensors")')]
    module, _, function = model.partition(":")
    is_own = function.isidentifier() and module.replace(".", "").isidentifier() and module != "hf"
    network = f"{module}.{function}()" if is_own else "network"
    imported = f"import sipp, {module}; " if is_own else "import sipp; "
    return [
        NextStep(store, f"sipp export {name} --model {model} --to small --out small.safetensors"),
        NextStep(
            f"{run}, in Python:", f'{imported}fast = sipp.sparse(sipp.load("small.safetensors", {network}), example)'
        ),
    ]


def outputs_rows(pruned: PrunedModel) -> list[list[Any]]:
    """All numbers on how far outputs move, with their meaning."""
    rows, measured = [], pruned.evaluation
    if measured is not None and isinstance(measured.measured, Evaluation) and measured.error is not None:
        of = measured.measured
        mean, median, largest = (number(error, "share") for error in (of.error_mean, of.error_median, of.error_max))
        rows.append(["on average", f"{mean}: the mean over {measured.data.what}; the number at the top of the page"])
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
