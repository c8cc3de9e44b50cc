"""`sipp eval`: measures a pruned network against the dense one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import sipp
from sipp.cli.errors import naming_option
from sipp.cli.options import KINDS, Device, Reading, to_record
from sipp.cli.output import Answer, check_out, record_of, write_record
from sipp.results import Option, words


def eval(  # the name of the command
    *,
    model: str,
    pruned: Path,
    dense: Path | None = None,
    data: Annotated[str, Option(f"Inputs to measure on: {KINDS}. For a data set, its test part.", "Model and data")],
    reading: Reading,
    points: Annotated[
        int | None,
        Option("How many inputs. Default: all, up to 5,000 images from a folder.", "Model and data", least=1),
    ] = None,
    part: int | str | None = None,
    out: Annotated[Path | None, to_record] = None,
    force: bool = False,
    device: Device = "auto",
) -> Answer:
    """Compare a pruned network with the dense one: accuracy (or perplexity) and output error.

    For example: sipp eval --model my.py:net --dense my.pt --pruned sparse --data new.npz --out sparse/eval.json
    """
    from sipp.cli.inputs import Reader, input_lines
    from sipp.cli.networks import both_networks
    from sipp.cli.texts import is_language_model, is_text, windows

    check_out(out, force=force, reads={"--pruned": pruned, "--dense": dense, "--data": data})
    networks = both_networks(model, dense, pruned, device)
    measured: Any
    if is_language_model(model) and is_text(Path(data)):
        with naming_option(f"--model {model}, --data {data}", "see sipp eval --help"):
            read_nT, text = windows(Path(data), model, reading.length, points)
            measured = sipp.perplexity(networks[1], read_nT, dense=networks[0], output=part)
        lines = [words.labelled_line("data", text)]
    else:
        drawn = Reader(networks[0], model, reading).holdout(data, points, "--data")
        lines, text = input_lines(drawn), drawn.words
        with naming_option(f"--model {model}, --data {data}", "see sipp eval --help"):
            measured = sipp.evaluate(*networks, drawn.batches, output=part)
        if measured.accuracies is None and drawn.unlabelled:
            measured = replace(measured, why_no_accuracy=drawn.unlabelled)
    measured = replace(measured, inputs=text)
    record = record_of(type(measured).__name__, measured)
    network = f"{model}, dense {dense or 'weights of that folder'}, pruned {pruned}"
    lines = [words.labelled_line("network", network), *lines, str(measured)]
    lines.append(words.labelled_line("", "measured on these inputs only; for new ones, use sipp certify"))
    return Answer([*lines, *write_record(out, record)], record)
