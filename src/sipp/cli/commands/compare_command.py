"""`sipp compare`: compares pruning methods on a network and data; writes no files."""

from __future__ import annotations

from typing import Annotated

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.output import Answer
from sipp.results import Option, check, to_json, words


def compare(
    *,
    model: shared.Model,
    data: shared.NeededData,
    weights: shared.Weights = None,
    holdout: Annotated[
        str | None, Option("Inputs to test on; default: the last quarter of the data.", "Model and data")
    ] = None,
    device: shared.Device = "auto",
    inputs: shared.InputOptions,
    code: shared.CodeFiles = None,
    points: shared.PointsOption = None,
    keeps: Annotated[
        str, Option("Shares of the prunable weights to keep, each in (0, 1], separated by commas.", "What to prune")
    ] = "0.5,0.3,0.1",
    methods: Annotated[
        str | None,
        Option(
            f"Separated by commas: {', '.join(sipp.methods())}, or those from --code. Default: a usual set.",
            "What to prune",
        ),
    ] = None,
    include: shared.Include = None,
    exclude: shared.Exclude = None,
    part: shared.Part = None,
    repair: Annotated[
        bool, Option("Also try each method with repair: mask and weights found together.", "Repair")
    ] = False,
    seed: shared.Seed = 0,
) -> Answer:
    """Compare methods on your network: how far each moves the output, and which one to use.

    For example: sipp compare --model digits-cnn --data digits --keeps 0.5,0.2
    """
    from sipp.cli.data_option import Reader, normalisation_lines, summary
    from sipp.cli.model_option import load_model

    shared.load_code(code)
    shares = _parse_keeps(keeps)
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    for name in names or ():
        shared.check_method(name, f"--methods {methods:.60}")
    network = load_model(model, weights, seed=seed, device=device)
    reader = Reader(network, model, inputs, seed)
    chosen = reader.calibration(data, points, include=include, exclude=exclude)
    test = None if holdout is None else reader.holdout(holdout, None)
    with naming_option(f"--model {model}, --data {data}", "see sipp compare --help"):
        comparison = sipp.compare(
            network, chosen.batches, keeps=shares, methods=names, repair=repair,
            holdout=None if test is None else test.batches, include=include, exclude=exclude, output=part, seed=seed,
        )  # fmt: skip
    shown = [words.labelled_line("network", model), words.labelled_line("data", chosen.words)]
    shown += [] if test is None else [words.labelled_line("holdout", test.words)]
    shown += [*normalisation_lines(chosen, test), str(comparison)]
    if chosen.is_noise:
        shown.append(words.labelled_line("noise", "this shows how methods do on random inputs, not on yours"))
    about = {"kind": "comparison", "sipp": sipp.__version__, "model": model, "seed": seed}
    return Answer(shown, about | {"data": summary(chosen), "holdout": summary(test)} | to_json(comparison))


def _parse_keeps(keeps: str) -> list[float]:
    """Parses a comma-separated list of shares."""
    fix = "give numbers: 0.5,0.3,0.1"
    try:
        shares = [float(text) for text in keeps.split(",")]
    except ValueError as error:
        raise CommandError(f"{keeps!r:.60} is not a list of numbers", where=f"--keeps {keeps:.60}", fix=fix) from error
    with naming_option(f"--keeps {keeps:.60}", fix):
        for share in shares:
            check.keep("keep", share)
    return shares
