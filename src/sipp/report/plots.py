"""Builds the plots of a run as plain values for the page's script.

A plot has `choices` (menus for the reader) and `views` nested in that order; a view holds the series to draw. Numbers
are raw: shares in [0, 1], seconds, counts; the script adds units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from sipp.report import series
from sipp.report.contents import Plot
from sipp.report.numbers import Unit, number, rounded_up
from sipp.report.series import METRICS, Curve
from sipp.results.certificate import USELESS, AnyCertificate, Certificate
from sipp.results.pruned import PrunedFacts
from sipp.results.run_records import NetworkRecord
from sipp_lab.runs.reading import Run

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
        {"name": curve.method, "points": [[*map(_rounded, (p.keep, p.mean, p.low, p.high)), p.n] for p in curve.points]}
        for curve in curves
    ]
    view: dict[str, Any] = {"y": {"label": label, "unit": unit, "log": are_errors}, "series": shown}
    if are_errors:
        view["useless"] = USELESS
    if dense is not None:
        view["reference"] = {"label": "dense", "value": _rounded(dense)}
    return view


def bar_view(
    label: str, unit: Unit, columns: Mapping[str, Sequence[float | None]], *, log: bool = False
) -> dict[str, Any]:
    """A view of bars: {name of a column: its values}."""
    shown = [{"name": name, "values": list(values)} for name, values in columns.items()]
    return {"y": {"label": label, "unit": unit, "log": log}, "series": shown}


def _rounded(value: float | None, digits: int = DIGITS) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


# --- a run ----------------------------------------------------------------------------------------------------------


def metric_view(run: Run, key: str) -> dict[str, Any]:
    """A metric against keep, one curve per method."""
    metric, dense = METRICS[key], series.dense_mean(run, key)
    return curve_view(series.metric_curves(run, key), metric.label, metric.unit, dense=dense)


def metric_views(run: Run) -> dict[str, dict[str, Any]]:
    """The views of all metrics that the run has curves for, by key."""
    views = {key: metric_view(run, key) for key in series.metrics_of(run)}
    return {key: view for key, view in views.items() if view["series"]}


def epsilon_views(run: Run) -> dict[str, dict[str, Any]]:
    """The certified and theoretical epsilons against keep, if there are any."""
    certified, theory = series.certified_curves(run), series.theory_curves(run)
    views = {
        "certified": curve_view(certified, "certified epsilon (holdout)", "share", are_errors=True),
        "theory": curve_view(theory, "epsilon of the theory", "number", are_errors=True),
    }
    return {key: view for key, view in views.items() if view["series"]}


def accuracy_plot(run: Run, ident: str, title: str = "Accuracy against keep") -> Plot:
    """A plot of all metrics, starting with the change in accuracy; empty if no pruned network is finished."""
    views = metric_views(run)
    if not views:
        return {}
    start = list(views).index("delta_top1") if "delta_top1" in views else 0
    choice = {"label": "Show", "options": [METRICS[key].label for key in views], "start": start}
    return lines(ident, title, list(views.values()), choices=[choice])


def side_by_side(run: Run, ident: str) -> list[Plot]:
    """Accuracy just after pruning and after retraining, on the same scale."""
    known = {"pruned": ("Just pruned", "before_top1"), "retrained": ("Retrained", "top1")}
    panels = [(name, title, series.metric_curves(run, key)) for name, (title, key) in known.items()]
    points = [point for _, _, curves in panels for curve in curves for point in curve.points]
    plots = []
    for name, title, curves in panels:
        if curves:
            view = curve_view(curves, "top-1 accuracy", "share", dense=series.dense_mean(run, "top1"))
            view["span"] = [_rounded(min(point.low for point in points)), _rounded(max(point.high for point in points))]
            plots.append(lines(f"{ident}-{name}", title, view))
    return plots


def epsilon_plots(run: Run, ident: str) -> dict[str, Plot]:
    """The plots of `epsilon_views`."""
    return {key: lines(f"{ident}-{key}", view["y"]["label"], view) for key, view in epsilon_views(run).items()}


def _level_choice(run: Run, *, starts_last: bool = False) -> dict[str, Any]:
    options = [f"keep {number(keep, 'share')} (level {level})" for level, keep in series.levels_of(run).items()]
    return {"label": "Level", "options": options, "start": len(options) - 1 if starts_last else 0}


def statements_plot(run: Run, ident: str) -> Plot:
    """The bound and the certificate of every network, in words and numbers."""
    seeds = series.seeds_of(run)
    views = []
    for method in series.methods_of(run):
        by_level = []
        for level in series.levels_of(run):
            by_seed = {record.seed: record for record in series.records_at(run, method, level)}
            by_level.append([_network_cards(by_seed[seed]) if seed in by_seed else None for seed in seeds])
        views.append(by_level)
    seed_choice = {"label": "Seed", "options": [str(seed) for seed in seeds]}
    method_choice = {"label": "Method", "options": list(series.methods_of(run))}
    choices = [method_choice, _level_choice(run), seed_choice]
    return cards_plot(ident, "Statements about one network", views, choices=choices)


def _network_cards(record: NetworkRecord) -> list[dict[str, Any]]:
    if record.pruned is None:
        return []
    cards = statement_cards(record.pruned, record.certificate, record.why_no_certificate)
    if record.pruned.choice is not None:
        cards.append({"title": "Chosen blend", "text": f"{record.pruned.choice.sentence}.", "rows": []})
    return cards


def statement_cards(
    pruned: PrunedFacts, certificate: AnyCertificate | None, why_no_certificate: str = ""
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


def layer_view(field: str, rows: Mapping[str, Sequence[series.LayerRow]]) -> dict[str, Any]:
    """A view of one value of every layer, for the methods that have it."""
    values = {name: [_rounded(getattr(row, field), LAYER_DIGITS) for row in layers] for name, layers in rows.items()}
    known = {name: column for name, column in values.items() if any(value is not None for value in column)}
    return bar_view(*LAYER_VALUES[field], known, log=field == "eps")


def layers_plot(run: Run, ident: str) -> Plot:
    sizes = series.layers_of(run)
    if not sizes:
        return {}
    n_all = sum(sizes.values())
    dense = {"name": "dense network", "values": [_rounded(size / n_all, LAYER_DIGITS) for size in sizes.values()]}
    levels = [
        {method: series.layer_rows(run, method, level) for method in series.methods_of(run)}
        for level in series.levels_of(run)
    ]
    views = {field: [layer_view(field, rows) for rows in levels] for field in LAYER_VALUES}
    for view in views["share"]:
        view["series"].append(dense)
    labels = [label for label, _ in LAYER_VALUES.values()]
    choices = [{"label": "Show", "options": labels}, _level_choice(run, starts_last=True)]
    return bars(ident, "Layer by layer", "layer", list(sizes), list(views.values()), choices=choices)


def times_plot(run: Run, ident: str) -> Plot:
    """The seconds of each method by part, summed over levels and seeds."""
    by_method = series.times(run)
    columns = {part: [_rounded(parts[part]) for parts in by_method.values()] for part in series.PARTS}
    used = {part: values for part, values in columns.items() if any(values)}
    if not used:
        return {}
    total = [_rounded(fsum(parts.values())) for parts in by_method.values()]
    view = bar_view("time, summed over levels and seeds", "seconds", {**used, "total": total})
    return bars(ident, "Time by part", "method", list(by_method), view)
