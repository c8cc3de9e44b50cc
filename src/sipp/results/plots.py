"""Draws the plots of records with matplotlib, on given axes or on new ones, and returns the axes.

The functions take plain sequences. matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sipp.extras import needed_for
from sipp.results.display import short_names

ROW = 0.28  # inches per bar
WIDTH, HEIGHT = 6.4, 3.2  # inches
LEAST = 1.6
MOST_NAMES = 5  # of lines in a legend among them
COLOURS = ("#3b82c4", "#b8bec6")  # the main series, and the one it is compared with


def layer_bars(ax: Any, names: Sequence[str], bars: Mapping[str, Sequence[float]], label: str) -> Any:
    """Draws horizontal bars for each name, from the top down; several series get a legend."""
    height = max(LEAST, ROW * len(names) * len(bars) + 0.8)
    ax = _axes(ax, height)
    thick = 0.8 / len(bars)
    for index, ((series, values), colour) in enumerate(zip(bars.items(), COLOURS)):
        at = [i + (index - (len(bars) - 1) / 2) * thick for i in range(len(names))]
        ax.barh(at, values, height=thick * 0.92, label=series, color=colour)
    ax.set_yticks(range(len(names)), [name.replace("$", r"\$") for name in short_names(names)])
    ax.invert_yaxis()
    ax.set_xlabel(label)
    if len(bars) > 1:
        ax.legend(frameon=False)
    return ax


Points = tuple[Sequence[float], Sequence[float]]  # x values, y values


def curves(ax: Any, lines: Mapping[str, Points], x: str, y: str, *, like: Mapping[str, str] | None = None) -> Any:
    """Draws a line for each name; one that is `like` another has its colour, and is dashed."""
    ax = _axes(ax, HEIGHT)
    colours: dict[str, Any] = {}
    for name, (across, up) in lines.items():
        other = colours.get((like or {}).get(name, ""))
        look = {} if other is None else {"color": other, "linestyle": "--"}
        (drawn,) = ax.plot(across, up, marker="o", markersize=4, label=name.replace("$", r"\$"), **look)
        colours[name] = drawn.get_color()
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.grid(alpha=0.3)
    if len(lines) > 1:
        placing = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(lines) > MOST_NAMES else {}
        ax.legend(frameon=False, **placing)
    return ax


def _axes(ax: Any, height: float) -> Any:
    """The given axes, or those of a new figure."""
    if ax is not None:
        return ax
    with needed_for("drawing a record"):
        import matplotlib.pyplot as plt
    return plt.subplots(figsize=(WIDTH, height), layout="constrained")[1]
