"""`sipp demo`: trains, prunes and compares on built-in data in under a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from sipp.cli.options import out as to_write
from sipp.cli.output import Answer, record_of


def demo(
    out: Annotated[Path, to_write("Folder for the page.")] = Path("demo"),
    force: bool = False,
) -> Answer:
    """Train a small network on built-in digits, prune it with several methods, and show the accuracy lost."""
    from sipp_lab.demo import run_demo

    done = run_demo(out, force=force)
    return Answer([done], record_of("demo", done))
