"""`sipp shrink`: removes dead channels from a stored network."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import sipp
from sipp.cli.commands.export_command import N_POINTS
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import StoredOptions
from sipp.cli.output import Answer
from sipp.results.jsonio import to_json

KINDS = (".pt", ".onnx")


def shrink(
    *,
    stored: StoredOptions,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="New file: NAME.pt (the module, by torch.save), or NAME.onnx."),
    ],
) -> Answer:
    """Remove dead channels for good: a smaller dense network with the same outputs."""
    from sipp.cli.out_option import check_new
    from sipp.cli.stored_networks import example_for, stored_network

    if out.suffix not in KINDS:
        raise CommandError(
            f"{out.name} ends in none of {', '.join(KINDS)}",
            where=f"--out {out}",
            fix="the ending chooses the format",
        )
    check_new(out)
    network = stored_network(stored.file, stored.model)
    example = example_for(network, stored, N_POINTS)[0]
    with naming_option(f"FILE {stored.file}", "see sipp shrink --help"):
        small = sipp.shrink(network.model, example)
        certificate = network.contents.certificate
        if certificate is not None and certificate.pruned_hash == small.hash_before:
            small = replace(small, certificate=certificate)
        if out.suffix == ".pt":
            _write_module(small.model, out)
        else:
            sipp.export(small, out, example)
    values = {"kind": "shrink", "sipp": sipp.__version__, "network": network.name, **to_json(small), "path": out}
    return Answer([str(small), f"{out}: {out.stat().st_size:,} bytes"], values)


def _write_module(model: Any, path: Path) -> None:
    import torch

    from sipp.storage.files import write_atomic

    content = io.BytesIO()
    try:
        torch.save(model, content)
    except Exception as error:  # user classes may raise anything
        raise sipp.errors.ModelError(
            f"torch.save cannot write its {type(model).__name__} ({type(error).__name__}: {error})",
            fix="give a name that ends in .onnx",
        ) from error
    write_atomic(path, content.getvalue())
