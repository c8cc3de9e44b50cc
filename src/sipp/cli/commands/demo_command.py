"""`sipp demo`: trains, prunes and compares on built-in data in under a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from sipp.cli.options import Force
from sipp.cli.output import Answer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and the figure.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the whole run: the same seed prints the same numbers.")] = 0,
    force: Force = False,
) -> Answer:
    """Train a small network on built-in digits, prune it with several methods, and show what that costs."""
    from sipp.cli.demo import FIGURE, demo_table, run_demo

    result = run_demo(out, seed=seed, force=force)
    rows = [
        {"method": method, "keep": keep, "pruned": share, "retrained": result.after[method, keep]}
        for (method, keep), share in result.before.items()
    ]
    files = {"page": result.page, "figure": out / FIGURE}
    shown: list[RenderableType] = [demo_table(result), f"page: {result.page}, figure: {out / FIGURE}"]
    return Answer(shown, {"kind": "demo", "dense": result.dense, "accuracies": rows, **files})
