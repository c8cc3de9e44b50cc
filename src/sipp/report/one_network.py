"""The article on one pruned network: in short, what to do next, then accuracy, outputs, layers, speed, guarantees."""

from __future__ import annotations

import shlex
from dataclasses import replace

from sipp.report import plots
from sipp.report.contents import Article, Finding, Section
from sipp.report.networks import PrunedModel, shared_holdout
from sipp.report.numbers import number
from sipp.report.plots import cards, sheet_section
from sipp.results import (
    GIVEN,
    AccuracyCertificate,
    AnyCertificate,
    Certificate,
    Evaluation,
    Sheet,
    TextScores,
    words,
)

# Keys of the report with sections of their own, and those without a meaning for readers
SECTIONS = {"layers", "bound", "guarantee", "measured", "repair", "choice", "certificate", "seen"}
UNKNOWN = "not measured"
N_STEPS = 3  # that are suggested, beside the small file
MUCH_LOST = 0.01  # of the accuracy
MUCH_MOVED = 0.1  # of the output's norm; above either, suggest repair or more weights
ARROW = " \N{RIGHTWARDS ARROW} "


def pruned_article(model: PrunedModel, ident: str) -> Article:
    """The article on one pruned network."""
    facts = model.pruned
    sections = [
        *_measured_sections(model, ident),
        _layers_section(model, ident),
        None if model.bench is None else sheet_section("Size and speed", model.bench.sheet, f"{ident}-speed"),
        None if facts.repair is None else sheet_section("Repair", facts.repair.sheet, f"{ident}-repair"),
        None if facts.choice is None else sheet_section("Method", facts.choice.sheet, f"{ident}-blend"),
        _statements_section(model, ident),
    ]
    rest = {key: value for key, value in model.record.values.items() if key not in SECTIONS}
    return Article(
        ident=ident,
        topic=f"pruned model, {model.arm}",
        title=f"{model.name}: {number(facts.keep, 'share')} of the weights",
        notes=model.notes,
        lead=lead(model),
        steps=next_steps(model),
        tiles=tiles_of(model),
        sections=[section for section in sections if section is not None],
        tables=[("As printed", dict(facts.sheet.facts)), ("Everything else in its report", rest)],
    )


# --- in short ---------------------------------------------------------------------------------------------------------


def lead(model: PrunedModel) -> Finding:
    """One sentence on how much was kept and what was lost; then what was done."""
    facts, scores = model.pruned, model.text_scores
    heading = f"{number(facts.keep, 'share')} of the weights are left"
    if model.accuracies is not None:
        before, after = (number(share, "share") for share in model.accuracies[:2])
        heading += f", and the accuracy is {after} (before: {before})"
    elif scores is not None and scores.dense_perplexity is not None:
        heading += f", and the perplexity is {scores.perplexity:.2f} (before: {scores.dense_perplexity:.2f})"
    elif (moved := change_of_output(model)) is not None:
        heading += f", and the output error is {number(moved[0], 'share')}"
    dead = facts.dead_rows
    rows = "no row lost all its weights" if not dead else f"{words.counted(dead, 'row')} lost all weights"
    how = "Given weights" if facts.method == GIVEN else f"Pruned with {facts.method}"
    how += "" if facts.repair is None else " and repaired"
    kept = f"{facts.kept:,} of {facts.n_weights:,} prunable weights kept in {words.counted(len(facts.layers), 'layer')}"
    return Finding(heading, f"{how}: {kept}; {rows}.")


def change_of_output(model: PrunedModel) -> tuple[float, str] | None:
    """The change of the outputs, and on which inputs; on new ones if that was measured."""
    measured = model.evaluation
    if measured is not None and measured.error is not None:
        return measured.error, f"on average, on {measured.inputs}"
    return None if model.moved is None else (model.moved, "on a few calibration inputs")


