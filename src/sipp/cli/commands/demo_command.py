"""The command `sipp demo`: the main job on embedded data, in under a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.options import Force, Json
from sipp.cli.output import only_json, print_json, show


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and the figure.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the whole run: the same seed prints the same numbers.")] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train a small network on built-in digits, prune it with several methods, and show what that costs."""
    from sipp.cli.demo import FIGURE, demo_table, run_demo

    with only_json(as_json):
        result = run_demo(out, seed=seed, force=force)
    if not as_json:
        show(demo_table(result), f"page: {result.page}, figure: {out / FIGURE}")
        return
    rows = [
        {"method": method, "keep": keep, "pruned": share, "retrained": result.after[method, keep]}
        for (method, keep), share in result.before.items()
    ]
    files = {"page": result.page, "figure": out / FIGURE}
    print_json({"kind": "demo", "dense": result.dense, "accuracies": rows, **files})
