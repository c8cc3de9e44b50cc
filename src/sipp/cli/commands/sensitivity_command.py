"""`sipp sensitivity`: writes the sensitivity of every prunable weight, and checks the theory's assumption."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import naming_option
from sipp.cli.options import OUTPUT_PANEL, PRUNE_PANEL, option, prune_option
from sipp.cli.output import Answer
from sipp.results.display import labelled_line
from sipp.results.options import C_CONSTANT, K_CONSTANT, PruneOptions, Reduce, Scoring


def sensitivity(
    *,
    model: shared.Model,
    data: shared.NeededData,
    out: Annotated[
        Path, option("New .safetensors file: a tensor of scores for each weight. Nothing is replaced.", OUTPUT_PANEL)
    ],
    weights: shared.Weights = None,
    holdout: Annotated[
        str | None, option("New inputs on which to look at the theory's inequality, too.", shared.GUARANTEE_PANEL)
    ] = None,
    holdout_points: shared.HoldoutPoints = None,
    device: shared.Device = "auto",
    inputs: shared.InputOptions,
    points: shared.PointsOption = None,
    include: shared.Include = None,
    exclude: shared.Exclude = None,
    reduce: Annotated[
        Reduce,
        option("How to combine a weight's scores over positions: max, as the theory does, or mean.", PRUNE_PANEL),
    ] = "max",
    c_constant: Annotated[float, prune_option("c_constant")] = C_CONSTANT,
    k_constant: Annotated[float, prune_option("k_constant")] = K_CONSTANT,
    batchnorm: shared.BatchNorm = None,
    seed: shared.Seed = 0,
) -> Answer:
    """Write the sensitivity of every prunable weight to a file, and check the theory's assumption.

    For example: sipp sensitivity --model digits-cnn --data digits --out scores.safetensors
    """
    from sipp.cli.data_option import Reader, normalisation_lines, summary
    from sipp.cli.errors import CommandError
    from sipp.cli.model_option import load_model, norm_stats_lines, norm_stats_of
    from sipp.cli.out_option import check_new
    from sipp.storage.files import write_atomic
    from sipp.storage.tensors import tensors_to_bytes

    if holdout is None and holdout_points is not None:
        raise CommandError("there is no holdout", where="--holdout-points", fix="give --holdout, or leave it out")
    check_new(out)
    with naming_option("--c-constant, --k-constant", "leave it out"):
        PruneOptions(c_constant=c_constant, k_constant=k_constant)
    network = load_model(model, weights, seed=seed, device=device)
    norm_stats = norm_stats_of(network, batchnorm)
    reader = Reader(network, model, inputs, seed)
    test = None if holdout is None else reader.holdout(holdout, holdout_points)
    with naming_option(f"--model {model}, --data {data}", "see sipp sensitivity --help"):
        source = reader.open(data)
        n_points = reader.n_calibration(
            source,
            points,
            lambda example: sipp.sample_size(network, example, include=include, exclude=exclude, k_constant=k_constant),
        )
        chosen = reader.draw(source, n_points)
        scoring = Scoring(norm_stats=norm_stats)
        scores = sipp.sensitivity(
            network, chosen.batches, reduce=reduce, include=include, exclude=exclude, seed=seed, scoring=scoring
        )
        assumption = sipp.check_assumption(
            network, chosen.batches, None if test is None else test.batches, include=include, exclude=exclude,
            seed=seed, scoring=scoring, c_constant=c_constant, k_constant=k_constant,
        )  # fmt: skip
    with naming_option(f"--out {out}", "give another place"):
        write_atomic(out, tensors_to_bytes(scores))
    shown = [labelled_line("network", model), labelled_line("data", chosen.words)]
    shown += [] if test is None else [labelled_line("holdout", test.words)]
    shown += [*normalisation_lines(chosen, test), *norm_stats_lines(norm_stats, batchnorm), str(assumption)]
    n_scores = sum(score.numel() for score in scores.values())
    shown.append(labelled_line("written", f"{out}: {n_scores:,} scores of {len(scores)} weights"))
    about = {"kind": "sensitivities", "sipp": sipp.__version__, "model": model, "seed": seed, "reduce": reduce}
    points_read = {"norm_stats": norm_stats, "data": summary(chosen), "holdout": summary(test)}
    return Answer(shown, about | points_read | {"assumption": assumption, "written": str(out), "n_scores": n_scores})