def tiles_of(model: PrunedModel) -> list[tuple[str, str, str]]:
    """Accuracy, size, speed, guarantee, output change: name, value, words (if unknown, how to measure it)."""
    bench, scores, change = model.bench, model.text_scores, change_of_output(model)
    accuracy = ("accuracy", UNKNOWN, "sipp eval measures it on data with labels")
    if _is_language_model(model):
        accuracy = ("perplexity", UNKNOWN, "sipp eval measures it on a text")
    if model.accuracies is not None:
        before, after = (number(share, "share") for share in model.accuracies[:2])
        accuracy = ("accuracy", f"{before}{ARROW}{after}", f"before and after, on {model.accuracies[2]}")
    elif scores is not None and scores.dense_perplexity is None:
        accuracy = ("perplexity", f"{scores.perplexity:.2f}", f"on {scores.inputs}")
    elif scores is not None:
        value = f"{scores.dense_perplexity:.2f}{ARROW}{scores.perplexity:.2f}"
        accuracy = ("perplexity", value, f"before and after, on {scores.inputs}")
    size = ("weights", f"{number(model.pruned.keep, 'share')} left", "sipp bench measures the size of the file")
    speed = ("speed", UNKNOWN, "sipp bench measures it; zeros alone do not make a network faster")
    if bench is not None:
        stored, dense = words.of_bytes(bench.file_bytes), words.of_bytes(bench.dense_bytes)
        size = (
            "size",
            words.size_headline(bench.file_bytes, bench.dense_bytes),
            f"{stored} as a small file, {dense} before",
        )
        run = bench.runs[-1]
        place = f"{words.counted(run.n_inputs, 'input')} per call on {words.counted(bench.n_threads, 'CPU thread')}"
        than = " than PyTorch, with" if run.faster.headline.endswith(("faster", "slower")) else ": with"
        speed = ("speed", run.faster.headline, f"{run.faster.words}{than} sipp.sparse, {place}")
    moved = ("output error", UNKNOWN, "sipp eval measures it")
    if change is not None:
        text = f"of its norm, {change[1]}; this was measured, the guarantee is a limit for new inputs"
        moved = ("output error", number(change[0], "share"), text)
    return [accuracy, size, speed, ("guarantee", *_guarantee(model)), moved]


def _guarantee(model: PrunedModel) -> tuple[str, str]:
    """The guarantee and its words: of a certificate on accuracy if there is one, else on outputs."""
    about_outputs = next((claim for claim in _with_claims(model) if isinstance(claim, Certificate)), None)
    known = [claim for claim in (model.certified_drop, about_outputs) if claim is not None]
    if known:
        return known[0].claim_in_brief, ". ".join(claim.claim for claim in known)
    if isinstance(model.record.certificate, Certificate):
        return "none", f"Certificate: {model.record.certificate.verdict}"
    if any(one.is_useful for one in model.pruned.statements if one.label == "network"):
        return "in theory", "The theory's bound holds, for the share of inputs given below"
    return "none", "sipp certify makes one from inputs that are new to both networks"


def _with_claims(model: PrunedModel) -> list[AnyCertificate]:
    """The certificates that claim something."""
    return [certificate for certificate in model.certificates if certificate.claim]


