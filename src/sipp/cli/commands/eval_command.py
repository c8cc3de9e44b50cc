"""The command `sipp eval`: how good a pruned network is beside the dense one, measured; it writes no file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import sipp
from sipp.cli.errors import at
from sipp.cli.options import (
    KINDS,
    MODEL_PANEL,
    BatchSize,
    Device,
    HoldoutPoints,
    Model,
    Normalise,
    OutputPart,
    Seed,
    output_of,
)
from sipp.cli.output import Json, only_json, print_json, show


def eval(  # the name of the command
    model: Model,
    dense: Annotated[
        Path, typer.Option(help="Weights of the dense network: .safetensors or .pt.", rich_help_panel=MODEL_PANEL)
    ],
    pruned: Annotated[
        Path,
        typer.Option(
            help="Weights of the pruned network, or its folder from `sipp prune`.", rich_help_panel=MODEL_PANEL
        ),
    ],
    data: Annotated[
        str, typer.Option(help=f"Points to measure on: {KINDS}. Of a set, its test part.", rich_help_panel=MODEL_PANEL)
    ],
    normalise: Normalise = None,
    points: HoldoutPoints = None,
    output: OutputPart = None,
    as_json: Json = False,
    device: Device = "auto",
    batch_size: BatchSize = None,
    seed: Seed = 0,
) -> None:
    """Measure accuracy, loss and epsilon of a pruned network beside the dense one."""
    from sipp.cli.evaluating import evaluate
    from sipp.cli.models import load_model
    from sipp.cli.points import Role, check_fits, default_points, draw, images_lines, open_source, summary

    with only_json(as_json):
        networks = [
            load_model(model, path, option=option, device=device)
            for option, path in (("--dense", dense), ("--pruned", pruned))
        ]
        role: Role = "calibration" if data.startswith("random:") else "holdout"  # noise is no holdout: it shows shapes
        source = open_source(data, role, "--data", seed=seed, model=model, normalise=normalise)
        n = points or default_points(source, "holdout", lambda: 0)
        drawn = draw(source, n, seed=seed, batch_size=batch_size, model=networks[0])
        check_fits(networks[0], drawn, model, "--data")
        with at(f"--model {model}, --data {data}", "see sipp eval --help"):
            found = evaluate(networks[0], networks[1], drawn.batches, output_of(output))
        if not as_json:
            show(f"network: {model}, dense {dense}, pruned {pruned}", f"data:    {drawn.words}")
            show(*images_lines(drawn), str(found))
            if drawn.kind == "random":
                show("noise:           this is what the networks do on random inputs, not on yours")
    if as_json:
        about = {"kind": "evaluation", "sipp": sipp.__version__, "model": model, "data": summary(drawn)}
        print_json(about | {"dense": dense, "pruned": pruned} | asdict(found))
