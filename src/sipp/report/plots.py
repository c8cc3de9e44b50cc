"""A run in, its plots out as plain values: what the page's script draws, tabulates and saves.

A plot has `choices` (what a reader may pick) and `views` nested in that order; a view holds the series to draw. All
numbers are full values: shares in [0, 1], seconds, counts; the script adds units.
"""

from __future__ import annotations

from typing import Any

from sipp.records.display import percent_up
from sipp.records.schemas import BoundRecord, CertificateRecord, NetworkRecord, given_values
from sipp.report import series
from sipp.report.read import PrunedModel, Run
from sipp.report.series import METRICS, Curve, Histogram
from sipp.report.words import USELESS, is_useless, number, up

MAX_HISTOGRAMS = 15_000  # beyond: only the histogram of all layers together, or the page grows too large
DIGITS = 10  # significant, of a number in the page: more than any of them was measured with
LAYER_DIGITS = 5

Plot = dict[str, Any]

KEEP_AXIS = {"label": "keep (share of prunable weights)", "unit": "share"}
CHANGE = "delta_top1"  # of `METRICS`
CERTIFICATE_ROWS = {  # {key of its record: what it is called}
    "verdict": "verdict",
    "epsilon": "epsilon",
    "delta": "delta",
    "confidence": "confidence",
    "n": "points",
    "violations": "further off",
    "k_allowed": "allowed",
    "drop_upper": "largest drop",
}
LAYER_BARS = {"kind": "bars", "title": "Layer by layer", "label": "layer"}
LAYER_VALUES = {  # of `series.LayerRow`
    "keep": ("kept share of the layer", "share"),
    "eps": ("epsilon of the layer", "number"),
    "dead_rows": ("dead rows", "count"),
    "share": ("share of the whole budget", "share"),
}


def run_plots(run: Run, ident: str) -> dict[str, Plot]:
    """Every plot that this run has numbers for, by section."""
    if not series.methods_of(run):
        return {}
    found = {
        **_side_by_side(run),
        "accuracy": _accuracy_plot(run),
        "certified": _epsilon_plot(series.certified_curves(run), "certified epsilon (holdout)", "share"),
        "theory": _epsilon_plot(series.theory_curves(run), "epsilon of the theory", "number"),
        "statements": _statements(run),
        "layers": _layers_plot(run),
        "allocation": _allocation_plot(run),
        "scores": _scores_plot(run),
        "times": _times_plot(run),
    }
    return {key: {"id": f"{ident}-{key}", **plot} for key, plot in found.items() if plot}


def _rounded(value: float | None, digits: int = DIGITS) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _points(curve: Curve) -> list[list[float | None]]:
    return [[_rounded(v) for v in (p.keep, p.mean, p.low, p.high)] + [p.n] for p in curve.points]


def curve_series(curves: tuple[Curve, ...]) -> list[dict[str, Any]]:
    """The curves as the script draws them: [keep, mean, least, largest, how many]."""
    return [{"name": curve.method, "points": _points(curve)} for curve in curves]


def _accuracy_plot(run: Run) -> Plot:
    """Every metric of the run, the change of accuracy first: plain accuracy stands before it."""
    views: list[Any] = []
    labels, start = [], 0
    for key in series.metrics_of(run):
        curves = series.curves(run, key)
        if not curves:
            continue
        metric, dense = METRICS[key], series.dense_point(run, key)
        view: dict[str, Any] = {"y": {"label": metric.label, "unit": metric.unit}, "series": curve_series(curves)}
        if dense is not None:
            view["reference"] = {"label": "dense", "value": _rounded(dense.mean)}
        start = len(views) if key == CHANGE else start
        views.append(view)
        labels.append(metric.label)
    return {
        "kind": "lines",
        "title": "Accuracy against keep",
        "x": KEEP_AXIS,
        "of": "seed",
        "choices": [{"label": "Show", "options": labels, "start": start}],
        "views": views,
    }


def _side_by_side(run: Run) -> dict[str, Plot]:
    """Plain accuracy just pruned and retrained, on one scale; what the run does not know is left out."""
    dense = series.dense_point(run, "top1")
    known = {"pruned": ("Just pruned", "before_top1"), "retrained": ("Retrained", "top1")}
    found = {name: (title, curves) for name, (title, key) in known.items() if (curves := series.curves(run, key))}
    points = [point for _, curves in found.values() for curve in curves for point in curve.points]
    plots: dict[str, Plot] = {}
    for name, (title, curves) in found.items():
        view: dict[str, Any] = {
            "y": {"label": "top-1 accuracy", "unit": "share"},
            "series": curve_series(curves),
            "span": [_rounded(min(point.low for point in points)), _rounded(max(point.high for point in points))],
        }
        if dense is not None:
            view["reference"] = {"label": "dense", "value": _rounded(dense.mean)}
        plots[name] = {"kind": "lines", "title": title, "x": KEEP_AXIS, "of": "seed", "choices": [], "views": view}
    return plots


