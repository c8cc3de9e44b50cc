"""Builds the plots of a run as plain values for the page's script."""

from __future__ import annotations

from math import fsum
from typing import Any

from sipp.report import numbers, plots
from sipp_lab.page import series
from sipp_lab.page.series import METRICS
from sipp_lab.runs.folder import Run

Plot = dict[str, Any]  # plain values for the page's script


def metric_view(run: Run, key: str) -> dict[str, Any]:
    """A metric against keep, one curve per method."""
    metric, dense = METRICS[key], series.dense_mean(run, key)
    return plots.curve_view(series.metric_curves(run, key), metric.label, metric.unit, dense=dense)


def metric_views(run: Run) -> dict[str, dict[str, Any]]:
    """The views of all metrics that the run has curves for, by key."""
    views = {key: metric_view(run, key) for key in series.metrics_of(run)}
    return {key: view for key, view in views.items() if view["series"]}


def accuracy_plot(run: Run, ident: str, title: str = "Accuracy against keep") -> Plot:
    """A plot of all metrics, starting with the change in accuracy; empty if no pruned network is finished."""
    views = metric_views(run)
    if not views:
        return {}
    start = list(views).index("delta_top1") if "delta_top1" in views else 0
    choice = {"label": "Show", "options": [METRICS[key].label for key in views], "start": start}
    return plots.lines(ident, title, list(views.values()), choices=[choice])


def side_by_side(run: Run, ident: str) -> list[Plot]:
    """Accuracy just after pruning and after retraining, on the same scale."""
    known = {"pruned": ("Just pruned", "before_top1"), "retrained": ("Retrained", "top1")}
    panels = [(name, title, series.metric_curves(run, key)) for name, (title, key) in known.items()]
    points = [point for _, _, curves in panels for curve in curves for point in curve.points]
    drawn: list[Plot] = []
    for name, title, curves in panels:
        if curves:
            view = plots.curve_view(curves, "top-1 accuracy", "share", dense=series.dense_mean(run, "top1"))
            view["span"] = [min(point.low for point in points), max(point.high for point in points)]
            drawn.append(plots.lines(f"{ident}-{name}", title, view))
    return drawn


def certified_plot(run: Run, ident: str) -> Plot:
    """The certified epsilons against keep; empty if there are none."""
    view = plots.curve_view(series.certified_curves(run), "certified epsilon (holdout)", "share", are_errors=True)
    return plots.lines(ident, view["y"]["label"], view) if view["series"] else {}


def _level_choice(run: Run) -> dict[str, Any]:
    options = [f"keep {numbers.number(keep, 'share')} (level {level})" for level, keep in series.levels_of(run).items()]
    return {"label": "Level", "options": options, "start": len(options) - 1}


def layers_plot(run: Run, ident: str) -> Plot:
    sizes = series.layers_of(run)
    if not sizes:
        return {}
    n_all = sum(sizes.values())
    dense = {"name": "dense network", "values": [size / n_all for size in sizes.values()]}
    levels = [
        plots.layer_views({method: series.layers_at(run, method, level) for method in series.methods_of(run)})
        for level in series.levels_of(run)
    ]
    views = {label: [level[label] for level in levels] for label in plots.LAYER_UNITS}
    for view in views[plots.SHARE]:
        view["series"].append(dense)
    choices = [{"label": "Show", "options": list(views)}, _level_choice(run)]
    return plots.bars(ident, "Layer by layer", "layer", list(sizes), list(views.values()), choices=choices)


def times_plot(run: Run, ident: str) -> Plot:
    """The seconds of each method by part, summed over levels and seeds."""
    by_method = series.times(run)
    columns = {part: [parts[part] for parts in by_method.values()] for part in series.PARTS}
    used = {part: values for part, values in columns.items() if any(values)}
    if not used:
        return {}
    total = [fsum(parts.values()) for parts in by_method.values()]
    view = plots.bar_view("time, summed over levels and seeds", "seconds", {**used, "total": total})
    return plots.bars(ident, "Time by part", "method", list(by_method), view)
