"""Figures for print as PDF and PNG, with the views and colours of the page."""

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
from sipp.files import make_folder, write_atomic
from sipp.report import palette, series
from sipp.report.compare_networks import by_dense_network, comparisons_of
from sipp.report.compare_runs import Panel, panels_of
from sipp.report.numbers import number
from sipp.report.palette import MARKERS, Style
from sipp.report.plots import curve_view, epsilon_views, layer_view, metric_view, metric_views
from sipp.report.results import PrunedModel, Result
from sipp.report.series import METRICS, Curve, Point
from sipp.results.display import short_names
from sipp_lab.runs.reading import Run

FORMATS = ("pdf", "png")
CREATOR = "sipp report"  # in their metadata
DPI = 300  # of the PNG
COLUMN = 3.35  # inches: one column of a two-column page
WIDE = 6.9  # both columns
HEIGHT = 2.5
PANEL_HEIGHT = 2.7
PANELS = "panels"  # name of the figure of all runs
PIPELINES = "pipelines"  # name of the figure of one method in several pipelines
LOG_RATIO = 8.0  # largest / smallest keep above which the keep axis is logarithmic, as on the page
MOST_NAMES = 5  # in a legend inside the axes
LABEL_LENGTH = 28  # characters per line of an axis label
NEAR_ZERO = 0.5  # percentage points: linear below, logarithmic above, as on the page
STEEP = 10.0  # percentage points of loss above which the axis of changes is symmetric-logarithmic
EPSILON_RATIO = 12.0  # largest / smallest error above which its axis is logarithmic, as on the page
ROW, DENSE_ROW, MANY = 0.125, 0.1, 30  # inches per layer, with up to MANY layers and with more
LEAST_HEIGHT = 2.4  # inches, of the figure of layers
MARGINS = 0.75  # inches above and below a block of bars
MOST_COLUMNS = 6  # of bars side by side; more go into a second block
NAME_LENGTH = 30  # characters of a layer name
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

Draw = Callable[[Any], None]  # draws on a matplotlib figure
View = dict[str, Any]  # see `report/plots.py`