def _epsilon_plot(curves: tuple[Curve, ...], label: str, unit: series.Unit) -> Plot:
    if not curves:
        return {}
    view = {"y": {"label": label, "unit": unit, "log": True}, "series": curve_series(curves), "useless": USELESS}
    return {"kind": "lines", "title": label, "x": KEEP_AXIS, "of": "seed", "choices": [], "views": view}


def _level_choice(run: Run) -> dict[str, Any]:
    levels = series.levels_of(run)
    options = [f"{number(keep, 'share')} keep (level {level})" for level, keep in levels.items()]
    return {"label": "Level", "options": options, "start": len(options) - 1}


def _statements(run: Run) -> Plot:
    """Bound and certificate of every network, in words and numbers."""
    methods, levels, seeds = series.methods_of(run), series.levels_of(run), series.seeds_of(run)
    views = []
    for method in methods:
        by_level = []
        for level in levels:
            found = {record.seed: record for record in series.records_at(run, method, level)}
            by_level.append([_statement(found[seed]) if seed in found else None for seed in seeds])
        views.append(by_level)
    choices = [
        {"label": "Method", "options": list(methods)},
        {**_level_choice(run), "start": 0},
        {"label": "Seed", "options": [str(seed) for seed in seeds]},
    ]
    return {"kind": "facts", "title": "Statements about one network", "choices": choices, "views": views}


def _statement(record: NetworkRecord) -> list[dict[str, Any]]:
    contradicted = record.bound is not None and record.bound.contradicted
    cards = statement_cards(record.certificate, record.bound, record.guarantee, contradicted=contradicted)
    if record.choice is not None:
        cards.append({"title": "Blend that was taken", "text": f"{record.choice.words}.", "rows": []})
    return cards


def statement_cards(
    certificate: CertificateRecord | None,
    bound: BoundRecord | None,
    guarantee: str | None,
    *,
    contradicted: bool,
    measured: str | None = None,
) -> list[dict[str, Any]]:
    """The certificate and, beside it, the theory: a sentence each, and rows of name and value."""
    cards: list[dict[str, Any]] = []
    if certificate is None:
        cards.append({"title": "Certificate (holdout)", "text": "None: there was no holdout.", "rows": []})
    else:
        cards.append(certificate_card(certificate, "holdout"))
    if measured is not None:
        cards.append({"title": "Theory with a measured constant", "text": measured, "rows": []})
    title = "Theory with the assumed constant"
    if bound is None or bound.epsilon is None:
        reason = bound.reason if bound is not None and bound.reason else "no statement was made"
        cards.append({"title": title, "text": f"No bound: {reason}.", "rows": []})
        return cards
    text = f"The conditions are met: {bound.words}." if bound.words else "The conditions of the theorem are met."
    if not bound.holds:
        word = "Contradicted by the data" if contradicted else "Not met"
        text = f"{word}, so this epsilon is a number and not a promise: {bound.reason}."
    rows = [["epsilon", up(bound.epsilon)], ["met", "yes" if bound.holds else "no"]]
    if bound.delta is not None:
        rows.insert(1, ["delta", _fact(bound.delta)])
    if guarantee is not None:
        rows.append(["rows and layers", guarantee])
    cards.append({"title": title, "text": text, "rows": rows, "folded": "" if bound.holds else "not met"})
    return cards


def certificate_card(certificate: CertificateRecord, source: str) -> dict[str, Any]:
    """A certificate in its own words and numbers, marked where it says nothing."""
    values = given_values(certificate)
    known = {name: values[name] for name in CERTIFICATE_ROWS if values.get(name) is not None}
    rows = [
        [CERTIFICATE_ROWS[name], percent_up(value) if _is_limit(name, value) else _fact(value)]
        for name, value in known.items()
    ]
    limit = certificate.limit if certificate.drop_upper is None else certificate.drop_upper
    useless = limit is not None and is_useless(limit)
    title = f"{'Useless certificate' if useless else 'Certificate'} ({source})"
    return {"title": title, "text": certificate.sentence, "rows": rows, "useless": useless}


def _is_limit(name: str, value: Any) -> bool:
    return name in ("epsilon", "drop_upper") and isinstance(value, float)


def _fact(value: Any) -> str:
    return number(value) if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _layers_plot(run: Run) -> Plot:
    names = series.layers_of(run)
    if not names:
        return {}
    n_all = sum(names.values())
    dense = [_rounded(size / n_all, LAYER_DIGITS) for size in names.values()]
    tables = {
        (method, level): series.layer_rows(run, method, level)
        for method in series.methods_of(run)
        for level in series.levels_of(run)
    }
    views, labels = [], []
    for field, (label, unit) in LAYER_VALUES.items():
        by_level = []
        for level in series.levels_of(run):
            columns = []
            for method in series.methods_of(run):
                values = [_rounded(getattr(row, field), LAYER_DIGITS) for row in tables[method, level]]
                if any(value is not None for value in values):
                    columns.append({"name": method, "values": values})
            if field == "share":
                columns.append({"name": "dense network", "values": dense})
            by_level.append({"y": {"label": label, "unit": unit, "log": field == "eps"}, "series": columns})
        views.append(by_level)
        labels.append(label)
    choices = [{"label": "Show", "options": labels}, _level_choice(run)]
    return {**LAYER_BARS, "names": list(names), "choices": choices, "views": views}


