"""Builds plots as plain values for the page's script: curves over keep, bars, and cards of facts.

A plot has `choices` (menus for the reader) and `views` nested in that order; a view holds the series to draw. Numbers
are raw: shares in [0, 1], seconds, counts; the script adds units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from sipp.report.contents import Finding, PageCell, PageTable, Plot, Section
from sipp.report.numbers import Unit
from sipp.report.palette import THIS
from sipp.results import AnyCertificate, Certificate, Entry, Pruned, PrunedLayer, Sheet, Table, words

View = dict[str, Any]
KEPT, EPSILON, DEAD, SHARE = "kept share of the layer", "epsilon of the layer", "dead rows", "share of the whole budget"
CERTIFIED = {"output": "output", "kl": "next token's distribution", "next-token": "next token"}  # by measure
LAYER_UNITS: dict[str, Unit] = {KEPT: "share", EPSILON: "number", DEAD: "count", SHARE: "share"}


class Point(NamedTuple):
    """One keep of one method: mean, smallest and largest of n values."""

    keep: float
    mean: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, keep: float, values: Sequence[float]) -> Point:
        """The point that summarises these values."""
        return cls(keep, fmean(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Curve:
    """The points of one method, from the largest keep to the smallest."""

    method: str
    points: tuple[Point, ...]


# --- one plot of each kind ------------------------------------------------------------------------------------------


def lines(ident: str, title: str, views: Any, *, of: str = "seed", choices: Sequence[Any] = ()) -> Plot:
    """A plot of curves over keep; each point summarises several seeds (or whatever `of` says)."""
    x = {"label": "keep (share of prunable weights)", "unit": "share"}
    return {"id": ident, "kind": "lines", "title": title, "x": x, "of": of, "choices": list(choices), "views": views}


def bars(ident: str, title: str, label: str, names: Sequence[str], views: Any, *, choices: Sequence[Any] = ()) -> Plot:
    """A bar chart with one bar per name (of a layer, or whatever `label` says)."""
    return {
        "id": ident, "kind": "bars", "title": title, "label": label, "names": list(names), "choices": list(choices),
        "views": views,
    }  # fmt: skip


def cards(ident: str, title: str, views: Any) -> Plot:
    """Cards with a title, a sentence, and rows of name and value."""
    return {"id": ident, "kind": "cards", "title": title, "choices": [], "views": views}


def curve_view(
    curves: Iterable[Curve], label: str, unit: Unit, *, are_errors: bool = False, dense: float | None = None
) -> View:
    """A view of curves; errors near the output's norm are marked, and `dense` is drawn as a reference line."""
    shown = [{"name": curve.method, "points": curve.points} for curve in curves]
    view: View = {"y": {"label": label, "unit": unit, "log": are_errors}, "series": shown}
    if are_errors:
        view["useless"] = Certificate.USELESS
    if dense is not None:
        view["reference"] = {"label": "dense", "value": dense}
    return view


def bar_view(label: str, unit: Unit, columns: Mapping[str, Sequence[float | None]], *, log: bool = False) -> View:
    """A view of bars: {name of a column: its values}."""
    shown = [{"name": name, "values": list(values)} for name, values in columns.items()]
    return {"y": {"label": label, "unit": unit, "log": log}, "series": shown}


def layer_views(networks: Mapping[str, Sequence[Sequence[PrunedLayer]]]) -> dict[str, View]:
    """The share that each layer keeps, by what is shown: {method: the layers of its networks, one for each seed}.

    Means over seeds; of epsilon the largest, which bounds all.
    """
    shown: dict[str, dict[str, list[float | None]]] = {label: {} for label in LAYER_UNITS}
    for method, seeds in networks.items():
        totals = [sum(layer.kept for layer in layers) or 1 for layers in seeds]
        columns: dict[str, list[float | None]] = {label: [] for label in LAYER_UNITS}
        for same in zip(*seeds):
            eps = [layer.eps for layer in same if layer.eps is not None and math.isfinite(layer.eps)]
            columns[KEPT].append(fmean(layer.kept / (layer.n_weights or 1) for layer in same))
            columns[EPSILON].append(max(eps) if len(eps) == len(same) else None)
            columns[DEAD].append(fmean(layer.dead_rows for layer in same))
            columns[SHARE].append(fmean(layer.kept / total for layer, total in zip(same, totals)))
        for label, values in columns.items():
            if any(value is not None for value in values):
                shown[label][method] = values
    return {label: bar_view(label, LAYER_UNITS[label], shown[label], log=label == EPSILON) for label in shown}


