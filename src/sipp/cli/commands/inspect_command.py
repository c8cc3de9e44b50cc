"""`sipp inspect`: verifies a file from sipp.save and shows its content."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.output import Answer
from sipp.results.display import labelled_line


def inspect(
    file: Annotated[Path, typer.Argument(help="A file from `sipp prune --out NAME.safetensors`, or from sipp.save.")],
) -> Answer:
    """Show what is in a file from sipp.save: tensors and their sizes, method, statements, certificate."""
    from sipp.cli.stored_networks import built_in, contents_record, read_contents

    contents = read_contents(file)
    name = built_in(contents)
    network = labelled_line("network", name or "no built-in one: --model says how to build it")
    return Answer([str(contents), network], contents_record(contents, name))
