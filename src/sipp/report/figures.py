"""Runs in, figures of print quality out: the numbers and the looks of the page, as PDF and PNG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

from sipp.extras import needed_for
from sipp.report import palette, series
from sipp.report.layer_figures import draw_layers
from sipp.report.networks import (
    ACCURACY,
    CERTIFIED,
    MOVED,
    accuracy_of,
    by_parent,
    certified,
    dense_accuracy,
    moved,
    network_curves,
)
from sipp.report.panels import Panel, panels_of
from sipp.report.read import PrunedModel, Result, Run
from sipp.report.series import METRICS, Curve
from sipp.scoring.methods import Style
from sipp.storage.files import make_folder, write_atomic
from sipp.storage.outputs import FIGURE_MARK

FORMATS = ("pdf", "png")
DPI = 300  # of the PNG
COLUMN = 3.35  # inches: one column of a two-column page
WIDE = 6.9  # both columns
HEIGHT = 2.5
PANEL_HEIGHT = 2.7
PANELS = "panels"  # name of the figure of all runs
LOG_RATIO = 8.0  # of the largest to the least keep, from which on the keep axis is logarithmic; as on the page
MOST_NAMES = 5  # of lines in a legend inside the axes
LABEL_LENGTH = 28  # of a line of an axis label
NEAR_ZERO = 0.5  # percentage points: linear below, logarithmic above; as on the page
STEEP = 10.0  # percentage points of loss from which on the axis of changes is logarithmic away from zero
EPSILON_RATIO = 12.0  # from which on an axis of epsilon is logarithmic
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "up": "^", "down": "v", "plus": "P", "cross": "X"}
PRINT_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.7,
    "pdf.fonttype": 42,  # text stays text
    "figure.constrained_layout.use": True,
}

Draw = Callable[[Any, Run], bool]  # of a figure and a run: whether there was anything to draw


def write_figures(results: Sequence[Result], folder: Path) -> list[Path]:
    """The files written: for every run, each figure it has numbers for, in each format.

    Several runs also have one figure together, with a panel for each network. Pruned models have figures only together:
    those of one dense network as curves over keep.
    """
    with needed_for("drawing figures"):
        import matplotlib
        from matplotlib.figure import Figure  # without pyplot: no window system, no choice of backend for the caller

    make_folder(folder)
    written = []
    for run, stem in _stems(results):
        for name, (width, draw) in _figures(run).items():
            with matplotlib.rc_context(PRINT_STYLE):
                figure = Figure(figsize=(width, HEIGHT))
                if draw(figure, run):
                    figure.draw_without_rendering()
                    figure.set_layout_engine("none")  # laid out once for both formats
                    written += [_save(figure, folder, f"{stem}-{name}", kind) for kind in FORMATS]
    for name, drawn in _network_figures(results).items():
        with matplotlib.rc_context(PRINT_STYLE):
            figure = Figure(figsize=(COLUMN, HEIGHT))
            drawn(figure.subplots())
            written += [_save(figure, folder, name, kind) for kind in FORMATS]
    shown = _panels(results)
    if shown:
        with matplotlib.rc_context(PRINT_STYLE):
            n_rows = math.ceil(len(shown) / 2)
            figure = Figure(figsize=(WIDE, n_rows * PANEL_HEIGHT))
            for axes, panel in zip(
                figure.subplots(n_rows, 2, squeeze=False).flat, [*shown, *[None] * (len(shown) % 2)]
            ):
                if panel is None or not _metric_drawer(series.default_metric(panel.run))(axes, panel.run):
                    axes.set_axis_off()
                else:
                    axes.set_title(_literal(panel.title), fontsize=7, wrap=True)
            written += [_save(figure, folder, PANELS, kind) for kind in FORMATS]
    return written


def _panels(results: Sequence[Result]) -> list[Panel]:
    """The panels of all runs together; none where there is only one run."""
    runs = [result for result in results if isinstance(result, Run)]
    found = panels_of(runs) if len(runs) > 1 else []
    return [panel for panel in found if series.methods_of(panel.run)]


def figure_names(results: Sequence[Result]) -> list[str]:
    """The names of all files that `write_figures` may write for these results."""
    names = [f"{stem}-{name}" for run, stem in _stems(results) for name in _figures(run)]
    names += [*_network_figures(results), *([PANELS] if _panels(results) else [])]
    return [_file_name(name, kind) for name in names for kind in FORMATS]


def _network_figures(results: Sequence[Result]) -> dict[str, Callable[[Any], None]]:
    """{name: what draws it} of pruned networks that share their dense one."""
    models = [result for result in results if isinstance(result, PrunedModel)]
    groups = [group for group in by_parent(models) if len(group) > 1]
    found: dict[str, Callable[[Any], None]] = {}
    for index, group in enumerate(groups):
        stem = "networks" if index == 0 else f"networks-{index + 1}"
        for name, label, value in (
            ("accuracy", ACCURACY, accuracy_of(group)),
            ("moved", MOVED, moved),
            ("certified", CERTIFIED, certified),
        ):
            if curves := network_curves(group, value):
                dense = dense_accuracy(group) if name == "accuracy" else None
                found[f"{stem}-{name}"] = partial(_network_curves, label=label, curves=curves, dense=dense)
    return found


def _network_curves(axes: Any, *, label: str, curves: tuple[Curve, ...], dense: float | None) -> None:
    """Accuracies beside the dense one's, or errors from zero, on a logarithmic axis where they are steep."""
    _curves(axes, tuple(curve.method for curve in curves), curves, 100.0)
    values = [point.mean for curve in curves for point in curve.points]
    if label == ACCURACY:
        _dense_line(axes, dense)
    elif min(values) > 0 and max(values) / min(values) > EPSILON_RATIO:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(fill(f"{label} (%)", LABEL_LENGTH))


