"""`sipp eval`: measures a pruned network against the dense one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import KINDS
from sipp.cli.output import Answer
from sipp.results import Option, to_json, words


def eval(  # the name of the command
    *,
    model: shared.Model,
    pruned: shared.PrunedWeights,
    dense: shared.Dense = None,
    data: Annotated[str, Option(f"Inputs to measure on: {KINDS}. For a data set, its test part.", "Model and data")],
    device: shared.Device = "auto",
    inputs: shared.InputOptions,
    points: Annotated[
        int | None,
        Option("How many inputs; default: all, up to 5,000 images from a folder.", "Model and data", least=1),
    ] = None,
    part: shared.Part = None,
    out: Annotated[
        Path | None, Option("File for the record; in the network's folder, it appears on the page.", "Output")
    ] = None,
    force: shared.Force = False,
) -> Answer:
    """Compare a pruned network with the dense one: accuracy (or perplexity), and how far outputs move.

    For example: sipp eval --model my.py:net --dense my.pt --pruned sparse --data new.npz --out sparse/eval.json
    """
    from sipp.cli.data_option import Reader, normalisation_lines
    from sipp.cli.language_text import is_language_model, is_text, windows
    from sipp.cli.model_option import both_networks
    from sipp.cli.out_option import check_out, write_record
    from sipp.results import EVALUATION_KIND

    is_noise = data.startswith("random:")
    check_out(out, force=force, reads={"--pruned": pruned, "--dense": dense, "--data": data})
    if out is not None and is_noise:
        raise CommandError(
            "results on noise do not show how good a network is",
            where=f"--out {out}",
            fix="leave it out, or give --data of your own",
        )
    networks = both_networks(model, dense, pruned, device)
    measured: Any
    images: list[str] = []
    if not is_noise and is_language_model(model) and is_text(Path(data)):
        with naming_option(f"--model {model}, --data {data}", "see sipp eval --help"):
            read_nT, text = windows(Path(data), model, inputs.length, points)
            measured = sipp.perplexity(networks[1], read_nT, dense=networks[0], output=part)
    else:
        reader = Reader(networks[0], model, inputs)
        drawn = reader.draw(reader.open(data), points) if is_noise else reader.holdout(data, points, "--data")
        text, images = drawn.words, normalisation_lines(drawn)
        with naming_option(f"--model {model}, --data {data}", "see sipp eval --help"):
            measured = sipp.evaluate(*networks, drawn.batches, output=part)
        if measured.dense is None and drawn.unlabelled:
            measured = replace(measured, why_no_accuracy=drawn.unlabelled)
    measured = replace(measured, inputs=text)
    asked = {"model": model, "dense": dense, "pruned": pruned, "data": data, "part": part}
    record = {"kind": EVALUATION_KIND, "sipp": sipp.__version__, "asked": to_json(asked), **to_json(measured)}
    lines = [
        words.labelled_line("network", f"{model}, dense {dense or 'weights of that folder'}, pruned {pruned}"),
        words.labelled_line("data", text),
        *images,
        str(measured),
        words.labelled_line("", "measured on these inputs only; sipp certify makes a claim about new ones"),
    ]
    if is_noise:
        lines.append(words.labelled_line("noise", "this shows what the networks do on random inputs, not on yours"))
    return Answer([*lines, *write_record(out, record)], record)
