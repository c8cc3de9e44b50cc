"""The layers of a run in, a figure of print quality out: as on the page, a column of bars for each method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sipp.records.display import short_names
from sipp.report import palette, series
from sipp.report.read import Run
from sipp.report.words import number
from sipp.report.palette import Style

WIDTH = 6.9  # inches: both columns of a two-column page
ROW = 0.125  # inches of a layer,
DENSE_ROW = 0.1  # and where there are many
MANY = 30
LEAST_HEIGHT = 2.4  # inches of the figure
MARGINS = 0.75  # inches above and below the bars of a block
MOST_COLUMNS = 6  # side by side: beyond, a second block below
NAME_LENGTH = 30  # of a layer beside its bars
STEEP = 12.0  # largest to least from which on values are dots on a logarithmic axis; as on the page
HATCH = "//////"


def draw_layers(figure: Any, run: Run, field: str, label: str, scale: float) -> bool:
    """Whether there was anything to draw: `field` of each layer at the last level, of every method that has it."""
    names, levels = list(series.layers_of(run)), series.levels_of(run)
    columns = _columns(run, field, scale)
    if not columns:
        return False
    n_blocks = -(-len(columns) // MOST_COLUMNS)
    n_across = -(-len(columns) // n_blocks)
    row = DENSE_ROW if len(names) > MANY else ROW
    figure.set_size_inches(WIDTH, max(LEAST_HEIGHT, n_blocks * (row * len(names) + MARGINS)))
    grid = figure.subplots(n_blocks, n_across, squeeze=False, sharex=True, sharey=True)
    values = [value for _, column in columns for value in column if value is not None]
    positive = [value for value in values if value > 0]
    is_steep = field == "eps" and bool(positive) and max(positive) / min(positive) > STEEP
    for place, axes in enumerate(grid.flat):
        if place >= len(columns):
            axes.set_axis_off()
            continue
        method, column = columns[place]
        _draw_column(axes, column, palette.style_of(method, series.methods_of(run)), is_steep)
        axes.set_title(method.replace("$", r"\$"), fontsize=7, loc="left")
        axes.tick_params(axis="x", labelbottom=place + n_across >= len(columns))  # the last of its column
    first = grid.flat[0]
    if is_steep:
        first.set_xscale("log")
    else:
        first.set_xlim(0, 1.3 * max(values) or 1.0)  # with room for numbers
    first.set_ylim(len(names) - 0.5, -0.5)
    texts = [name.replace("$", r"\$") for name in layer_names(names)]
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(names)), texts, fontsize=5.5 if len(names) > MANY else 6.5)
        axes.tick_params(axis="y", labelleft=True)
    figure.supxlabel(f"{label}, at {number(list(levels.values())[-1], 'share')} keep", fontsize=8)
    return True


def layer_names(names: Sequence[str]) -> list[str]:
    """The names beside bars: without the end that nearly all of them have, shortened, and still different."""
    bare = [re.sub(r"(\D.*)\.weight$", r"\1", name) for name in names]
    return short_names(bare if len(set(bare)) == len(set(names)) else names, NAME_LENGTH)


def _columns(run: Run, field: str, scale: float) -> list[tuple[str, list[float | None]]]:
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