def _allocation_plot(run: Run) -> Plot:
    """Kept share of each layer by level, against that of the network: where a method spends its budget."""
    names, levels = series.layers_of(run), series.levels_of(run)
    views = []
    for method in series.methods_of(run):
        columns = [
            [_rounded(row.keep, LAYER_DIGITS) for row in series.layer_rows(run, method, level)] for level in levels
        ]
        views.append({"columns": columns})
    if not names:
        return {}
    return {
        "kind": "heat",
        "title": "Where the budget goes",
        "rows": [f"{name} ({size:,})" for name, size in names.items()],
        "columns": [_rounded(keep, LAYER_DIGITS) for keep in levels.values()],
        "unit": "share",
        "choices": [{"label": "Method", "options": list(series.methods_of(run))}],
        "views": views,
    }


def _scores_plot(run: Run) -> Plot:
    """Histograms of scores with the part that was kept, of all layers and of each."""
    names, levels, methods = list(series.layers_of(run)), series.levels_of(run), series.methods_of(run)
    if run.bins is None:
        return {}
    each = len(names) * len(levels) * len(methods) <= MAX_HISTOGRAMS
    views = []
    for method in methods:
        by_level = []
        for level in levels:
            parts = series.histograms(run, method, level)
            shown = [series.added(parts), *(parts if each else ())] if parts else []
            by_level.append([_packed(one) for one in shown])
        views.append(by_level)
    choices = [
        {"label": "Method", "options": list(methods)},
        {**_level_choice(run), "start": 0},
        {"label": "Layer", "options": ["all layers", *(names if each else ())]},
    ]
    bins = [_rounded(run.bins.low + run.bins.width * i, LAYER_DIGITS) for i in range(run.bins.n + 1)]
    return {"kind": "histogram", "title": "Scores and what was kept", "bins": bins, "choices": choices, "views": views}


def _packed(one: Histogram) -> list[Any]:
    """[first bin, counts, kept, zeros], without the empty bins at both ends."""
    filled = [index for index, count in enumerate(one.counts) if count]
    if not filled:
        return [0, [], [], one.zero]
    part = slice(filled[0], filled[-1] + 1)
    return [filled[0], list(one.counts[part]), list(one.kept[part]), one.zero]


def _times_plot(run: Run) -> Plot:
    found = series.times(run)
    used = [part for part in series.PARTS if any(parts[part] > 0 for parts in found.values())]
    if not used:
        return {}
    stacks = [{"name": part, "values": [_rounded(parts[part]) for parts in found.values()]} for part in used]
    view = {"series": stacks}
    return {
        "kind": "stack",
        "title": "Time by part",
        "names": list(found),
        "unit": "seconds",
        "choices": [],
        "views": view,
    }


def pruned_plots(pruned: PrunedModel, ident: str) -> dict[str, Plot]:
    """The layers and statements of one pruned model."""
    record = pruned.record
    total = sum(layer.kept for layer in record.layers) or 1
    columns: dict[str, list[float | None]] = {
        "keep": [layer.kept / layer.n_weights if layer.n_weights else 0.0 for layer in record.layers],
        "eps": [layer.eps for layer in record.layers],
        "dead_rows": [float(layer.dead_rows) for layer in record.layers],
        "share": [layer.kept / total for layer in record.layers],
    }
    views, labels = [], []
    for field, (label, unit) in LAYER_VALUES.items():
        values = [_rounded(value, LAYER_DIGITS) for value in columns[field]]
        if any(value is not None for value in values):
            y = {"label": label, "unit": unit, "log": field == "eps"}
            views.append({"y": y, "series": [{"name": pruned.arm, "values": values}]})
            labels.append(label)
    names = [layer.name for layer in record.layers]
    layers = {**LAYER_BARS, "names": names, "choices": [{"label": "Show", "options": labels}], "views": views}
    cards = statement_cards(
        record.certificate,
        record.bound,
        record.guarantee,
        contradicted=record.conditions is not None and record.conditions.contradicted,
        measured=None if record.measured is None else record.measured.words,
    )
    cards[1:1] = [certificate_card(one, name) for name, one in pruned.certificates.items()]
    if record.certificate is None and pruned.certificates:
        cards = cards[1:]
    statements: Plot = {"kind": "facts", "title": "What is promised", "choices": [], "views": cards}
    found = {"layers": layers, "statements": statements}
    return {key: {"id": f"{ident}-{key}", **plot} for key, plot in found.items()}
