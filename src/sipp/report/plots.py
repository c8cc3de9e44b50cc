"""Builds plots as plain values for the page's script.

A plot has `choices` (menus for the reader) and `views` nested in that order; a view holds the series to draw. Numbers
are raw: shares in [0, 1], seconds, counts; the script adds units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sipp.report.contents import Plot
from sipp.report.numbers import Unit, number, rounded_up
from sipp.report.series import Curve, LayerRow
from sipp.results import USELESS, AnyCertificate, Certificate, Pruned

DIGITS = 10  # significant digits of numbers on the page, more than any measurement has
LAYER_DIGITS = 5

LAYER_VALUES: dict[str, tuple[str, Unit]] = {  # {field of `series.LayerRow`: label and unit}
    "keep": ("kept share of the layer", "share"),
    "eps": ("epsilon of the layer", "number"),
    "dead_rows": ("dead rows", "count"),
    "share": ("share of the whole budget", "share"),
}


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


def cards_plot(ident: str, title: str, cards: Any, *, choices: Sequence[Any] = ()) -> Plot:
    """Cards with a title, a sentence, and rows of name and value."""
    return {"id": ident, "kind": "cards", "title": title, "choices": list(choices), "views": cards}


def curve_view(
    curves: Sequence[Curve], label: str, unit: Unit, *, are_errors: bool = False, dense: float | None = None
) -> dict[str, Any]:
    """A view of curves with points [keep, mean, smallest, largest, count]; errors near the output's norm are marked.

    `dense` is drawn as a reference line.
    """
    shown = [
        {"name": curve.method, "points": [[*map(rounded, (p.keep, p.mean, p.low, p.high)), p.n] for p in curve.points]}
        for curve in curves
    ]
    view: dict[str, Any] = {"y": {"label": label, "unit": unit, "log": are_errors}, "series": shown}
    if are_errors:
        view["useless"] = USELESS
    if dense is not None:
        view["reference"] = {"label": "dense", "value": rounded(dense)}
    return view


def bar_view(
    label: str, unit: Unit, columns: Mapping[str, Sequence[float | None]], *, log: bool = False
) -> dict[str, Any]:
    """A view of bars: {name of a column: its values}."""
    shown = [{"name": name, "values": list(values)} for name, values in columns.items()]
    return {"y": {"label": label, "unit": unit, "log": log}, "series": shown}


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """The number with as many digits as the page needs."""
    return None if value is None else float(f"{value:.{digits}g}")


def statement_cards(
    pruned: Pruned, certificate: AnyCertificate | None, why_no_certificate: str = ""
) -> list[dict[str, Any]]:
    """Cards for the certificate and the theory's bounds: a sentence each, and rows of values."""
    bound, guarantee = pruned.bound, pruned.guarantee
    if certificate is None:
        text = why_no_certificate or "None: there was no holdout."
        cards: list[dict[str, Any]] = [{"title": "Certificate (holdout)", "text": text, "rows": []}]
    else:
        cards = [certificate_card(certificate, "holdout")]
    if pruned.measured is not None:
        text = pruned.measured.sentence
        cards.append({"title": "Theory with a measured constant", "text": text, "rows": []})
    title = "Theory with the assumed constant"
    if bound.epsilon is None:
        return [*cards, {"title": title, "text": f"No bound: {bound.reason or 'no statement was made'}.", "rows": []}]
    text = f"The conditions are met: {bound.sentence}."
    if not bound.holds:
        word = "Contradicted by the data" if guarantee is not None and guarantee.contradicted else "Not met"
        reason = bound.reason or "epsilon is infinite"
        text = f"{word}, so this epsilon is a number, not a guarantee: {reason}."
    rows = [["epsilon", rounded_up(bound.epsilon)], ["met", "yes" if bound.holds else "no"]]
    if bound.delta is not None:
        rows.insert(1, ["delta", number(bound.delta)])
    if guarantee is not None:
        rows.append(["rows and layers", guarantee.sentence])
    return [*cards, {"title": title, "text": text, "rows": rows, "folded": "" if bound.holds else "not met"}]


def certificate_card(certificate: AnyCertificate, source: str) -> dict[str, Any]:
    """A card for a certificate, marked if it is useless."""
    claim, *rows = map(list, certificate.sheet.facts)
    useless = isinstance(certificate, Certificate) and certificate.is_useless
    title = f"{'Useless certificate' if useless else 'Certificate'} ({source})"
    return {"title": title, "text": claim[1], "rows": rows, "useless": useless}


def layer_view(field: str, rows: Mapping[str, Sequence[LayerRow]]) -> dict[str, Any]:
    """A view of one value of every layer, for the methods that have it."""
    values = {name: [rounded(getattr(row, field), LAYER_DIGITS) for row in layers] for name, layers in rows.items()}
    known = {name: column for name, column in values.items() if any(value is not None for value in column)}
    return bar_view(*LAYER_VALUES[field], known, log=field == "eps")
