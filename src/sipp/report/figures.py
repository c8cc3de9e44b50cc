"""Runs in, figures of print quality out: the numbers and the looks of the page, as PDF and PNG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

from sipp.extras import needed_for
from sipp.records.display import short_names
from sipp.report import palette, series
from sipp.report.compare_networks import ComparedNetworks, by_parent, comparisons_of
from sipp.report.compare_runs import Panel, panels_of
from sipp.report.numbers import number
from sipp.report.palette import MARKERS, Style
from sipp.report.results import PrunedModel, Result, Run
from sipp.report.series import METRICS, Curve, Point
from sipp.storage.files import make_folder, write_atomic
from sipp.storage.outputs import FIGURE_MARK

FORMATS = ("pdf", "png")
DPI = 300  # of the PNG
COLUMN = 3.35  # inches: one column of a two-column page
WIDE = 6.9  # both columns
HEIGHT = 2.5
PANEL_HEIGHT = 2.7
PANELS = "panels"  # name of the figure of all runs
PIPELINES = "pipelines"  # name of the figure of one method along several pipelines
LOG_RATIO = 8.0  # of the largest to the least keep, from which on the keep axis is logarithmic; as on the page
MOST_NAMES = 5  # of lines in a legend inside the axes
LABEL_LENGTH = 28  # of a line of an axis label
NEAR_ZERO = 0.5  # percentage points: linear below, logarithmic above; as on the page
STEEP = 10.0  # percentage points of loss from which on the axis of changes is logarithmic away from zero
EPSILON_RATIO = 12.0  # of the largest to the least, from which on an axis of errors is logarithmic; as on the page
ROW, DENSE_ROW, MANY = 0.125, 0.1, 30  # inches of a layer beside its bars, and where there are more than so many
LEAST_HEIGHT = 2.4  # inches of the figure of layers
MARGINS = 0.75  # inches above and below the bars of a block
MOST_COLUMNS = 6  # of bars side by side: beyond, a second block below
NAME_LENGTH = 30  # of a layer beside its bars
HATCH = "//////"
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
    with matplotlib.rc_context(PRINT_STYLE):
        for run, stem in _stems(results):
            for name, (width, draw) in _figures(run).items():
                figure = Figure(figsize=(width, HEIGHT))
                if draw(figure, run):
                    figure.draw_without_rendering()
                    figure.set_layout_engine("none")  # laid out once for both formats
                    written += _save(figure, folder, f"{stem}-{name}")
        for name, draw_network in _network_figures(results).items():
            figure = Figure(figsize=(COLUMN, HEIGHT))
            draw_network(figure.subplots())
            written += _save(figure, folder, name)
        if along := pipeline_curves(results):
            figure = Figure(figsize=(COLUMN, HEIGHT))
            _draw_pipelines(figure.subplots(), along, results)
            written += _save(figure, folder, PIPELINES)
        if panels := _panels(results):
            n_rows = math.ceil(len(panels) / 2)
            figure = Figure(figsize=(WIDE, n_rows * PANEL_HEIGHT))
            places = figure.subplots(n_rows, 2, squeeze=False).flat
            for axes, panel in zip(places, [*panels, *[None] * (len(panels) % 2)]):
                if panel is None or not draw_metric(axes, panel.run, key=series.default_metric(panel.run)):
                    axes.set_axis_off()
                else:
                    axes.set_title(_literal(panel.title), fontsize=7, wrap=True)
            written += _save(figure, folder, PANELS)
    return written


def _panels(results: Sequence[Result]) -> list[Panel]:
    """The panels of all runs together; none where there is only one run."""
    runs = [result for result in results if isinstance(result, Run)]
    found = panels_of(runs) if len(runs) > 1 else []
    return [panel for panel in found if series.methods_of(panel.run)]


def pipeline_curves(results: Sequence[Result]) -> tuple[Curve, ...]:
    """Top-1 accuracy over keep along each pipeline, where runs of one network and one method took several.

    Runs of a pipeline that each reach one keep are one curve; none where two of them reach the same.
    """
    runs = [result for result in results if isinstance(result, Run)]
    methods = {method for run in runs for method in series.methods_of(run)}
    networks = {(run.config["net"], run.config["data"]["name"]) for run in runs}
    points: dict[str, list[Point]] = {}
    for run in runs:
        for curve in series.metric_curves(run, "top1"):
            points.setdefault(run.config["pipeline"], []).extend(curve.points)
    is_twice = any(len({round(one.keep, 4) for one in found}) < len(found) for found in points.values())
    if len(points) < 2 or len(methods) > 1 or len(networks) > 1 or is_twice:
        return ()
    falling = {name: sorted(found, key=lambda point: -point.keep) for name, found in points.items()}
    return tuple(Curve(name, tuple(falling[name])) for name in sorted(falling))


def _draw_pipelines(axes: Any, curves: tuple[Curve, ...], results: Sequence[Result]) -> None:
    run = next(result for result in results if isinstance(result, Run))
    _curves(axes, tuple(curve.method for curve in curves), curves, 100.0)
    _dense_line(axes, series.dense_mean(run, "top1"))
    axes.set_ylabel(f"{METRICS['top1'].label} (%)")
    axes.set_title(_literal(f"{run.config['net']}, {series.methods_of(run)[0]}"), fontsize=7)


def figure_names(results: Sequence[Result]) -> list[str]:
    """The names of all files that `write_figures` may write for these results."""
    names = [f"{stem}-{name}" for run, stem in _stems(results) for name in _figures(run)]
    names += [*_network_figures(results), *([PANELS] if _panels(results) else [])]
    names += [PIPELINES] if pipeline_curves(results) else []
    return [_file_name(name, kind) for name in names for kind in FORMATS]


def _network_figures(results: Sequence[Result]) -> dict[str, Callable[[Any], None]]:
    """{name: what draws it} of pruned networks that share their dense one."""
    models = [result for result in results if isinstance(result, PrunedModel)]
    groups = [group for group in by_parent(models) if len(group) > 1]
    found: dict[str, Callable[[Any], None]] = {}
    for index, group in enumerate(groups):
        stem = "networks" if index == 0 else f"networks-{index + 1}"
        found |= {f"{stem}-{one.key}": partial(_draw_comparison, comparison=one) for one in comparisons_of(group)}
    return found


def _draw_comparison(axes: Any, *, comparison: ComparedNetworks) -> None:
    """Accuracies beside the dense one's, or errors from zero, on a logarithmic axis where they are steep."""
    curves = comparison.curves
    _curves(axes, tuple(curve.method for curve in curves), curves, 100.0)
    if not comparison.are_errors:
        _dense_line(axes, comparison.dense)
    elif _is_steep(point.mean for curve in curves for point in curve.points):
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(fill(f"{comparison.label} (%)", LABEL_LENGTH))


