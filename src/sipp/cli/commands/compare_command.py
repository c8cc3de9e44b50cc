"""`sipp compare`: compares pruning methods on a network and data; writes no files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import sipp
from sipp.cli.errors import naming_option
from sipp.cli.options import Device, Reading, load_code
from sipp.cli.output import Answer, record_of
from sipp.errors import OptionError
from sipp.results import Option, check, words


def compare(
    *,
    model: str,
    data: str,
    weights: Path | None = None,
    holdout: Annotated[
        str | None, Option("Inputs to test on. Default: a quarter of the data.", "Model and data")
    ] = None,
    reading: Reading,
    code: list[Path] | None = None,
    points: int | None = None,
    keeps: Annotated[
        str, Option("Shares of the prunable weights to keep, each in (0, 1], separated by commas.", "What to prune")
    ] = "0.5,0.3,0.1",
    methods: Annotated[
        str | None,
        Option("Separated by commas: {methods}, or those from --code. Default: a usual set.", "What to prune"),
    ] = None,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    part: int | str | None = None,
    repair: Annotated[bool, Option("Also try each method with repair, as in `sipp prune --repair`.", "Repair")] = False,
    device: Device = "auto",
) -> Answer:
    """Compare methods on your network: the output error of each, and which one to use.

    For example: sipp compare --model digits-cnn --data digits --keeps 0.5,0.2
    """
    from sipp.cli.inputs import Reader, input_lines, summary_of
    from sipp.cli.networks import load_model

    load_code(code)
    shares = _parse_keeps(keeps)
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    network = load_model(model, weights, device=device)
    reader = Reader(network, model, reading)
    chosen = reader.calibration(data, points, include=include, exclude=exclude)
    test = None if holdout is None else reader.holdout(holdout)
    with naming_option(f"--model {model}, --data {data}", "see sipp compare --help"):
        comparison = sipp.compare(
            network, chosen.batches, keeps=shares, methods=names, repair=repair,
            holdout=None if test is None else test.batches, include=include, exclude=exclude, output=part,
        )  # fmt: skip
    shown = [words.labelled_line("network", model), *input_lines(chosen, test), str(comparison)]
    about = {"model": model, "data": summary_of(chosen), "holdout": summary_of(test)}
    return Answer(shown, record_of("comparison", comparison, about))


def _parse_keeps(keeps: str) -> list[float]:
    """Parses a comma-separated list of shares."""
    with naming_option(f"--keeps {keeps:.60}", "give numbers: 0.5,0.3,0.1"):
        try:
            return [check.keep("keep", float(text)) for text in keeps.split(",")]
        except ValueError as error:
            raise OptionError(f"{keeps!r:.60} is not a list of numbers") from error
