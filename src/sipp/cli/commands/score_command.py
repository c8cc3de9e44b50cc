"""The command `sipp score`: the sensitivities of a network's weights, in summary and as a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sipp
from sipp.cli.errors import Trouble, at
from sipp.cli.options import (
    KINDS,
    MODEL_PANEL,
    OUTPUT_PANEL,
    BatchSize,
    Device,
    Exclude,
    Force,
    Include,
    Model,
    Normalise,
    PointsOption,
    ReduceOver,
    Seed,
    Weights,
    n_points_of,
)
from sipp.cli.output import Json, only_json, plain_table, print_json, show, size
from sipp.records.display import number
from sipp.storage.outputs import SCORES, SCORES_MARK, Inputs, check_file, write_file
from sipp.storage.tensors import tensors_to_bytes

if TYPE_CHECKING:
    from torch import Tensor


Delta = Annotated[
    float, typer.Option(help="Only for --points theory: failure probability (T4).", rich_help_panel=MODEL_PANEL)
]
Out = Annotated[
    Path | None,
    typer.Option(help="File for all scores: .safetensors, one tensor a weight.", rich_help_panel=OUTPUT_PANEL),
]


def score(
    model: Model,
    data: Annotated[str, typer.Option(help=f"Calibration points: {KINDS}.", rich_help_panel=MODEL_PANEL)],
    weights: Weights = None,
    normalise: Normalise = None,
    points: PointsOption = None,
    delta: Delta = 1e-16,
    include: Include = None,
    exclude: Exclude = None,
    reduce: ReduceOver = "max",
    out: Out = None,
    force: Force = False,
    as_json: Json = False,
    device: Device = "auto",
    batch_size: BatchSize = None,
    seed: Seed = 0,
) -> None:
    """Score every prunable weight: the largest share it ever contributes to an output of its row (T3)."""
    from sipp.cli.models import load_model, weights_read
    from sipp.cli.points import (
        check_fits,
        default_points,
        draw,
        example_of,
        images_lines,
        open_source,
        points_read,
        summary,
    )
    from sipp.scoring.theory_points import sample_size

    with only_json(as_json):
        if out is not None:
            _check_out(out, force, weights_read("--weights", weights) + points_read("--data", data))
        network = load_model(model, weights, seed=seed, device=device)
        source = open_source(data, "calibration", "--data", seed=seed, model=model, normalise=normalise)

        def needed() -> int:
            example = example_of(source, network, model, seed=seed)
            return sample_size(network, example, delta, include=include, exclude=exclude)

        with at(f"--model {model}, --data {data}", "see sipp score --help"):
            n = n_points_of(points, source.n_points, needed, lambda: default_points(source, "calibration", needed))
            chosen = draw(source, n, seed=seed, batch_size=batch_size, model=network)
            check_fits(network, chosen, model, "--data")
            begun = time.perf_counter()
            scores = sipp.sensitivity(network, chosen.batches, reduce=reduce, include=include, exclude=exclude)
            seconds = time.perf_counter() - begun
        layers = [_layer(name, scores_of) for name, scores_of in scores.items()]
        content = tensors_to_bytes(scores, SCORES_MARK) if out is not None else b""
        if out is not None:
            with at(f"--out {out}", "give another file"):
                write_file(out, content, SCORES, force=force)
        if not as_json:
            noise = ["noise: these are scores on random inputs, not on yours"] if chosen.kind == "random" else []
            show(f"data: {chosen.words}", *images_lines(chosen), _table(layers), *noise)
            show(f"scored in {seconds:.2f} s" + (f"; written: {out} ({size(len(content))})" if out is not None else ""))
    if as_json:
        about = {"kind": "scores", "sipp": sipp.__version__, "model": model, "reduce": reduce, "seed": seed}
        print_json(about | {"data": summary(chosen), "layers": layers, "seconds": round(seconds, 3), "written": out})


def _check_out(out: Path, force: bool, inputs: Inputs) -> None:
    """Refuses a file that scores cannot become, before any work."""
    with at(f"--out {out}", "give another file"):
        check_file(out, SCORES, force=force, inputs=inputs)
    if out.suffix != ".safetensors":
        raise Trouble(
            f"{out.name} is no name of scores", where=f"--out {out}", fix="give a name that ends in .safetensors"
        )


def _layer(name: str, scores: Tensor) -> dict[str, Any]:
    """Minimum, median, maximum and the share of zeros of one weight's scores."""
    flat = scores.detach().flatten().float().cpu()
    return {
        "name": name,
        "shape": list(scores.shape),
        "n_weights": flat.numel(),
        "min": float(flat.min()),
        "median": float(flat.median()),
        "max": float(flat.max()),
        "share_zero": float((flat == 0).float().mean()),
    }


def _table(layers: list[dict[str, Any]]) -> Any:
    table = plain_table("weight", "shape", "weights", "min", "median", "max", "zero")
    for layer in layers:
        numbers = (number(layer[key]) for key in ("min", "median", "max"))
        shape = " x ".join(map(str, layer["shape"]))
        table.add_row(layer["name"], shape, f"{layer['n_weights']:,}", *numbers, f"{layer['share_zero']:.2%}")
    return table
