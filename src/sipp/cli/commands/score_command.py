"""`sipp score`: computes the sensitivities of a network's weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import MODEL_PANEL, OUTPUT_PANEL, option
from sipp.cli.output import Answer
from sipp.records.display import bytes_in_words, number, plain_table
from sipp.records.options import DELTA
from sipp.storage.outputs import SCORES, SCORES_MARK, check_file, refuse_input, write_file
from sipp.storage.tensors import tensors_to_bytes


def score(
    model: shared.Model,
    data: shared.NeededData,
    weights: shared.Weights = None,
    normalise: shared.Normalise = None,
    size: shared.Size = None,
    length: shared.Length = None,
    points: shared.PointsOption = None,
    delta: Annotated[float, option("Only for --points theory: the allowed failure probability.", MODEL_PANEL)] = DELTA,
    include: shared.Include = None,
    exclude: shared.Exclude = None,
    reduce: shared.ReduceOver = "max",
    out: Annotated[
        Path | None, option("File for all scores: .safetensors, one tensor per weight.", OUTPUT_PANEL)
    ] = None,
    force: shared.Force = False,
    device: shared.Device = "auto",
    batch_size: shared.BatchSize = None,
    seed: shared.Seed = 0,
) -> Answer:
    """Score every weight by its sensitivity: the largest share that it contributes to an output."""
    from sipp.cli.data_option import Reader, normalisation_lines, summary
    from sipp.cli.model_option import load_model
    from sipp.scoring.theory_points import sample_size

    if out is not None:
        with naming_option(f"--out {out}", "give another file"):
            if weights is not None:
                refuse_input(out, "--weights", weights)
            check_file(out, SCORES, force=force)
        if out.suffix != ".safetensors":
            raise CommandError(
                f"{out.name} does not end in .safetensors",
                where=f"--out {out}",
                fix="give a name that ends in .safetensors",
            )
    network = load_model(model, weights, seed=seed, device=device)
    reader = Reader(network, model, normalise, seed, batch_size, length, size)
    with naming_option(f"--model {model}, --data {data}", "see sipp score --help"):
        chosen = reader.calibration(
            data,
            points,
            lambda example: sample_size(network, example, delta, include=include, exclude=exclude),
        )
        begun = time.perf_counter()
        scores = sipp.sensitivity(network, chosen.batches, reduce=reduce, include=include, exclude=exclude)
        seconds = time.perf_counter() - begun
    layers = [_summarise(name, scores_of) for name, scores_of in scores.items()]
    content = tensors_to_bytes(scores, SCORES_MARK) if out is not None else b""
    if out is not None:
        with naming_option(f"--out {out}", "give another file"):
            write_file(out, content, SCORES, force=force)
    noise = ["noise: these are scores on random inputs, not on yours"] if chosen.is_noise else []
    written = f"; written: {out} ({bytes_in_words(len(content))})" if out is not None else ""
    shown = [f"data: {chosen.words}", *normalisation_lines(chosen), _table(layers), *noise]
    shown.append(f"scored in {seconds:.2f} s{written}")
    about = {"kind": "scores", "sipp": sipp.__version__, "model": model, "reduce": reduce, "seed": seed}
    values = {"data": summary(chosen), "layers": layers, "seconds": round(seconds, 3), "written": out}
    return Answer(shown, about | values)


def _summarise(name: str, scores: Any) -> dict[str, Any]:
    """Minimum, median, maximum and share of zeros of one weight's scores."""
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
