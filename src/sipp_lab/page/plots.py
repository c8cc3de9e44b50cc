"""Builds the plots of a run as plain values for the page's script."""

from __future__ import annotations

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
