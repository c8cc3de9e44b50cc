"""The article on one pruned network: accuracy, outputs, layers, size and speed, repair, method, guarantees."""

from __future__ import annotations

from sipp.report.contents import Article, Finding, Section, key_value_rows
from sipp.report.numbers import number
from sipp.report.palette import THIS
from sipp.report.plots import LAYER_VALUES, bars, cards_plot, certificate_card, layer_view, statement_cards
from sipp.report.results import PrunedModel, shared_holdout
from sipp.report.series import rows_of_layers
from sipp.report.sheets import card_of, sentence, sheet_section
from sipp.report.summary import claim_of, lead, next_steps, outputs_rows, shown_output_change, tiles_of
from sipp.results import TextScores, to_json, words

# Keys of the report with sections of their own, and those without a meaning for readers
SECTIONS = {"layers", "bound", "guarantee", "measured", "repair", "choice", "certificate", "seen", "seen_all"}


def pruned_article(pruned: PrunedModel, ident: str) -> Article:
    """The article on one pruned network."""
    facts = pruned.pruned
    sections = [
        _measured_section(pruned, ident),
        _outputs_section(pruned, ident),
        _layers_section(pruned, ident),
        None if pruned.bench is None else sheet_section("Size and speed", pruned.bench.sheet, f"{ident}-speed"),
        None if facts.repair is None else sheet_section("Repair", facts.repair.sheet, f"{ident}-repair"),
        None if facts.choice is None else sheet_section("Method", facts.choice.sheet, f"{ident}-blend"),
        _statements_section(pruned, ident),
    ]
    values = {**to_json(pruned.identity), **to_json(facts), **pruned.rest}
    rest = {key: value for key, value in values.items() if key not in SECTIONS}
    return Article(
        ident=ident,
        topic=f"pruned model, {pruned.arm}",
        title=f"{pruned.name}: {number(facts.keep, 'share')} of the weights",
        notes=pruned.notes,
        lead=lead(pruned),
        steps=next_steps(pruned),
        tiles=tiles_of(pruned),
        sections=[section for section in sections if section is not None],
        tables=[("As printed", list(facts.sheet.facts)), ("Everything else in its report", key_value_rows(rest))],
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
    layers = pruned.pruned.layers
    views = {field: layer_view(field, {THIS: rows_of_layers([layers])}) for field in LAYER_VALUES}
    known = {field: view for field, view in views.items() if view["series"]}
    choices = [{"label": "Show", "options": [LAYER_VALUES[field][0] for field in known]}]
    names = [layer.name for layer in layers]
    plot = bars(f"{ident}-layers", "Layer by layer", "layer", names, list(known.values()), choices=choices)
    dead = [layer.dead_rows for layer in layers if layer.dead_rows]
    least = min(layers, key=lambda layer: layer.kept / max(1, layer.n_weights))
    heading = f"{least.name} keeps the smallest share: {least.kept:,} of {least.n_weights:,} weights"
    rows, where = words.counted(sum(dead), "row"), words.counted(len(dead), "layer")
    lost = f"{rows} in {where} lost all weights and output only a bias."
    none_lost = "No row lost all its weights."
    return Section("Layers", Finding(heading, lost if dead else none_lost), [[plot]])


# --- guarantees -----------------------------------------------------------------------------------------------------


def _statements_section(pruned: PrunedModel, ident: str) -> Section:
    cards = statement_cards(pruned.pruned, pruned.identity.certificate)
    cards[1:1] = [certificate_card(certificate, name) for name, certificate in pruned.certificates.items()]
    if pruned.identity.certificate is None and pruned.certificates:
        cards = cards[1:]
    finding = Finding(
        "What is guaranteed, and with what confidence",
        "All statements compare the pruned network as it was saved with the one it was pruned from. "
        + shared_holdout([pruned]),
    )
    return Section("Statements", finding, [[cards_plot(f"{ident}-statements", "What is guaranteed", cards)]])


# --- accuracy, from `sipp eval --out` -------------------------------------------------------------------------------


def _measured_section(model: PrunedModel, ident: str) -> Section | None:
    """Accuracy or perplexity and output error compared with the dense network, one card per evaluation."""
    first = model.evaluation or model.text_scores
    if first is None:
        return None
    claim = "sipp certify --accuracy bounds the loss on new inputs"
    if model.certified_drop is not None:
        claim = claim_of(model.certified_drop)
    finding = Finding(sentence(first.sheet.title), f"Measured on {first.inputs}. {claim}.")
    ordered = sorted(model.evaluations.items(), key=lambda item: item[1] is not first)
    cards = [card_of(one.sheet, f"Measured ({name})", f"{one.sheet.title}, on {one.inputs}.") for name, one in ordered]
    topic, title = "Accuracy", "Accuracy, loss and output"
    if isinstance(first, TextScores):
        topic, title = "Perplexity", "Perplexity and distance from the dense network"
    return Section(topic, finding, [[cards_plot(f"{ident}-evaluations", title, cards)]])
