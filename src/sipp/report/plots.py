"""A run in, its plots out as plain values: what the page's script draws, tabulates and saves.

A plot has `choices` (what a reader may pick) and `views` nested in that order; a view holds the series to draw. All
numbers are full values: shares in [0, 1], seconds, counts; the script adds units.
"""

from __future__ import annotations

from typing import Any

from sipp.report import series
from sipp.report.read import PrunedModel, Run
from sipp.report.series import METRICS, Curve, Histogram
from sipp.report.words import number, up
from sipp.storage.network_schemas import BoundRecord, CertificateRecord, NetworkRecord
from sipp.storage.run_schemas import plain

MAX_HISTOGRAMS = 15_000  # beyond: only the histogram of all layers together, or the page grows too large
DIGITS = 10  # significant, of a number in the page: more than any of them was measured with
LAYER_DIGITS = 5

Plot = dict[str, Any]

KEEP_AXIS = {"label": "keep (share of prunable weights)", "unit": "share", "kind": "number"}
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
        "pruned": _one_metric(run, "before_top1", "Just pruned"),
        "retrained": _one_metric(run, "top1", "Retrained"),
        "accuracy": _accuracy_plot(run),
        "certified": _epsilon_plot(series.certified_curves(run), "certified epsilon (holdout)"),
        "theory": _epsilon_plot(series.theory_curves(run), "epsilon of the theory"),
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


def _series(curves: tuple[Curve, ...]) -> list[dict[str, Any]]:
    return [{"name": curve.method, "points": _points(curve)} for curve in curves]


def _accuracy_plot(run: Run) -> Plot:
    views, labels = [], []
    for key in series.metrics_of(run):
        curves = series.curves(run, key)
        if not curves:
            continue
        metric, dense = METRICS[key], series.dense_point(run, key)
        view: dict[str, Any] = {"y": {"label": metric.label, "unit": metric.unit}, "series": _series(curves)}
        if dense is not None:
            view["reference"] = {"label": "dense", "value": _rounded(dense.mean)}
        views.append(view)
        labels.append(metric.label)
    title = "Accuracy against keep"
    return {
        "kind": "lines",
        "title": title,
        "x": KEEP_AXIS,
        "choices": [{"label": "Show", "options": labels}],
        "views": views,
    }


def _one_metric(run: Run, key: str, title: str) -> Plot:
    """One metric against keep, without a choice; nothing where the run does not know it."""
    curves, dense = series.curves(run, key), series.dense_point(run, "top1")
    if not curves:
        return {}
    view: dict[str, Any] = {"y": {"label": "top-1 accuracy", "unit": "share"}, "series": _series(curves)}
    if dense is not None:
        view["reference"] = {"label": "dense", "value": _rounded(dense.mean)}
    return {"kind": "lines", "title": title, "x": KEEP_AXIS, "choices": [], "views": view}


def _epsilon_plot(curves: tuple[Curve, ...], label: str) -> Plot:
    if not curves:
        return {}
    view = {"y": {"label": label, "unit": "number", "log": True}, "series": _series(curves)}
    return {"kind": "lines", "title": label, "x": KEEP_AXIS, "choices": [], "views": view}


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
    return statement_cards(record.certificate, record.bound, record.guarantee, contradicted=contradicted)


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
        names = ("verdict", "epsilon", "delta", "confidence", "n", "violations", "k_allowed", "drop_upper")
        values = plain(certificate)
        known = {name: values[name] for name in names if values.get(name) is not None}
        rows = [[name, up(value) if _is_limit(name, value) else _fact(value)] for name, value in known.items()]
        cards.append({"title": "Certificate (holdout)", "text": certificate.sentence, "rows": rows})
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
    cards.append({"title": title, "text": text, "rows": rows})
    return cards


def _is_limit(name: str, value: Any) -> bool:
    return name in ("epsilon", "drop_upper") and isinstance(value, float)


def _fact(value: Any) -> str:
    return number(value) if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _layers_plot(run: Run) -> Plot:
    names = series.layers_of(run)
    if not names:
        return {}
    n_all = sum(names.values())
    dense = [[index, _rounded(size / n_all, LAYER_DIGITS)] for index, size in enumerate(names.values())]
    tables = {
        (method, level): series.layer_rows(run, method, level)
        for method in series.methods_of(run)
        for level in series.levels_of(run)
    }
    views, labels = [], []
    for field, (label, unit) in LAYER_VALUES.items():
        by_level = []
        for level in series.levels_of(run):
            lines = []
            for method in series.methods_of(run):
                values = [getattr(row, field) for row in tables[method, level]]
                points = [[i, _rounded(v, LAYER_DIGITS)] for i, v in enumerate(values) if v is not None]
                if points:
                    lines.append({"name": method, "points": points})
            if field == "share":
                lines.append({"name": "dense network", "points": dense})
            y = {"label": label, "unit": unit, "log": field == "eps", "zero": True}
            by_level.append({"y": y, "series": lines})
        views.append(by_level)
        labels.append(label)
    choices = [{"label": "Show", "options": labels}, _level_choice(run)]
    x = {"label": "layer, from input to output", "kind": "names", "names": list(names)}
    return {"kind": "lines", "title": "Layer by layer", "x": x, "choices": choices, "views": views}


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
        points = [[i, _rounded(v, LAYER_DIGITS)] for i, v in enumerate(columns[field]) if v is not None]
        if points:
            y = {"label": label, "unit": unit, "log": field == "eps", "zero": True}
            views.append({"y": y, "series": [{"name": record.method, "points": points}]})
            labels.append(label)
    x = {"label": "layer", "kind": "names", "names": [layer.name for layer in record.layers]}
    choices = [{"label": "Show", "options": labels}]
    layers: Plot = {"kind": "lines", "title": "Layer by layer", "x": x, "choices": choices, "views": views}
    cards = statement_cards(
        record.certificate,
        record.bound,
        record.guarantee,
        contradicted=record.conditions is not None and record.conditions.contradicted,
        measured=None if record.measured is None else record.measured.words,
    )
    for one in pruned.certificates:
        cards = statement_cards(one, None, None, contradicted=False)[:1] + cards
    statements: Plot = {"kind": "facts", "title": "What is promised", "choices": [], "views": cards}
    found = {"layers": layers if record.layers else {}, "statements": statements}
    return {key: {"id": f"{ident}-{key}", **plot} for key, plot in found.items() if plot}