def _is_steep(values: Iterable[float]) -> bool:
    """Whether errors are drawn on a logarithmic axis, which has no zero."""
    known = list(values)
    return min(known) > 0 and max(known) / min(known) > EPSILON_RATIO


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


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    """The files written, one in each format."""
    paths = []
    for kind in FORMATS:
        # No date: the same numbers give the same file.
        metadata = {"CreationDate": None, "Creator": FIGURE_MARK} if kind == "pdf" else {"Software": FIGURE_MARK}
        drawn = BytesIO()
        figure.savefig(drawn, format=kind, dpi=DPI, metadata=metadata)
        paths.append(folder / _file_name(name, kind))
        write_atomic(paths[-1], drawn.getvalue())
    return paths


def _figures(run: Run) -> dict[str, tuple[float, Draw]]:
    """{name: (its width, what draws it)} of all figures of a run."""
    metrics = {key.replace("_", "-"): partial(draw_metric, key=key) for key in series.metrics_of(run)}
    on_axes = {
        **metrics,
        "certified-epsilon": partial(_draw_epsilons, certified=True),
        "theory-epsilon": partial(_draw_epsilons, certified=False),
    }
    return {
        **{name: (COLUMN, _alone(draw)) for name, draw in on_axes.items()},
        "layers-keep": (WIDE, partial(draw_layers, field="keep", label="kept share of the layer (%)", scale=100.0)),
        "layers-epsilon": (WIDE, partial(draw_layers, field="eps", label="epsilon of the layer", scale=1.0)),
        "scores": (COLUMN, _alone(_draw_scores)),
        "time": (COLUMN, _alone(_draw_times)),
    }


def _alone(draw: Draw) -> Draw:
    """Draws on the only axes of a figure."""
    return lambda figure, run: draw(figure.subplots(), run)


def draw_metric(axes: Any, run: Run, *, key: str) -> bool:
    """A metric of the run over keep, one line a method; whether there was anything to draw."""
    metric, curves = METRICS[key], series.metric_curves(run, key)
    if not _curves(axes, series.methods_of(run), curves, 100.0):
        return False
    _dense_line(axes, series.dense_mean(run, key))
    if metric.unit != "points":
        axes.set_ylabel(f"{metric.label} (%)")
        return True
    axes.set_ylabel(f"{metric.label}\n(percentage points)")
    least = 100 * min(point.low for curve in curves for point in curve.points)
    most = 100 * max(point.high for curve in curves for point in curve.points)
    if least < -STEEP:
        axes.set_yscale("symlog", linthresh=NEAR_ZERO, linscale=0.6)
        axes.set_ylim(1.25 * least, max(NEAR_ZERO, 1.25 * most))
        _plain_ticks(axes.yaxis, least=NEAR_ZERO)
    return True


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


