"""The command `sipp inspect`: what is in a file of a pruned network, checked, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.options import Json
from sipp.cli.output import only_json, print_json, show


def inspect(
    file: Annotated[Path, typer.Argument(help="A file from `sipp prune --out NAME.safetensors`, or from sipp.save.")],
    as_json: Json = False,
) -> None:
    """Show what is in a file from sipp.save: tensors and their sizes, method, statements, certificate."""
    from sipp.cli.stored_networks import built_in, contents_record, read_contents

    with only_json(as_json):
        contents = read_contents(file)
        name = built_in(contents)
        if not as_json:
            show(str(contents))
            show(f"network:         {name or 'no built-in one: --model says how to build it'}")
    if as_json:
        print_json(contents_record(contents, name))
