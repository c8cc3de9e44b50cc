"""The article on one pruned network: accuracy, outputs, layers, size and speed, repair, method, guarantees."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from sipp.report import series
from sipp.report.contents import Article, Finding, Section, key_value_rows
from sipp.report.numbers import Unit, counted, number
from sipp.report.palette import THIS
from sipp.report.plots import LAYER_VALUES, bar_view, bars, cards_plot, certificate_card, layer_view, statement_cards
from sipp.report.results import PrunedModel, shared_holdout
from sipp.report.summary import claim_in, lead, next_steps, outputs_rows, shown_output_change, tiles_of
from sipp.results.bench import BenchRecord, BenchStep
from sipp.results.blend import BlendChoice
from sipp.results.display import listed
from sipp.results.evaluation import EvalRecord
from sipp.results.json_values import json_value
from sipp.results.repair import Repair
from sipp.results.schemas import given_values

# Fields of the record that are shown elsewhere on the page
SHOWN = {"layers", "bound", "certificate", "kind", "measured", "repaired", "choice", "seen", "seen_all"}


def pruned_article(pruned: PrunedModel, ident: str) -> Article:
    """The article on one pruned network."""
    record, measured = pruned.record, pruned.evaluation
    sections = [
        None if measured is None else _accuracy_section(pruned, measured, ident),
        _outputs_section(pruned, ident),
        _layers_section(pruned, ident),
        None if pruned.bench is None else _size_and_speed_section(pruned, pruned.bench, ident),
        None if record.repaired is None else _repair_section(record.repaired, ident),
        None if record.choice is None else _method_section(record.choice, ident),
        _statements_section(pruned, ident),
    ]
    rest = {key: value for key, value in given_values(record).items() if key not in SHOWN}
    return Article(
        ident=ident,
        topic=f"pruned model, {pruned.arm}",
        title=f"{pruned.name}: {number(record.keep, 'share')} of the weights",
        notes=pruned.notes,
        lead=lead(pruned),
        steps=next_steps(pruned),
        tiles=tiles_of(pruned),
        sections=[section for section in sections if section is not None],
        tables=[("Everything else in its report", key_value_rows(rest))],
    )


# --- outputs and layers ---------------------------------------------------------------------------------------------


def _outputs_section(pruned: PrunedModel, ident: str) -> Section | None:
    """All numbers on how far outputs move, explained."""
    rows = outputs_rows(pruned)
    if not rows:
        return None
    text = "Distance from the dense network's output, divided by its norm."
    card = {"title": "How far outputs move", "text": text, "rows": rows}
    change = shown_output_change(pruned)
    heading = "How far outputs move" if change is None else f"Outputs move by {number(change[0], 'share')}, {change[1]}"
    finding = Finding(heading, "The other numbers on this page answer different questions:")
    return Section("Outputs", finding, [[cards_plot(f"{ident}-outputs", "How far outputs move", [card])]])


def _layers_section(pruned: PrunedModel, ident: str) -> Section:
    """What each layer keeps."""
    layers = pruned.record.layers
    views = {field: layer_view(field, {THIS: series.rows_of_layers([layers])}) for field in LAYER_VALUES}
    known = {field: view for field, view in views.items() if view["series"]}
    choices = [{"label": "Show", "options": [LAYER_VALUES[field][0] for field in known]}]
    names = [layer.name for layer in layers]
    plot = bars(f"{ident}-layers", "Layer by layer", "layer", names, list(known.values()), choices=choices)
    dead = [layer.dead_rows for layer in layers if layer.dead_rows]
    least = min(layers, key=lambda layer: layer.kept / max(1, layer.n_weights))
    heading = f"{least.name} keeps the smallest share: {least.kept:,} of {least.n_weights:,} weights"
    lost = f"{counted(sum(dead), 'row')} in {counted(len(dead), 'layer')} lost all weights and output only a bias."
    none_lost = "No row lost all its weights."
    return Section("Layers", Finding(heading, lost if dead else none_lost), [[plot]])


# --- guarantees -----------------------------------------------------------------------------------------------------


def _statements_section(pruned: PrunedModel, ident: str) -> Section:
    record = pruned.record
    cards = statement_cards(
        record.certificate,
        record.bound,
        record.guarantee,
        contradicted=record.conditions is not None and record.conditions.contradicted,
        measured=None if record.measured is None else record.measured.words,
    )
    cards[1:1] = [certificate_card(certificate, name) for name, certificate in pruned.certificates.items()]
    if record.certificate is None and pruned.certificates:
        cards = cards[1:]
    finding = Finding(
        "What is guaranteed, and with what confidence",
        "All statements compare the pruned network as it was saved with the one it was pruned from. "
        + shared_holdout([pruned]),
    )
    return Section("Statements", finding, [[cards_plot(f"{ident}-statements", "What is guaranteed", cards)]])


# --- accuracy, from `sipp eval --out` -------------------------------------------------------------------------------


def _accuracy_section(model: PrunedModel, first: EvalRecord, ident: str) -> Section:
    """Accuracy and output error compared with the dense network, one card per evaluation."""
    heading = f"The output moved by {number(first.error_mean, 'share')} of its norm on average"
    if first.error_mean is None:
        heading = f"An output is not finite on {counted(first.n_not_finite, 'input')}"
    if first.accuracies is not None:
        dense, pruned = first.accuracies
        change = number(pruned - dense, "points")
        heading = f"Accuracy is {number(pruned, 'share')} after pruning, {number(dense, 'share')} before ({change})"
    claim = "sipp certify --accuracy bounds the loss on new inputs"
    if model.certified_drop is not None:
        claim = claim_in(model.certified_drop)
    finding = Finding(heading, f"Measured on {first.data.what}. {claim}.")
    ordered = sorted(model.evaluations.items(), key=lambda item: item[1] is not first)
    cards = [
        {"title": f"Measured ({name})", "text": f"On {one.data.what}.", "rows": list(map(list, one.rows))}
        for name, one in ordered
    ]
    return Section("Accuracy", finding, [[cards_plot(f"{ident}-evaluations", "Accuracy, loss and output", cards)]])


# --- method: the chosen blend of sensitivity and magnitude ----------------------------------------------------------


def _method_section(choice: BlendChoice, ident: str) -> Section:
    """Which score was chosen and how; with a plot if several were tried."""
    taken, n_tried = choice.taken, len(choice.tried)
    error = "" if taken.error == inf else f": right after pruning, the output moved by {number(taken.error, 'share')}"
    where = "held back from scoring" if choice.is_held_back else "that were also used for scoring"
    others = "No other score was tried: the outputs of an untrained network say nothing about the trained network."
    rows = []
    if n_tried > 1:
        others = f"{n_tried} scores were tried; a lead that could be chance was ignored."
        names = [f"{blend.name} (chosen)" if blend == taken else blend.name for blend in choice.tried]
        view = bar_view("error of the output", "share", {THIS: json_value([blend.error for blend in choice.tried])})
        rows = [[bars(f"{ident}-blend", "Blends that were tried", "blend", names, view)]]
    inputs = counted(choice.n_points, "calibration input")
    detail = f"Errors are shares of the output's norm, right after pruning, on {inputs} {where}. {others}"
    return Section("Method", Finding(f"Ranked by {taken.name}{error}", detail), rows)


# --- repair, from `sipp prune --repair` -----------------------------------------------------------------------------


def _repair_section(repaired: Repair, ident: str) -> Section:
    """The output error before and after repair, also layer by layer."""
    before, after, is_joint = repaired.output_before, repaired.output_after, repaired.way == "joint"
    if repaired.undone:
        heading = "The repair was undone: the kept weights are as pruning left them"
    elif before is None or after is None or not repaired.n_test:
        heading = "Mask and weights were found together" if is_joint else "The kept weights were refitted"
    else:
        what = "Finding mask and weights together" if is_joint else "Refitting the kept weights"
        heading = f"{what} took the output's error from {number(before, 'share')} to {number(after, 'share')}"
    tested = "There were too few inputs to test it on."
    if repaired.n_test:
        tested = f"Errors are shares of the output's norm, on {repaired.n_test:,} test inputs."
    detail = (
        f"{tested} {repaired.n_fit:,} inputs were used for the fit, without labels; {repaired.n_validation:,} "
        "validation inputs made the choices and measured the errors of layers. Certificates cover the repaired network."
    )
    detail += f" Undone: {repaired.undone}." if repaired.undone else ""
    layers = repaired.layers
    alone = [f"{layer.name} ({layer.left_alone})" for layer in layers if layer.left_alone]
    note = f"{repaired.sentence}." + (f" Left alone: {listed(alone)}." if alone else "")
    rows = []
    if any(layer.error_before is not None for layer in layers):
        errors = {
            "just pruned": [layer.error_before for layer in layers],
            "repaired": [layer.error_after for layer in layers],
        }
        view = bar_view("error of the layer's output", "share", errors)
        rows = [[bars(f"{ident}-repair", "Repair of each layer", "layer", [layer.name for layer in layers], view)]]
    return Section("Repair", Finding(heading, detail), rows, note=note)


# --- size and speed, from `sipp bench` ------------------------------------------------------------------------------

# Values of a step: label, unit, and how to get it
STEP_VALUES: tuple[tuple[str, Unit, Callable[[BenchStep], float | None]], ...] = (
    ("times faster", "number", lambda step: step.ratio),
    ("milliseconds in torch", "number", lambda step: step.dense_ms),
    ("milliseconds sparse", "number", lambda step: step.sparse_ms),
    ("bytes dense", "count", lambda step: float(step.n_dense_bytes)),
    ("bytes sparse", "count", lambda step: float(step.n_bytes)),
)  # fmt: skip


def _size_and_speed_section(pruned: PrunedModel, bench: BenchRecord, ident: str) -> Section:
    """How much smaller and faster it is, how that was measured, and all steps with weights."""
    best = bench.runs[-1]
    finding = Finding(
        f"{bench.size_headline} as a small file (sipp export --to small){bench.why_larger}; {best.words}",
        "Compared with torch running the same pruned network in its better memory format; timed in turns, "
        f"{counted(best.n_points, 'input')} per call, on {counted(bench.n_threads, 'thread')} of {bench.machine}. The "
        "figures are the median and the range of the middle 80 % of pairs of calls. Steps are timed on one thread, "
        f"{counted(bench.step_points, 'input')} at a time.",
    )
    size = cards_plot(f"{ident}-size", "Size and speed", _bench_cards(bench, pruned))
    if best.runs_dense:  # no step was run
        return Section("Size and speed", finding, [[size]])
    names = [step.name for step in bench.steps]
    views = [bar_view(what, unit, {THIS: list(map(value, bench.steps))}) for what, unit, value in STEP_VALUES]
    choices = [{"label": "Show", "options": [what for what, _, _ in STEP_VALUES]}]
    speed = bars(f"{ident}-speed", "Step by step", "step", names, views, choices=choices)
    return Section("Size and speed", finding, [[size], [speed]])


def _bench_cards(bench: BenchRecord, pruned: PrunedModel) -> list[dict[str, Any]]:
    sizes = bench.bytes
    stored = [
        ["stored", f"{sizes.file:,} bytes"],
        ["values and entropy", f"{sizes.bound:,.0f} bytes"],
        ["before pruning", f"{sizes.dense:,} bytes"],
        ["weights in memory", f"{sizes.memory:,} bytes"],
        ["before pruning, in memory", f"{sizes.memory_dense:,} bytes"],
    ]
    entropy = "Values and entropy: the kept values and the fewest bytes that their positions need."
    cards: list[dict[str, Any]] = [{"title": "Bytes", "text": entropy, "rows": stored}]
    for run in bench.runs:
        rates = [1e3 * run.n_points / ms for ms in (run.dense_ms, run.sparse_ms)]
        rows = [
            ["torch", f"{number(run.dense_ms)} ms"],
            ["torch, inputs/s", f"{rates[0]:,.0f}"],
            ["sparse", f"{number(run.sparse_ms)} ms"],
            ["sparse, inputs/s", f"{rates[1]:,.0f}"],
            ["speed", run.words],
            ["outputs differ by", number(run.off_by)],
        ]
        title = "One input per call" if run.n_points == 1 else f"{run.n_points:,} inputs per call"
        cards.append({"title": title, "text": "", "rows": rows})
    certificate = pruned.record.certificate
    useless = bool(bench.certified) and certificate is not None and certificate.is_useless
    title = "Useless certificate" if useless else "Certified"
    text = bench.certified or "No certificate for the stored values."
    return [*cards, {"title": title, "text": text, "rows": [], "useless": useless}]
