"""`sipp inspect`: verifies a stored network and shows what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.output import Answer, record_of


def inspect(
    file: Annotated[Path, typer.Argument(help="A file from sipp.save, or a folder from `sipp prune`.")],
) -> Answer:
    """Show what is in a file from sipp.save or a folder from `sipp prune`: sizes, method, certificate."""
    from sipp.cli.stored import contents_of

    contents = contents_of(file)
    return Answer([str(contents)], record_of("network file", contents))
