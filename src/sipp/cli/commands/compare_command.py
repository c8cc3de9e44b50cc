"""`sipp compare`: compares pruning methods on a network and data; writes no files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import MODEL_PANEL, PRUNE_PANEL, REPAIR_PANEL, option
from sipp.cli.output import Answer
from sipp.results.comparison import Comparison
from sipp.results.display import labelled_line
from sipp.scoring.methods import NAMES, method_of


def compare(
    *,
    model: shared.Model,
    data: shared.NeededData,
    weights: shared.Weights = None,
    holdout: Annotated[
        str | None, option("Inputs to test on; default: the last quarter of the data.", MODEL_PANEL)
    ] = None,
    device: shared.Device = "auto",
    inputs: shared.InputOptions,
    code: shared.CodeFiles = None,
    points: shared.PointsOption = None,
    keeps: Annotated[
        str, option("Shares of the prunable weights to keep, each in (0, 1], separated by commas.", PRUNE_PANEL)
    ] = "0.5,0.3,0.1",
    methods: Annotated[
        str | None,
        option(f"Separated by commas: {', '.join(NAMES)}, or those from --code. Default: a usual set.", PRUNE_PANEL),
    ] = None,
    include: shared.Include = None,
    exclude: shared.Exclude = None,
    holdout_points: shared.HoldoutPoints = None,
    output: shared.OutputPart = None,
    repair: Annotated[
        bool, option("Also try each method with repair: mask and weights found together.", REPAIR_PANEL, "--repair")
    ] = False,
    refit: shared.Refit = False,
    seed: shared.Seed = 0,
) -> Answer:
    """Compare methods on your network: how far each moves the output, and which one to use.

    For example: sipp compare --model digits-cnn --data digits --keeps 0.5,0.2
    """
    from sipp.cli.data_option import Reader, normalisation_lines, summary
    from sipp.cli.model_option import load_model
    from sipp.scoring.task import sample_size

    shared.load_code(code)
    shares, names = _parse_keeps(keeps), _parse_methods(methods)
    if holdout is None and holdout_points is not None:
        raise CommandError("there is no holdout", where="--holdout-points", fix="give --holdout, or leave it out")
    network = load_model(model, weights, seed=seed, device=device)
    reader = Reader(network, model, inputs, seed)
    where, fix = f"--model {model}, --data {data}", "see sipp compare --help"
    with naming_option(where, fix):
        source = reader.open(data)
        n_points = reader.n_calibration(
            source, points, lambda example: sample_size(network, example, include=include, exclude=exclude)
        )
        chosen = reader.draw(source, n_points)
    test = None if holdout is None else reader.holdout(holdout, holdout_points)
    with naming_option(where, fix):
        comparison = sipp.compare(
            network, chosen.batches, keeps=shares, methods=names, repair="refit" if refit else repair,
            holdout=None if test is None else test.batches, include=include, exclude=exclude,
            output=output, seed=seed,
        )  # fmt: skip
    shown = [labelled_line("network", model), labelled_line("data", chosen.words)]
    shown += [] if test is None else [labelled_line("holdout", test.words)]
    shown += [*normalisation_lines(chosen, test), str(comparison)]
    if chosen.is_noise:
        shown.append(labelled_line("noise", "this shows how methods do on random inputs, not on yours"))
    about = {"kind": "comparison", "sipp": sipp.__version__, "model": model, "seed": seed}
    return Answer(shown, about | {"data": summary(chosen), "holdout": summary(test)} | _as_json(comparison))


def _parse_keeps(keeps: str) -> list[float]:
    """Parses a comma-separated list of shares."""
    shares = []
    for text in keeps.split(","):
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise CommandError(
                f"{text!r} is not a share in (0, 1]", where=f"--keeps {keeps:.60}", fix="give numbers: 0.5,0.3,0.1"
            )
        shares.append(share)
    return shares


def _parse_methods(methods: str | None) -> list[str] | None:
    """Parses a comma-separated list of methods; None: the default set."""
    if methods is None:
        return None
    with naming_option(f"--methods {methods:.60}", f"give some of {','.join(NAMES)}"):
        return [method_of(text.strip()).name for text in methods.split(",")]


def _as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON values, without those of single points."""
    rows = [{key: value for key, value in asdict(row).items() if key != "moved"} for row in comparison.rows]
    counts = {name: getattr(comparison, name) for name in ("n_weights", "n_calibration", "n_test", "is_held_back")}
    best = [comparison.best(keep).name for keep in comparison.keeps]
    about = {"dense_accuracy": comparison.dense_accuracy, "keeps": comparison.keeps, "best": best}
    return counts | about | {"sentence": comparison.sentence, "rows": rows}
