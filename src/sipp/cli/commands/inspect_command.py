"""`sipp inspect`: verifies a stored network and shows what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import sipp
from sipp.cli.errors import naming_option
from sipp.cli.output import Answer
from sipp.results import to_json


def inspect(
    file: Annotated[Path, typer.Argument(help="A file from sipp.save, or a folder from `sipp prune`.")],
) -> Answer:
    """Show what is in a file from sipp.save or a folder from `sipp prune`: sizes, method, certificate."""
    with naming_option(f"FILE {file}", "give a file that sipp.save wrote, or a folder of `sipp prune`"):
        contents = sipp.inspect(file)
    return Answer([str(contents)], {"kind": "network file", "sipp": sipp.__version__, **to_json(contents)})
