"""`sipp demo`: trains, prunes and compares on built-in data in under a minute."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.table import Table

from sipp.cli.options import out as to_write
from sipp.cli.output import Answer
from sipp.extras import needed_for
from sipp.files import check_file
from sipp.progress import progress_bar

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

Records = list[dict[str, Any]]  # one of each network


def demo(
    out: Annotated[Path, to_write("Folder for the page.")] = Path("demo"),
    force: bool = False,
) -> Answer:
    """Train a small network on built-in digits, prune it with several methods, and show what that costs."""
    records, page = run_demo(out, force=force)
    return Answer([demo_table(records), f"page: {page}"], {"kind": "demo", "page": page, "records": records})


def run_demo(
    folder: Path, *, progress: bool = True, settings: tuple[str, ...] = SETTINGS, force: bool = False
) -> tuple[Records, Path]:
    """Trains, prunes and retrains on the digits and writes a page; returns the networks' records and its path.

    Runs the recipe `digits-iterative` with these settings, from scratch each time. An existing page is
    replaced only with `force`.
    """
    from sipp_lab.page import read_results, write_results
    from sipp_lab.recipes import load_recipe

    with needed_for("the demo"):
        import jinja2  # noqa: F401  before a minute of training
    page = folder / "page.html"
    check_file(page, force=force, makes_folder=True)
    recipe = load_recipe(RECIPE, settings=settings)
    with tempfile.TemporaryDirectory() as runs:
        records = _records(recipe, Path(runs), progress)
        write_results(page, read_results([Path(runs)]), force=force)
    return records, page


def _records(recipe: Any, out: Path, progress: bool) -> Records:
    """Runs the recipe."""
    from sipp_lab.runs.running import run

    n_networks = recipe.repetitions * (1 + len(recipe.prune.methods) * recipe.prune.n_levels)
    with progress_bar("train, prune, retrain: networks", n_networks, shown=progress) as advance:
        done = run(recipe, out=out, device="cpu", on_progress=lambda update: advance(int(update.is_end)))
        return done.records


def demo_table(records: Records) -> Table:
    """Accuracy by method (rows) and keep (columns), before and after retraining; fits 80 columns."""
    (dense,) = [record["after"]["top1"] for record in records if record["method"] is None]
    pruned = {(record["method"], record["level"]): record for record in records if record["method"] is not None}
    title = f"digits: test accuracy, %, pruned→retrained (dense {100 * dense:.1f})"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("method", no_wrap=True)
    keeps = {level: record["keep"] for (_, level), record in pruned.items()}
    for keep in keeps.values():
        table.add_column(f"{100 * keep:.3g}%", justify="right", no_wrap=True)
    for method in dict.fromkeys(method for method, _ in pruned):
        of_method = [pruned[method, level] for level in keeps]
        cells = (f"{100 * one['before']['top1']:.1f}→{100 * one['after']['top1']:.1f}" for one in of_method)
        table.add_row(method, *cells)
    return table
