"""The command `sipp inspect`: what is in a file of a pruned network, checked, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sipp
from sipp.cli.output import Json, only_json, print_json, show

if TYPE_CHECKING:
    from sipp.records.contents import Contents


def inspect(
    file: Annotated[Path, typer.Argument(help="A file of `sipp prune --out NAME.safetensors`, or of sipp.save.")],
    as_json: Json = False,
) -> None:
    """Show what is in the file of a pruned network: bytes of every tensor, method, statements, certificate."""
    from sipp.cli.stored import built_in, read_contents

    with only_json(as_json):
        contents = read_contents(file)
        name = built_in(contents)
        if not as_json:
            show(str(contents))
            show(f"network:         {name or 'no built-in one: --model says how to build it'}")
    if as_json:
        print_json(_record(contents, name))


def _record(contents: Contents, name: str | None) -> dict[str, Any]:
    """The contents in JSON's types."""
    from dataclasses import asdict

    from sipp.records.certificate import certificate_values

    said = contents.statements
    keys = ("path", "sha256", "n_bytes", "dense_bytes", "bound_bytes", "model", "versions", "precision")
    return {
        "kind": "network file",
        "sipp": sipp.__version__,
        **{key: getattr(contents, key) for key in keys},
        "network": name,
        "tensors": [asdict(one) | {"bound_bytes": one.bound_bytes} for one in contents.tensors],
        "statements": None if said is None else said.model_dump(),
        "statements_about": contents.statements_about,
        "breaking_pattern": contents.breaking_pattern,
        "certificate": certificate_values(contents.certificate),
        "certificate_about": contents.certificate_about,
    }
