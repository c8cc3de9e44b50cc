"""Runs `sipp demo`: trains a small network on digits, prunes it with several methods, and shows the cost."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from sipp import __version__
from sipp.errors import DeadRowsWarning
from sipp.experiments.recipes import Recipe, load_recipe
from sipp.experiments.runs.reading import Run
from sipp.experiments.runs.run_recipe import run
from sipp.experiments.training.signals import Interrupted
from sipp.extras import needed_for
from sipp.progress import progress_bar
from sipp.report import read_results, render
from sipp.report.figures import PRINT_STYLE, draw_lines
from sipp.report.plots import metric_view
from sipp.storage.outputs import FIGURE as FIGURE_KIND
from sipp.storage.outputs import FIGURE_MARK, check_file, write_file
from sipp.storage.outputs import PAGE as PAGE_KIND

RECIPE = "digits-iterative"
# not all methods, to keep it short
METHODS = ("sipp-blend", "sipp-hybrid", "sipp-det", "sipp-rand", "wt", "snip", "random", "lamp")
SETTINGS = (  # more methods, fewer levels and epochs: the whole demo stays under a minute on two cores
    f"prune.methods=[{', '.join(METHODS)}]",
    "prune.alpha=0.4",
    "prune.levels=4",
    "train.epochs=6",
    "train.eval_every=6",
    "train.decay.milestones=[4]",
)
FIGURE, PAGE = "accuracy.png", "page.html"
PANELS = {"just pruned": "before_top1", "retrained": "top1"}  # of the figure


@dataclass(frozen=True)
class DemoResult:
    """Test accuracies of the demo: dense, and by (method, keep) before and after retraining; and its page."""

    dense: float
    before: dict[tuple[str, float], float]
    after: dict[tuple[str, float], float]
    page: Path | None = None


def run_demo(
    folder: Path,
    *,
    seed: int = 0,
    progress: bool = True,
    settings: tuple[str, ...] = SETTINGS,
    force: bool = False,
) -> DemoResult:
    """Trains, prunes and retrains on the digits, writes a figure and a page, and returns the accuracies.

    Runs the recipe `digits-iterative` with these settings, from scratch each time. Files of an earlier demo are
    replaced only with `force`, other files never.
    """
    with needed_for("the demo"):
        import jinja2  # noqa: F401  all that the demo will need, before a minute of training
        import matplotlib  # noqa: F401
    for name, kind in ((PAGE, PAGE_KIND), (FIGURE, FIGURE_KIND)):
        check_file(folder / name, kind, force=force, makes_folder=True)
    recipe = load_recipe(RECIPE, settings=(*settings, f"seed={seed}"))
    with tempfile.TemporaryDirectory() as runs:
        try:
            records = _records(recipe, Path(runs), progress)
        except Interrupted as stop:
            raise SystemExit(stop.exit_status) from None
        (finished,) = [result for result in read_results([Path(runs)]) if isinstance(result, Run)]
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / PAGE, render([finished], version=f"sipp {__version__}").encode(), PAGE_KIND, force=force)
    _draw(finished, folder / FIGURE)
    return _result(recipe, records, folder / PAGE)


def _records(recipe: Recipe, out: Path, progress: bool) -> list[dict[str, Any]]:
    """Runs the recipe; returns one record per network."""
    n_networks = recipe.repetitions * (1 + len(recipe.prune.methods) * recipe.prune.n_levels)
    with (
        progress_bar("train, prune, retrain: networks", n_networks, shown=progress) as advance,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", DeadRowsWarning)  # expected at the sparsest levels
        return run(
            recipe, out=out, device="cpu", on_progress=lambda update: advance(1) if update.epoch is None else None
        ).records


def _result(recipe: Recipe, records: list[dict[str, Any]], page: Path) -> DemoResult:
    """Collects the accuracies from the records, by the requested keep of each level."""
    before: dict[tuple[str, float], float] = {}
    after: dict[tuple[str, float], float] = {}
    dense = 0.0
    for record in records:
        if record["method"] is None:
            dense = record["after"]["top1"]
            continue
        key = record["method"], recipe.prune.keep_at(record["level"])
        before[key], after[key] = record["before"]["top1"], record["after"]["top1"]
    return DemoResult(dense, before, after, page)


def demo_table(result: DemoResult) -> Table:
    """Accuracy by method (rows) and keep (columns), before and after retraining; fits 80 columns."""
    title = f"digits: test accuracy, %, pruned→retrained (dense {100 * result.dense:.1f})"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("method", no_wrap=True)
    keeps = sorted({keep for _, keep in result.after}, reverse=True)
    for keep in keeps:
        table.add_column(f"{100 * keep:.3g}%", justify="right", no_wrap=True)
    for method in dict.fromkeys(method for method, _ in result.after):
        cells = (f"{100 * result.before[method, k]:.1f}→{100 * result.after[method, k]:.1f}" for k in keeps)
        table.add_row(method, *cells)
    return table


def _draw(run: Run, path: Path) -> None:
    """Draws accuracy against keep, one line per method, before and after retraining."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot, which would choose a backend for the caller

    with rc_context(PRINT_STYLE):
        figure = Figure(figsize=(9, 3.8))
        for axes, (title, key) in zip(figure.subplots(1, 2, sharey=True), PANELS.items()):
            draw_lines(axes, metric_view(run, key))
            axes.set_title(title)
        figure.savefig(path, dpi=100, metadata={"Software": FIGURE_MARK})
