"""`sipp export`: converts a pruned network to a format that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import StoredOptions
from sipp.cli.output import Answer
from sipp.results.jsonio import to_json

N_POINTS = 2  # in the example: torch.export would specialise to a batch of 1


def export(
    *,
    stored: StoredOptions,
    to: Annotated[
        Literal["small", "onnx", "hf"],
        typer.Option(
            help="The small file that sipp.save writes (small), NAME.onnx (onnx), or a Hugging Face folder (hf)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New file; with hf, new folder. Nothing is replaced.")],
    values: Annotated[
        Literal["same", "bf16", "fp16"],
        typer.Option(help="With hf and small: the precision of the weights.", metavar="FORMAT"),
    ] = "same",
    shard: Annotated[
        str | None, typer.Option(help="With hf: size of the largest file of weights, such as 5GB.")
    ] = None,
) -> Answer:
    """Export a pruned network for other programs; the result is read back and compared."""
    from sipp.cli.hugging_face_models import own_tokenizer
    from sipp.cli.out_option import check_new
    from sipp.cli.stored_networks import contents_record, example_for, save_small, stored_network
    from sipp.results.saved_file import SavedFile
    from sipp.runtime.exported import Exported

    written: Exported | SavedFile
    for name in ("data", "normalise", "size"):
        if (value := getattr(stored, name)) is not None and to != "onnx":
            raise CommandError(f"--to {to} needs no example", where=f"--{name} {value}", fix="leave it out")
    if to == "small" and shard is not None:
        raise CommandError("--to small writes a single file", where=f"--shard {shard}", fix="leave it out")
    if to != "small" and (to == "onnx") != (out.suffix == ".onnx"):
        raise CommandError(
            f"{out.name} does not fit --to {to}",
            where=f"--out {out}",
            fix="give NAME.onnx for onnx, a new folder for hf",
        )
    check_new(out)
    network = stored_network(stored.file, stored.model)
    example = example_for(network, stored, N_POINTS)[0] if to == "onnx" else None
    with naming_option(f"FILE {stored.file}, --to {to}", "see sipp export --help"):
        if to == "small":
            written = save_small(network, out, values)
        else:
            chosen = {} if shard is None else {"shard": shard}
            tokenizer = own_tokenizer(network.name) if to == "hf" else None
            written = sipp.export(network.model, out, example, values=values, tokenizer=tokenizer, **chosen)
    record = to_json(written) if isinstance(written, Exported) else contents_record(written, network.name)
    about = {"kind": "export", "sipp": sipp.__version__, "network": network.name, "to": to}
    return Answer([str(written)], record | about)