def next_steps(model: PrunedModel) -> list[tuple[str, str]]:
    """Why, and a command that runs as it is (but for NEW): what is unknown first, then what is bad, then its use."""
    in_shell = model.record.asked is not None and model.folder is not None  # else it is from Python
    known = model.record.asked or {}
    name, folder = shlex.quote(model.record.model), shlex.quote(str(model.folder))
    dense = "" if name.startswith("hf:") else f" --dense {shlex.quote(model.record.weights or 'WEIGHTS')}"
    both, stored = f"--model {name}{dense} --pruned {folder}", f"{folder} --model {name}"
    is_data_set = model.record.data.get("kind") == "built-in"  # its test part is new
    new = shlex.quote(str(known.get("holdout") or (known.get("data") if is_data_set else None) or "NEW"))
    for option, value in ((known.get("reading") or {}) | {"part": known.get("part")}).items():
        new += "" if value is None else f" --{option} {value}"
    steps: list[tuple[str, str, str]] = []  # why, in the shell, in Python
    if model.accuracies is None and model.text_scores is None:
        command = f"sipp eval {both} --data {new} --out {folder}/eval.json"
        why, python = (
            "Measure its accuracy on new data with labels:",
            "sipp.certify_accuracy(model, pruned, labelled_holdout)",
        )
        if _is_language_model(model):
            why, python = "Measure its perplexity on new text:", "sipp.perplexity(pruned, tokens, dense=model)"
        steps.append((why, command, python))
    if not _with_claims(model):
        command = f"sipp certify {both} --holdout {new} --out {folder}/certificate.json"
        steps.append(("Get a guarantee:", command, "sipp.certify(model, pruned, holdout)"))
    lost = 0.0 if model.accuracies is None else model.accuracies[0] - model.accuracies[1]
    moved, measured = change_of_output(model), (model.evaluation, model.text_scores, model.accuracies)
    is_measured = any(one is not None for one in measured)
    is_bad = lost > MUCH_LOST or (not is_measured and moved is not None and moved[0] > MUCH_MOVED)
    if is_bad and model.pruned.repair is None:
        command = f"sipp prune ... --repair --out {folder}-repaired"  # the options of before in place of the dots
        python = "sipp.prune(model, data, keep=..., repair=True)"
        steps.append(("Bring back most of what was lost, without training:", command, python))
    elif is_bad:
        python = "sipp.hold(model, pruned, optimizer=optimizer)"
        steps.append(("Too much lost? Keep more weights, or retrain with the zeros held at zero:", python, python))
    if model.bench is None:
        command = f"sipp bench {stored} --data {new} --out {folder}/bench.json"
        steps.append(("See how small and fast it is:", command, "sipp.bench(pruned, example)"))
    steps = steps[:N_STEPS]
    command = f"sipp export {stored} --out small.safetensors"
    steps.append(("Store it in a small file:", command, 'sipp.save(pruned, "small.safetensors")'))
    if len(steps) < N_STEPS:
        fast = 'fast = sipp.sparse(sipp.load("small.safetensors", into=model), example)'
        steps.append(("Run it faster on a CPU, in Python:", fast, "fast = sipp.sparse(pruned, example)"))
    return [(why, command if in_shell else python) for why, command, python in steps]


def _is_language_model(model: PrunedModel) -> bool:
    """Whether text is its input, as far as the record knows."""
    return model.record.data.get("kind") == "text" or model.record.model.endswith(("ForCausalLM", "LMHeadModel"))


# --- sections ---------------------------------------------------------------------------------------------------------


def _measured_sections(model: PrunedModel, ident: str) -> list[Section]:
    """Accuracy or perplexity and output error compared with the dense network, a section for each evaluation."""
    known = [one for one in model.measured.values() if isinstance(one, Evaluation | TextScores)]
    first = model.evaluation or model.text_scores
    known.sort(key=lambda one: one is not first)
    return [sheet_section("Measured", one.sheet, f"{ident}-measured{index}") for index, one in enumerate(known)]


def _layers_section(model: PrunedModel, ident: str) -> Section:
    """The section on how much each layer keeps."""
    layers = model.pruned.layers
    dead = [layer.dead_rows for layer in layers if layer.dead_rows]
    least = min(layers, key=lambda layer: layer.kept / max(1, layer.n_weights))
    heading = f"{least.name} keeps the smallest share: {least.kept:,} of {least.n_weights:,} weights"
    shares = {number(layer.kept / max(1, layer.n_weights), "share") for layer in layers}
    if len(shares) == 1:
        heading = f"Every layer keeps {shares.pop()} of its weights"
    rows, where = words.counted(sum(dead), "row"), words.counted(len(dead), "layer")
    lost = f"{rows} in {where} lost all weights and output only a bias."
    table = model.pruned.layers_table(in_full=True)
    section = sheet_section("Layers", Sheet("", tables=(table,)), f"{ident}-layers")
    return replace(section, finding=Finding(heading, lost if dead else "No row lost all its weights."))


def _statements_section(model: PrunedModel, ident: str) -> Section:
    own, later = model.record.certificate, model.measured.items()
    cards_of_later = [
        plots.certificate_card(one, "" if model.folder is None else f" ({name})")
        for name, one in later
        if isinstance(one, Certificate | AccuracyCertificate)
    ]
    shown = plots.statement_cards(model.pruned, own)
    first = [] if own is None and cards_of_later else shown[:1]  # otherwise it says that there is none
    detail = "All statements compare the pruned network as it was saved with the one it was pruned from. "
    finding = Finding("What is guaranteed, and with what confidence", detail + shared_holdout([model]))
    whole = [*first, *cards_of_later, *shown[1:]]
    return Section("Statements", finding, [[cards(f"{ident}-statements", "What is guaranteed", whole)]])
