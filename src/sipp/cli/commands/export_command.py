"""`sipp export`: converts a pruned network to a format that other programs read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import KINDS, Normalise, Size
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.storage.outputs import check_place

N_POINTS = 2  # in the example: torch.export would specialise to a batch of 1

OwnModel = Annotated[
    str | None, typer.Option(help="Your own network as package.module:callable; built-in networks are recognised.")
]


def export(
    file: Annotated[Path, typer.Argument(help="A file from sipp.save, or a folder from `sipp prune`.")],
    to: Annotated[
        Literal["small", "safetensors", "pt", "pt2", "onnx", "hf", "reader"],
        typer.Option(
            help="The small file that sipp.save writes (small), weights (safetensors, pt), a program (pt2, onnx), a "
            "Hugging Face folder (hf), or code that reads FILE with NumPy alone (reader)."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New file; with hf, new folder. Nothing is replaced.")],
    model: OwnModel = None,
    data: Annotated[
        str | None,
        typer.Option(
            help=f"Example inputs for pt2 and onnx; default: noise for a built-in network. Otherwise {KINDS}."
        ),
    ] = None,
    normalise: Normalise = None,
    size: Size = None,
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
    from sipp.cli.stored_networks import contents_record, example_for, save_small, stored_network
    from sipp.records.saved_file import SavedFile
    from sipp.runtime.exporting import TRACED, Exported, export_reader
    from sipp.runtime.exporting import export as export_network

    name: str | None
    written: Exported | SavedFile
    for option, value in (("--data", data), ("--normalise", normalise), ("--size", size)):
        if value is not None and to not in TRACED:
            raise CommandError(f"--to {to} needs no example", where=f"{option} {value}", fix="leave it out")
    with naming_option(f"--out {out}", "give another place"):
        check_out(out)
    if to == "reader":
        rounded = None if values == "same" else values
        for option, unused in (("--model", model), ("--values", rounded), ("--shard", shard)):
            if unused is not None:
                raise CommandError(
                    "--to reader writes the same script for every network",
                    where=f"{option} {unused}",
                    fix="leave it out",
                )
        with naming_option(f"FILE {file}, --to {to}", "give a file from sipp.save"):
            name, written = None, export_reader(file, out)
    elif to == "small":
        if shard is not None:
            raise CommandError("--to small writes a single file", where=f"--shard {shard}", fix="leave it out")
        stored = stored_network(file, model)
        with naming_option(f"FILE {file}, --to {to}", "see sipp export --help"):
            name, written = stored.name, save_small(stored, out, values)
    else:
        stored = stored_network(file, model)
        example = example_for(stored, data, N_POINTS, normalise, size)[0] if to in TRACED else None
        with naming_option(f"FILE {file}, --to {to}", "see sipp export --help"):
            chosen = {} if shard is None else {"shard": shard}
            tokenizer = own_tokenizer(stored.name) if to == "hf" else None
            written = export_network(
                stored.model, out, to=to, example=example, values=values, tokenizer=tokenizer, **chosen
            )
        name = stored.name
    record = asdict(written) if isinstance(written, Exported) else contents_record(written, name)
    return Answer([str(written)], {**record, "kind": "export", "sipp": sipp.__version__, "network": name, "to": to})


def check_out(path: Path) -> None:
    """Refuses an unwritable or existing path: exported files may be in use."""
    check_place(path)
    if not path.parent.is_dir():
        raise OptionError(f"{path.parent} is not a folder", fix="make it first, or give another place")
    if path.is_symlink() or path.exists():
        raise OptionError(f"{path} exists", fix="give another name, or move it away")