def _dense_line(axes: Any, dense: float | None) -> None:
    if dense is not None:
        drawn_as = {"color": "#555555", "linewidth": 0.8, "linestyle": (0, (4, 3))}
        axes.axhline(100 * dense, zorder=1, label="dense", **drawn_as)
        _legend(axes)


def _stems(results: Sequence[Result]) -> list[tuple[Run, str]]:
    """Each run that has a network with the start of its figures' names; folders of runs may have the same name."""
    runs = [result for result in results if isinstance(result, Run) and result.records]
    before = [sum(one.name == run.name for one in runs[:index]) for index, run in enumerate(runs)]
    return [(run, run.name if not n else f"{run.name}-{n + 1}") for run, n in zip(runs, before)]


def _file_name(name: str, kind: str) -> str:
    """A run's name comes from its folder: no part of it may lead elsewhere."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}.{kind}"


def _literal(name: str) -> str:
    """The name as it is: a dollar sign would start a formula."""
    return name.replace("$", r"\$")


def _save(figure: Any, folder: Path, name: str, kind: str) -> Path:
    path = folder / _file_name(name, kind)
    # No date: the same numbers give the same file.
    metadata = {"CreationDate": None, "Creator": FIGURE_MARK} if kind == "pdf" else {"Software": FIGURE_MARK}
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, dpi=DPI, metadata=metadata)
    write_atomic(path, drawn.getvalue())
    return path


def _figures(run: Run) -> dict[str, tuple[float, Draw]]:
    metrics: dict[str, tuple[float, Draw]] = {
        key.replace("_", "-"): (COLUMN, _alone(_metric_drawer(key))) for key in series.metrics_of(run)
    }
    return {
        **metrics,
        "certified-epsilon": (COLUMN, _alone(partial(_epsilons, certified=True))),
        "theory-epsilon": (COLUMN, _alone(partial(_epsilons, certified=False))),
        "layers-keep": (WIDE, partial(draw_layers, field="keep", label="kept share of the layer (%)", scale=100.0)),
        "layers-epsilon": (WIDE, partial(draw_layers, field="eps", label="epsilon of the layer", scale=1.0)),
        "scores": (COLUMN, _alone(_scores)),
        "time": (COLUMN, _alone(_times)),
    }


def _alone(draw: Draw) -> Draw:
    """Draws on the only axes of a figure."""
    return lambda figure, run: draw(figure.subplots(), run)


def _metric_drawer(key: str) -> Draw:
    def draw(axes: Any, run: Run) -> bool:
        metric, curves = METRICS[key], series.curves(run, key)
        dense = series.dense_point(run, key)
        if not _curves(axes, series.methods_of(run), curves, 100.0):
            return False
        _dense_line(axes, None if dense is None else dense.mean)
        if metric.unit == "points":
            axes.set_ylabel(f"{metric.label}\n(percentage points)")
            least = 100 * min(point.low for curve in curves for point in curve.points)
            most = 100 * max(point.high for curve in curves for point in curve.points)
            if least < -STEEP:
                axes.set_yscale("symlog", linthresh=NEAR_ZERO, linscale=0.6)
                axes.set_ylim(1.25 * least, max(NEAR_ZERO, 1.25 * most))
                _plain_ticks(axes.yaxis, least=NEAR_ZERO)
        else:
            axes.set_ylabel(f"{metric.label} (%)")
        return True

    return draw


def _curves(axes: Any, methods: tuple[str, ...], curves: tuple[Curve, ...], scale: float) -> bool:
    """Whether there was anything to draw: lines over keep with bands from the least to the largest seed."""
    for curve in curves:
        style = palette.style_of(curve.method, methods)
        keeps = [100 * point.keep for point in curve.points]
        low, high = ([scale * getattr(point, side) for point in curve.points] for side in ("low", "high"))
        axes.fill_between(keeps, low, high, color=style.light, alpha=0.14, linewidth=0)
        axes.plot(keeps, [scale * point.mean for point in curve.points], label=_literal(curve.method), **_line(style))
    if not curves:
        return False
    keeps = [point.keep for curve in curves for point in curve.points]
    if max(keeps) / min(keeps) > LOG_RATIO:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    axes.invert_xaxis()
    axes.set_xlabel("keep (% of prunable weights)")
    _legend(axes)
    return True


def _legend(axes: Any) -> None:
    """The names of the lines: among them while they are few, else below the axes, where they hide none."""
    n_names = len(axes.get_legend_handles_labels()[1])
    below = {"ncols": 3, "loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "columnspacing": 1.2}
    axes.legend(frameon=False, **(below if n_names > MOST_NAMES else {}))


def _line(style: Style) -> dict[str, Any]:
    dash: Any = (0, style.dash) if style.dash else "solid"
    drawn_as = {"color": style.light, "marker": MARKERS[style.marker], "linestyle": dash}
    edge = {"markerfacecolor": "white"} if style.hollow else {"markeredgecolor": "white", "markeredgewidth": 0.4}
    return {**drawn_as, "linewidth": 1.3, "markersize": 4.5, **edge}


def _plain_ticks(axis: Any, *, least: float = 0.0) -> None:
    """Labels the axis at 0 and at 1, 2, 5, 10, ... from `least` on, in plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    marks = [0.0, *(sign * mark * 10.0**power for power in range(-3, 3) for mark in (1, 2, 5) for sign in (1, -1))]
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(FixedLocator([mark for mark in marks if low <= mark <= high and not 0 < abs(mark) < least]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _epsilons(axes: Any, run: Run, *, certified: bool) -> bool:
    curves = series.certified_curves(run) if certified else series.theory_curves(run)
    if not _curves(axes, series.methods_of(run), curves, 1.0):
        return False
    values = [point.mean for curve in curves for point in curve.points]
    if min(values) > 0 and max(values) / min(values) > EPSILON_RATIO:
        axes.set_yscale("log")
    axes.set_ylabel("certified epsilon (holdout)" if certified else "epsilon of the theory")
    return True


def _scores(axes: Any, run: Run) -> bool:
    """The scores of the first method at the first level, of all layers together."""
    if run.bins is None or not series.methods_of(run):
        return False
    method, level = series.methods_of(run)[0], next(iter(series.levels_of(run)))
    parts = series.histograms(run, method, level)
    if not parts:
        return False
    one, bins = series.added(parts), run.bins
    left = [10 ** (bins.low + bins.width * i) for i in range(bins.n)]
    widths = [edge * (10**bins.width - 1) for edge in left]
    pruned = [count - kept for count, kept in zip(one.counts, one.kept)]
    drawn_as = {"align": "edge", "edgecolor": "white", "linewidth": 0.4}
    axes.bar(left, one.kept, widths, label="kept", color=palette.PARTS["kept"][0], **drawn_as)
    axes.bar(left, pruned, widths, bottom=one.kept, label="pruned", color=palette.PARTS["pruned"][0], **drawn_as)
    filled = [i for i, count in enumerate(one.counts) if count] or [0]
    axes.set_xscale("log")
    axes.set_xlim(left[filled[0]], left[filled[-1]] + widths[filled[-1]])
    axes.set_xlabel(f"score before pruning ({_literal(method)}, level {level})")
    axes.set_ylabel("weights")
    axes.legend(frameon=False)
    return True


def _times(axes: Any, run: Run) -> bool:
    found = series.times(run)
    names = list(found)
    under = [0.0] * len(names)
    for part in series.PARTS:
        values = [found[name][part] for name in names]
        if any(values):
            axes.barh(
                [_literal(name) for name in names],
                values,
                left=under,
                label=part,
                color=palette.PARTS[part][0],
                height=0.6,
            )
            under = [a + b for a, b in zip(under, values)]
    if not any(under):
        return False
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds, summed over levels and seeds")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    return True