def write_figures(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes all figures that there is data for, in each format, and returns their paths.

    Each run gets figures of its metrics, epsilons and layers. Several runs also get a common figure with a panel per
    network. Pruned networks get figures only together: curves over keep for those of one dense network.
    """
    with needed_for("drawing figures"):
        import matplotlib
        from matplotlib.figure import Figure  # without pyplot, which would choose a backend for the caller

    make_folder(folder)
    written = []
    with matplotlib.rc_context(PRINT_STYLE):
        for name, draw in _figures(results).items():
            figure = Figure(figsize=(COLUMN, HEIGHT))
            draw(figure)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once for both formats
            for kind in FORMATS:
                # No date: the same data gives the same file.
                made_by = {"CreationDate": None, "Creator": CREATOR} if kind == "pdf" else {"Software": CREATOR}
                drawn = BytesIO()
                figure.savefig(drawn, format=kind, dpi=DPI, metadata=made_by)
                written.append(folder / _file_name(name, kind))
                write_atomic(written[-1], drawn.getvalue())
    return written


def figure_names(results: Sequence[Result]) -> list[str]:
    """The names of the files that `write_figures` writes for these results."""
    return [_file_name(name, kind) for name in _figures(results) for kind in FORMATS]


def _file_name(name: str, kind: str) -> str:
    """A safe file name: run names come from folder names."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}.{kind}"


def _figures(results: Sequence[Result]) -> dict[str, Draw]:
    """All figures as {name: drawing function}."""
    runs = [result for result in results if isinstance(result, Run) and result.records]
    figures: dict[str, Draw] = {}
    for index, run in enumerate(runs):
        n_before = sum(earlier.name == run.name for earlier in runs[:index])  # folders may have the same name
        stem = run.name if not n_before else f"{run.name}-{n_before + 1}"
        views = {key.replace("_", "-"): view for key, view in metric_views(run).items()}
        views |= {f"{name}-epsilon": view for name, view in epsilon_views(run).items()}
        figures |= {f"{stem}-{name}": _single_plot(view, series.methods_of(run)) for name, view in views.items()}
        figures |= {f"{stem}-layers-{name}": draw for name, draw in _layer_figures(run).items()}
    groups = by_dense_network([result for result in results if isinstance(result, PrunedModel)])
    for index, group in enumerate(group for group in groups if len(group) > 1):
        stem = "networks" if index == 0 else f"networks-{index + 1}"
        figures |= {f"{stem}-{shown.key}": _single_plot(shown.view, ()) for shown in comparisons_of(group)}
    if along := pipeline_curves(results):
        view = curve_view(along, METRICS["top1"].label, "share", dense=series.dense_mean(runs[0], "top1"))
        figures[PIPELINES] = _single_plot(view, (), f"{runs[0].config['net']}, {series.methods_of(runs[0])[0]}")
    panels = [panel for panel in panels_of(runs) if series.methods_of(panel.run)] if len(runs) > 1 else []
    if panels:
        figures[PANELS] = partial(_draw_panels, panels=panels)
    return figures


def _single_plot(view: View, methods: tuple[str, ...], title: str = "") -> Draw:
    """Draws curves on a figure with a single axes."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        draw_lines(axes, view, methods)
        axes.set_title(_escape(title), fontsize=7)

    return draw


def _draw_panels(figure: Any, *, panels: Sequence[Panel]) -> None:
    """The main metric of each network, two panels per row."""
    n_rows = math.ceil(len(panels) / 2)
    figure.set_size_inches(WIDE, n_rows * PANEL_HEIGHT)
    places = list(figure.subplots(n_rows, 2, squeeze=False).flat)
    for axes, panel in zip(places, panels):
        view = metric_view(panel.run, series.default_metric(panel.run))
        draw_lines(axes, view, series.methods_of(panel.run))
        axes.set_title(_escape(panel.title), fontsize=7, wrap=True)
    for axes in places[len(panels) :]:
        axes.set_axis_off()


def pipeline_curves(results: Sequence[Result]) -> tuple[Curve, ...]:
    """Top-1 accuracy over keep, one curve per pipeline, if runs of one network and method used several pipelines.

    Runs of a pipeline with different keeps form one curve; no curves if two runs have the same keep.
    """
    runs = [result for result in results if isinstance(result, Run)]
    methods = {method for run in runs for method in series.methods_of(run)}
    networks = {(run.config["net"], run.config["data"]["name"]) for run in runs}
    points: dict[str, list[Point]] = {}
    for run in runs:
        for curve in series.metric_curves(run, "top1"):
            points.setdefault(run.config["pipeline"], []).extend(curve.points)
    is_twice = any(len({round(point.keep, 4) for point in reached}) < len(reached) for reached in points.values())
    if len(points) < 2 or len(methods) > 1 or len(networks) > 1 or is_twice:
        return ()
    falling = {name: sorted(reached, key=lambda point: -point.keep) for name, reached in points.items()}
    return tuple(Curve(name, tuple(falling[name])) for name in sorted(falling))


def _escape(name: str) -> str:
    """Escapes dollar signs, which would start a formula."""
    return name.replace("$", r"\$")


# --- curves ---------------------------------------------------------------------------------------------------------


def draw_lines(axes: Any, view: View, methods: tuple[str, ...] = ()) -> None:
    """Curves over keep with bands from the smallest to the largest seed, and a line for the dense network.

    `methods` are all methods to choose styles among; empty: those of these curves.
    """
    curves, unit = view["series"], view["y"]["unit"]
    scale = 1.0 if unit == "number" else 100.0
    for curve in curves:
        style = palette.style_of(curve["name"], methods or tuple(shown["name"] for shown in curves))
        at, mean, low, high = ([point[i] * (scale if i else 100.0) for point in curve["points"]] for i in range(4))
        axes.fill_between(at, low, high, color=style.light, alpha=0.14, linewidth=0)
        axes.plot(at, mean, label=_escape(curve["name"]), **_line(style))
    keeps = [point[0] for curve in curves for point in curve["points"]]
    if max(keeps) / min(keeps) > LOG_RATIO:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    axes.invert_xaxis()
    axes.set_xlabel("keep (% of prunable weights)")
    if "reference" in view:
        drawn_as = {"color": "#555555", "linewidth": 0.8, "linestyle": (0, (4, 3))}
        axes.axhline(scale * view["reference"]["value"], zorder=1, label=view["reference"]["label"], **drawn_as)
    _legend(axes)
    in_unit = {"share": " (%)", "points": " (percentage points)"}.get(unit, "")
    axes.set_ylabel(fill(view["y"]["label"] + in_unit, LABEL_LENGTH))
    _scale_values(axes, view, [scale * value for curve in curves for point in curve["points"] for value in point[1:4]])


def _scale_values(axes: Any, view: View, values: Sequence[float]) -> None:
    """Chooses a logarithmic axis for errors over a wide range, a symmetric-logarithmic one for large losses."""
    least, most = min(values), max(values)
    if view["y"]["log"] and _needs_log_axis(values):
        axes.set_yscale("log")
        if view["y"]["unit"] == "share":
            _plain_ticks(axes.yaxis)
    elif view["y"]["log"]:
        axes.set_ylim(bottom=min(0, least))
    elif view["y"]["unit"] == "points" and least < -STEEP:
        axes.set_yscale("symlog", linthresh=NEAR_ZERO, linscale=0.6)
        axes.set_ylim(1.25 * least, max(NEAR_ZERO, 1.25 * most))
        _plain_ticks(axes.yaxis, least=NEAR_ZERO)


def _needs_log_axis(values: Sequence[float]) -> bool:
    """Whether errors span a range that needs a logarithmic axis."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) / min(positive) > EPSILON_RATIO


def _legend(axes: Any) -> None:
    """Puts the legend inside the axes if it is short, else below."""
    n_names = len(axes.get_legend_handles_labels()[1])
    below = {"ncols": 3, "loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "columnspacing": 1.2}
    axes.legend(frameon=False, **(below if n_names > MOST_NAMES else {}))


def _line(style: Style) -> dict[str, Any]:
    dash: Any = (0, style.dash) if style.dash else "solid"
    drawn_as = {"color": style.light, "marker": MARKERS[style.marker], "linestyle": dash}
    edge = {"markerfacecolor": "white"} if style.hollow else {"markeredgecolor": "white", "markeredgewidth": 0.4}
    return {**drawn_as, "linewidth": 1.3, "markersize": 4.5, **edge}


def _plain_ticks(axis: Any, *, least: float = 0.0) -> None:
    """Plain tick labels at 0 and at 1, 2, 5, 10, ... starting at `least`."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    marks = [0.0, *(sign * mark * 10.0**power for power in range(-3, 3) for mark in (1, 2, 5) for sign in (1, -1))]
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(FixedLocator([mark for mark in marks if low <= mark <= high and not 0 < abs(mark) < least]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


# --- layers ---------------------------------------------------------------------------------------------------------


def _layer_figures(run: Run) -> dict[str, Draw]:
    """Figures of the kept share and the epsilon of each layer at the last level, for all methods."""
    levels, methods = series.levels_of(run), series.methods_of(run)
    if not levels or not series.layers_of(run):
        return {}
    last, keep = list(levels.items())[-1]
    rows = {method: series.layer_rows(run, method, last) for method in methods}
    views = {"keep": layer_view("keep", rows), "epsilon": layer_view("eps", rows)}
    draw = partial(draw_bars, names=list(series.layers_of(run)), methods=methods, at=f"at keep {number(keep, 'share')}")
    return {name: partial(draw, view=view) for name, view in views.items() if view["series"]}


def draw_bars(figure: Any, view: View, names: Sequence[str], methods: tuple[str, ...], at: str) -> None:
    """A column of bars for each method, with layer names on the left."""
    scale, columns = 100.0 if view["y"]["unit"] == "share" else 1.0, view["series"]
    n_blocks = -(-len(columns) // MOST_COLUMNS)
    n_across = -(-len(columns) // n_blocks)
    row = DENSE_ROW if len(names) > MANY else ROW
    figure.set_size_inches(WIDE, max(LEAST_HEIGHT, n_blocks * (row * len(names) + MARGINS)))
    grid = figure.subplots(n_blocks, n_across, squeeze=False, sharex=True, sharey=True)
    values = [scale * value for shown in columns for value in shown["values"] if value is not None]
    is_steep = view["y"]["log"] and _needs_log_axis(values)
    for place, axes in enumerate(grid.flat):
        if place >= len(columns):
            axes.set_axis_off()
            continue
        column = [None if value is None else scale * value for value in columns[place]["values"]]
        _draw_column(axes, column, palette.style_of(columns[place]["name"], methods), is_steep)
        axes.set_title(_escape(columns[place]["name"]), fontsize=7, loc="left")
        axes.tick_params(axis="x", labelbottom=place + n_across >= len(columns))  # last in its column
    first = grid.flat[0]
    if is_steep:
        first.set_xscale("log")
    else:
        first.set_xlim(0, 1.3 * max(values) or 1.0)  # leaves space for the numbers
    first.set_ylim(len(names) - 0.5, -0.5)
    texts = [_escape(name) for name in _layer_names(names)]
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(names)), texts, fontsize=5.5 if len(names) > MANY else 6.5)
        axes.tick_params(axis="y", labelleft=True)
    in_unit = " (%)" if view["y"]["unit"] == "share" else ""
    figure.supxlabel(f"{view['y']['label']}{in_unit}, {at}", fontsize=8)


def _layer_names(names: Sequence[str]) -> list[str]:
    """Layer names without the common `.weight`, shortened but still distinct."""
    bare = [re.sub(r"(\D.*)\.weight$", r"\1", name) for name in names]
    return short_names(bare if len(set(bare)) == len(set(names)) else names, NAME_LENGTH)


def _draw_column(axes: Any, column: Sequence[float | None], style: Style, is_steep: bool) -> None:
    """Bars, or dots on a logarithmic axis, which has no zero."""
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
    """Two digits, without an exponent for large numbers."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"