# --- cards of facts -------------------------------------------------------------------------------------------------


def statement_cards(
    pruned: Pruned, certificate: AnyCertificate | None, why_no_certificate: str = ""
) -> list[dict[str, Any]]:
    """Cards for the certificate and the theory's bounds; useless ones are folded."""
    if certificate is None:
        text = why_no_certificate or "None: there was no holdout."
        made: list[dict[str, Any]] = [{"title": "Certificate", "text": text, "rows": []}]
    else:
        made = [certificate_card(certificate)]
    for one in pruned.statements:
        folded = "" if one.is_useful else "useless here"
        made.append(
            {"title": f"Theory, {one.label}", "text": words.sentence(one.sentence), "rows": [], "folded": folded}
        )
    return made


def certificate_card(certificate: AnyCertificate, source: str = "") -> dict[str, Any]:
    """A card for a certificate, named by what it is about, and marked if it is useless."""
    claim, *rows = map(list, certificate.sheet.facts)
    useless = isinstance(certificate, Certificate) and certificate.is_useless
    about = CERTIFIED[certificate.measure] if isinstance(certificate, Certificate) else "accuracy"
    title = f"{'Useless certificate' if useless else 'Certificate'} of the {about}{source}"
    return {"title": title, "text": claim[1], "rows": rows, "useless": useless}


def card_of(sheet: Sheet, title: str, text: str = "") -> dict[str, Any]:
    """A card with the facts of a sheet."""
    return {"title": title, "text": text, "rows": [list(fact) for fact in sheet.facts]}


# --- a sheet as a section -------------------------------------------------------------------------------------------


def sheet_section(topic: str, sheet: Sheet, ident: str) -> Section:
    """A sheet on the page: its title as the finding, its facts as a card, its tables as bars or as a table."""
    heading, _, detail = sheet.title.partition("; ")
    drawn = [table for table in sheet.tables if table.bars and len(table.rows) > 1]
    rows = [[cards(f"{ident}-facts", topic, [card_of(sheet, topic)])]] if sheet.facts else []
    rows += [[_drawn(table, f"{ident}-table{index}", topic)] for index, table in enumerate(drawn)]
    listed = next((_listed(table) for table in sheet.tables if table not in drawn), None)
    note = " ".join([f"{table.words}." for table in drawn if table.words] + ([sheet.note] if sheet.note else []))
    return Section(topic, Finding(words.sentence(heading), detail), rows, listed, note=note)


def _drawn(table: Table, ident: str, title: str) -> Plot:
    """Bars for the columns that have some side by side, and for each other column of numbers; the reader chooses."""
    label, *others = table.columns
    groups = [table.bars, *([name] for name in others if name not in (*table.bars, *table.texts))]
    views = {}
    for group in groups:
        series = {name if len(group) > 1 else THIS: list(map(_finite, table.column(name))) for name in group}
        if any(value is not None for values in series.values() for value in values):
            unit: Unit = "share" if table.is_share(group[0]) else "number"
            views[", ".join(group)] = bar_view(", ".join(group), unit, series)
    choices, names = [{"label": "Show", "options": list(views)}], list(map(str, table.column(label)))
    return bars(ident, f"{title}: {label} by {label}", label, names, list(views.values()), choices=choices)


def _finite(entry: Entry) -> float | None:
    return entry if isinstance(entry, int | float) and math.isfinite(entry) else None


def _listed(table: Table) -> PageTable:
    rows = tuple((name, tuple(map(PageCell, texts))) for name, *texts in map(table.written, table.rows))
    return PageTable(table.words, table.columns, rows, wraps=True)
