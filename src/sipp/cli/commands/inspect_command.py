"""`sipp inspect`: verifies a stored network and shows its content."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.output import Answer


def inspect(
    file: Annotated[Path, typer.Argument(help="A file from sipp.save, or a folder from `sipp prune`.")],
) -> Answer:
    """Show what is in a file from sipp.save or a folder from `sipp prune`: sizes, method, certificate."""
    from sipp.cli.stored import record_in

    record = record_in(file)
    return Answer([str(record)], record.values)
