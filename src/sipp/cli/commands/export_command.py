"""`sipp export`: converts a pruned network to a format that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import Force, StoredOptions
from sipp.cli.output import Answer
from sipp.results.jsonio import to_json

N_POINTS = 2  # in the example: torch.export would specialise to a batch of 1
TRACED = ("pt2", "onnx")  # need an example


def export(
    *,
    stored: StoredOptions,
    to: Annotated[
        Literal["small", "safetensors", "pt", "pt2", "onnx", "hf"],
        typer.Option(
            help="The small file that sipp.save writes (small), weights (safetensors, pt), a program (pt2, onnx), or a "
            "Hugging Face folder (hf)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File; with hf, a new folder.")],
    force: Force = False,
    values: Annotated[
        Literal["same", "bf16", "fp16"],
        typer.Option(help="With hf and small: the precision of the weights.", metavar="FORMAT"),
    ] = "same",
    shard: Annotated[
        str | None, typer.Option(help="With hf: size of the largest file of weights, such as 5GB.")
    ] = None,
) -> Answer:
    """Export a pruned network for other programs; the result is read back and compared.

    For example: sipp export sparse --model my.py:net --to small --out small.safetensors
    """
    from sipp.cli.hugging_face_models import own_tokenizer
    from sipp.cli.out_option import check_out
    from sipp.cli.stored_option import example_for, stored_network

    if stored.data is not None and to not in TRACED:
        raise CommandError(f"--to {to} needs no example", where=f"--data {stored.data}", fix="leave it out")
    if to == "small" and shard is not None:
        raise CommandError("--to small writes a single file", where=f"--shard {shard}", fix="leave it out")
    if to == "hf" and force:
        raise CommandError(
            "a Hugging Face folder is never replaced", where="--force", fix="leave it out, and give a new folder"
        )
    check_out(out, force=force, reads={"FILE": stored.file, "--data": stored.data}, is_folder=to == "hf")
    network = stored_network(stored)
    example = example_for(network, stored, N_POINTS)[0] if to in TRACED else None
    with naming_option(f"FILE {stored.file}, --to {to}", "see sipp export --help"):
        if to == "small":
            precision = "fp32" if values == "same" else values
            written: object = sipp.save(network.model, out, values=precision, certificate=network.certificate)
        else:
            chosen = {} if shard is None else {"shard": shard}
            tokenizer = own_tokenizer(network.name) if to == "hf" else None
            written = sipp.export(
                network.model, out, to=to, example=example, values=values, tokenizer=tokenizer, **chosen
            )
    about = {"kind": "export", "sipp": sipp.__version__, "network": network.name, "to": to}
    return Answer([str(written)], to_json(written) | about)
