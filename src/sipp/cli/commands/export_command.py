"""`sipp export`: converts a pruned network to a format that other programs read, or to one small file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import sipp
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import Stored, out as to_write, out_short
from sipp.cli.output import Answer, check_out, record_of
from sipp.files import FILE_SUFFIX

N_INPUTS = 2  # in the example: torch.export would specialise to a batch of 1
ONNX = ".onnx"


def export(
    *,
    stored: Stored,
    out: Annotated[
        Path,
        out_short(
            f"NAME{FILE_SUFFIX}: the small file that sipp.save writes; NAME{ONNX}; any other name: a new Hugging Face "
            "folder."
        ),
    ],
    force: bool = False,
    values: Annotated[
        Literal["same", "bf16", "fp16"],
        to_write("For a small file or a folder: the precision of the weights.", metavar="FORMAT"),
    ] = "same",
    shard: Annotated[str | None, to_write("For a folder: size of the largest file of weights, such as 5GB.")] = None,
    push: Annotated[
        str | None,
        to_write(
            "For a folder: upload it with its model card to this repository of the Hugging Face hub, private if new.",
            metavar="USER/NAME",
        ),
    ] = None,
    sparse: Annotated[
        bool, to_write("For an ONNX file: leave the zeros out. onnxruntime reads it; other programs may not.")
    ] = False,
) -> Answer:
    """Export a pruned network for other programs, or as one small file, and verify it.

    For example: sipp export sparse --model my.py:net --out small.safetensors
    """
    from sipp.cli.hugging_face import upload
    from sipp.cli.stored import inputs_for, stored_network

    is_small, is_onnx = out.suffix == FILE_SUFFIX, out.suffix == ONNX
    is_folder = not (is_small or is_onnx)
    for name, value, has_effect in (
        ("data", stored.data, is_onnx), ("shard", shard, is_folder), ("push", push, is_folder),
        ("force", force or None, not is_folder), ("values", None if values == "same" else values, not is_onnx),
        ("sparse", sparse or None, is_onnx),
    ):  # fmt: skip
        if value is not None and not has_effect:
            raise CommandError(f"it has no effect on {out.name}", where=f"--{name}", fix="leave it out")
    check_out(out, force=force, reads={"FILE": stored.file, "--data": stored.data}, is_folder=is_folder)
    network = stored_network(stored)
    example = inputs_for(network, stored, N_INPUTS).example if is_onnx else None
    written: Any
    with naming_option(f"FILE {stored.file}, --out {out}", "see sipp export --help"):
        if is_small:
            precision = "fp32" if values == "same" else values
            written = sipp.save(network.pruned or network.model, out, values=precision, certificate=network.certificate)
        else:
            written = sipp.export(
                network.pruned or network.model,
                out,
                example,
                values=values,
                certificate=network.certificate if is_folder and network.pruned is not None else None,
                sparse=sparse,
                shard=shard,
            )
    lines = [str(written)]
    record = written.values if is_small else record_of("export", written)
    if push is not None:
        with naming_option(f"--push {push}", "see sipp export --help"):
            record["pushed"] = upload(out, push)
        lines.append(f"uploaded to {record['pushed']}")
    return Answer(lines, record)
