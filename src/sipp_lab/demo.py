"""The demo: a small network on built-in digits, pruned by several methods and retrained, with a page; in a minute."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sipp.extras import needed_for
from sipp.files import check_file
from sipp.results import Sheet, Table, shown
from sipp_lab.page import read_results, write_results
from sipp_lab.recipes import load_recipe
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import run

RECIPE = "digits-iterative"
# not all methods, to keep it short
METHODS = ("sipp-blend", "sipp-hybrid", "sipp-det", "sipp-rand", "magnitude", "snip", "random", "lamp")
SETTINGS = (  # more methods, fewer levels and epochs: the whole demo stays under a minute on two cores
    f"prune.methods=[{', '.join(METHODS)}]",
    "prune.alpha=0.4",
    "prune.levels=4",
    "train.epochs=6",
    "train.eval_every=6",
    "train.decay.milestones=[4]",
)


@dataclass(frozen=True)
@shown
class Demo:
    """The records of the demo's networks, and its page."""

    records: list[dict[str, Any]]
    page: Path

    @property
    def sheet(self) -> Sheet:
        """Accuracy by method (rows) and keep (columns), before and after retraining; fits 80 columns."""
        (dense,) = [record["after"]["top1"] for record in self.records if record["method"] is None]
        pruned = {(one["method"], one["level"]): one for one in self.records if one["method"] is not None}
        keeps = {level: record["keep"] for (_, level), record in pruned.items()}
        rows = []
        for method in dict.fromkeys(method for method, _ in pruned):
            found = [pruned[method, level] for level in keeps]
            cells = (f"{100 * one['before']['top1']:.1f}→{100 * one['after']['top1']:.1f}" for one in found)
            rows.append((method, *cells))
        columns = ("method", *(f"{100 * keep:.3g}%" for keep in keeps.values()))
        title = f"digits: test accuracy, %, pruned→retrained (dense {100 * dense:.1f})"
        return Sheet(title, tables=(Table(columns, tuple(rows)),), note=f"page: {self.page}")


def run_demo(folder: Path, *, progress: bool = True, settings: tuple[str, ...] = SETTINGS, force: bool = False) -> Demo:
    """Trains, prunes and retrains on the digits and writes a page.

    Runs the recipe `digits-iterative` with these settings, from scratch each time. An existing page is
    replaced only with `force`.
    """
    with needed_for("the demo"):
        import jinja2  # noqa: F401  before a minute of training
    page = folder / "page.html"
    check_file(page, force=force, makes_folder=True)
    recipe = load_recipe(RECIPE, settings=settings)
    with tempfile.TemporaryDirectory() as runs:
        done = run(recipe, RunOptions(out=Path(runs), device="cpu"), progress=progress)
        write_results(page, *read_results([Path(runs)]), force=force)
    return Demo(done.records, page)