def _draw_epsilons(axes: Any, run: Run, *, certified: bool) -> bool:
    curves = series.certified_curves(run) if certified else series.theory_curves(run)
    if not _curves(axes, series.methods_of(run), curves, 1.0):
        return False
    if _is_steep(point.mean for curve in curves for point in curve.points):
        axes.set_yscale("log")
    axes.set_ylabel("certified epsilon (holdout)" if certified else "epsilon of the theory")
    return True


def _draw_scores(axes: Any, run: Run) -> bool:
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


def _draw_times(axes: Any, run: Run) -> bool:
    found = series.times(run)
    names = list(found)
    under = [0.0] * len(names)
    for part in series.PARTS:
        values = [found[name][part] for name in names]
        if any(values):
            labels, colour = [_literal(name) for name in names], palette.PARTS[part][0]
            axes.barh(labels, values, left=under, label=part, color=colour, height=0.6)
            under = [a + b for a, b in zip(under, values)]
    if not any(under):
        return False
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds, summed over levels and seeds")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    return True


# --- layers ---------------------------------------------------------------------------------------------------------


def draw_layers(figure: Any, run: Run, field: str, label: str, scale: float) -> bool:
    """Whether there was anything to draw: `field` of each layer at the last level, of every method that has it."""
    names, levels = list(series.layers_of(run)), series.levels_of(run)
    columns = _layer_columns(run, field, scale)
    if not columns:
        return False
    n_blocks = -(-len(columns) // MOST_COLUMNS)
    n_across = -(-len(columns) // n_blocks)
    row = DENSE_ROW if len(names) > MANY else ROW
    figure.set_size_inches(WIDE, max(LEAST_HEIGHT, n_blocks * (row * len(names) + MARGINS)))
    grid = figure.subplots(n_blocks, n_across, squeeze=False, sharex=True, sharey=True)
    values = [value for _, column in columns for value in column if value is not None]
    positive = [value for value in values if value > 0]
    is_steep = field == "eps" and bool(positive) and max(positive) / min(positive) > EPSILON_RATIO
    for place, axes in enumerate(grid.flat):
        if place >= len(columns):
            axes.set_axis_off()
            continue
        method, column = columns[place]
        _draw_column(axes, column, palette.style_of(method, series.methods_of(run)), is_steep)
        axes.set_title(_literal(method), fontsize=7, loc="left")
        axes.tick_params(axis="x", labelbottom=place + n_across >= len(columns))  # the last of its column
    first = grid.flat[0]
    if is_steep:
        first.set_xscale("log")
    else:
        first.set_xlim(0, 1.3 * max(values) or 1.0)  # with room for numbers
    first.set_ylim(len(names) - 0.5, -0.5)
    texts = [_literal(name) for name in _layer_names(names)]
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(names)), texts, fontsize=5.5 if len(names) > MANY else 6.5)
        axes.tick_params(axis="y", labelleft=True)
    figure.supxlabel(f"{label}, at keep {number(list(levels.values())[-1], 'share')}", fontsize=8)
    return True


def _layer_names(names: Sequence[str]) -> list[str]:
    """The names beside bars: without the end that nearly all of them have, shortened, and still different."""
    bare = [re.sub(r"(\D.*)\.weight$", r"\1", name) for name in names]
    return short_names(bare if len(set(bare)) == len(set(names)) else names, NAME_LENGTH)


def _layer_columns(run: Run, field: str, scale: float) -> list[tuple[str, list[float | None]]]:
    """(method, value of each layer at the last level) of the methods that know one."""
    last = list(series.levels_of(run))[-1] if series.levels_of(run) else 0
    found = []
    for method in series.methods_of(run):
        known = [getattr(row, field) for row in series.layer_rows(run, method, last)]
        if any(value is not None for value in known):
            found.append((method, [None if value is None else scale * value for value in known]))
    return found


def _draw_column(axes: Any, column: Sequence[float | None], style: Style, is_steep: bool) -> None:
    """Bars from zero; dots where the axis is logarithmic, which has no zero for a bar to start at."""
    at = [i for i, value in enumerate(column) if value is not None and (value > 0 or not is_steep)]
    lengths = [column[i] for i in at]
    inside = "white" if style.hollow else style.light
    if is_steep:
        axes.plot(lengths, at, "o", markersize=3, markeredgecolor=style.light, markerfacecolor=inside)
    else:
        hatch = HATCH if style.hollow else None
        bars = axes.barh(at, lengths, height=0.68, color=inside, edgecolor=style.light, linewidth=0.5, hatch=hatch)
        axes.bar_label(bars, fmt=_rounded, padding=1.5, fontsize=5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _rounded(value: float) -> str:
    """Two digits of what is small; never a power of ten for a hundred."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"
