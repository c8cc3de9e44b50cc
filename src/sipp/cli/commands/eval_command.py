"""The command `sipp eval`: how good a pruned network is beside the dense one, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sipp.cli.options import KINDS, BatchSize, Device, Force, HoldoutPoints, Model, Normalise, OutputPart, Seed
from sipp.cli.output import Json, only_json, print_json, show


def eval(  # the name of the command
    model: Model,
    dense: Annotated[Path, typer.Option(help="Weights of the dense network: .safetensors or .pt.")],
    pruned: Annotated[Path, typer.Option(help="Weights of the pruned network, or its folder from `sipp prune`.")],
    data: Annotated[str, typer.Option(help=f"Points to measure on: {KINDS}. Of a set, its test part.")],
    normalise: Normalise = None,
    points: HoldoutPoints = None,
    output: OutputPart = None,
    out: Annotated[
        Path | None, typer.Option(help="New file for the record; NAME.json in the network's folder is on its page.")
    ] = None,
    force: Force = False,
    seed: Seed = 0,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure accuracy, loss and epsilon of a pruned network beside the dense one."""
    from sipp.cli.evaluating import EvalRequest, answer

    request = EvalRequest(
        model=model, dense=dense, pruned=pruned, data=data, normalise=normalise, points=points, output=output,
        out=out, force=force, seed=seed, batch_size=batch_size, device=device,
    )  # fmt: skip
    with only_json(as_json):
        found = answer(request)
    if as_json:
        print_json(found.record)
    else:
        show(*found.lines)
