"""`sipp demo`: trains, prunes and compares on built-in data in under a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.options import Force
from sipp.cli.output import Answer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of the whole run: the same seed prints the same numbers.")] = 0,
    force: Force = False,
) -> Answer:
    """Train a small network on built-in digits, prune it with several methods, and show what that costs."""
    from sipp.cli.demo import demo_table, run_demo

    records, page = run_demo(out, seed=seed, force=force)
    return Answer([demo_table(records), f"page: {page}"], {"kind": "demo", "page": page, "records": records})
