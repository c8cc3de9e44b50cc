"""Draws the figures of results/ from the records beside them, as PNG.

    python benchmarks/draw_results.py [STUDY ...]      all studies, or these: results/iterative-13-epochs

A study gets the figures that its README shows: panels.png (accuracy against keep, a panel for each network), top1.png
or delta-top1.png (the first panel alone), pipelines.png (one method in several pipelines). The page of `sipp report`
has the same plots with a button that saves each; layers.png comes from there, where the level is chosen.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sipp.report.palette import style_of
from sipp.report.plots import Curve, Point
from sipp_lab.page import read_results, series
from sipp_lab.page.panels import panels_of
from sipp_lab.runs.folder import Run

RESULTS = Path(__file__).parent.parent / "results"
SHOWN = re.compile(r"!\[[^]]*\]\(figures/([\w-]+)\.png\)")
DPI = 200
SIZE = (3.4, 2.6)  # inches of a panel
STEEP = -0.1  # change of accuracy below which the axis is logarithmic but around zero
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "up": "^", "down": "v", "plus": "P", "cross": "X"}


def draw_curves(axes: Any, curves: tuple[Curve, ...], title: str, label: str) -> None:
    """Curves over keep, with bands from the smallest to the largest seed."""
    names = tuple(curve.method for curve in curves)
    for curve in curves:
        style = style_of(curve.method, names)
        at = [100 * point.keep for point in curve.points]
        dash = (0, style.dash) if style.dash else "solid"
        mean = [100 * point.mean for point in curve.points]
        axes.plot(
            at, mean, label=curve.method, color=style.light, marker=MARKERS[style.marker], linestyle=dash, markersize=4
        )
        low, high = ([100 * getattr(point, end) for point in curve.points] for end in ("low", "high"))
        axes.fill_between(at, low, high, color=style.light, alpha=0.14, linewidth=0)
    axes.set_xscale("log")
    axes.invert_xaxis()
    axes.set_xticks([round(at, 2) for at in sorted({100 * point.keep for curve in curves for point in curve.points})])
    axes.xaxis.set_major_formatter("{x:.3g}")
    axes.minorticks_off()
    if "change" in label and min(point.low for curve in curves for point in curve.points) < STEEP:
        axes.set_yscale("symlog", linthresh=0.5)
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="keep (% of prunable weights)", ylabel=label)
    axes.set_title(title, fontsize=8, wrap=True)
    axes.legend(fontsize=6, frameon=False)


def panels(runs: list[Run]) -> Figure:
    """The main metric of each network, two panels in a row."""
    shown = panels_of(runs)
    figure = Figure(figsize=(2 * SIZE[0], SIZE[1] * -(-len(shown) // 2)), layout="constrained")
    places = list(figure.subplots(-(-len(shown) // 2), 2, squeeze=False).flat)
    for axes, panel in zip(places, shown):
        metric = series.metrics_of(panel.run)[0]
        draw_curves(axes, series.metric_curves(panel.run, metric), panel.title, f"{series.METRICS[metric].label} (%)")
    for axes in places[len(shown) :]:
        axes.set_axis_off()
    return figure


def single(metric: str) -> Callable[[list[Run]], Figure]:
    """One metric of the first panel."""

    def draw(runs: list[Run]) -> Figure:
        figure, panel = Figure(figsize=SIZE, layout="constrained"), panels_of(runs)[0]
        label = f"{series.METRICS[metric].label} (%)"
        draw_curves(figure.subplots(), series.metric_curves(panel.run, metric), panel.title, label)
        return figure

    return draw


def pipeline_curves(runs: list[Run]) -> tuple[Curve, ...]:
    """Top-1 accuracy over keep, one curve per pipeline; none if two runs of a pipeline have the same keep."""
    points: dict[str, list[Point]] = {}
    for run in runs:
        for curve in series.metric_curves(run, "top1"):
            points.setdefault(run.config["pipeline"], []).extend(curve.points)
    if any(len({round(point.keep, 4) for point in found}) < len(found) for found in points.values()):
        return ()
    return tuple(Curve(name, tuple(sorted(points[name], key=lambda point: -point.keep))) for name in sorted(points))


def pipelines(runs: list[Run]) -> Figure:
    """One method in several pipelines."""
    figure = Figure(figsize=SIZE, layout="constrained")
    title = f"{runs[0].config['net']}, {series.methods_of(runs[0])[0]}"
    draw_curves(figure.subplots(), pipeline_curves(runs), title, "top-1 accuracy (%)")
    return figure


FIGURES: dict[str, Callable[[list[Run]], Figure]] = {
    "panels": panels, "top1": single("top1"), "delta-top1": single("delta_top1"), "pipelines": pipelines,
}  # fmt: skip


def main(studies: list[Path]) -> None:
    for study in studies or sorted(path.parent for path in RESULTS.glob("*/README.md")):
        runs = [result for result in read_results([study])[0] if isinstance(result, Run)]
        for name in SHOWN.findall((study / "README.md").read_text(encoding="utf-8")):
            if name not in FIGURES:
                continue
            (study / "figures").mkdir(exist_ok=True)
            FIGURES[name](runs).savefig(study / "figures" / f"{name}.png", dpi=DPI)
            print(study / "figures" / f"{name}.png")


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
