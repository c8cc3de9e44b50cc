"""`sipp sensitivity`: writes the sensitivity of every prunable weight, and checks the theory's assumption."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import naming_option
from sipp.cli.output import Answer
from sipp.results import C_CONSTANT, K_CONSTANT, Option, words


def sensitivity(
    *,
    model: shared.Model,
    data: shared.NeededData,
    out: Annotated[Path, Option("A .safetensors file: a tensor of scores for each weight.", "Output")],
    force: shared.Force = False,
    weights: shared.Weights = None,
    holdout: Annotated[
        str | None, Option("New inputs on which to look at the theory's inequality, too.", "Guarantee")
    ] = None,
    device: shared.Device = "auto",
    inputs: shared.InputOptions,
    points: shared.PointsOption = None,
    include: shared.Include = None,
    exclude: shared.Exclude = None,
    c_constant: shared.CConstant = C_CONSTANT,
    k_constant: shared.KConstant = K_CONSTANT,
    batchnorm: shared.BatchNorm = None,
    seed: shared.Seed = 0,
) -> Answer:
    """Write the sensitivity of every prunable weight to a file, and check the theory's assumption.

    For example: sipp sensitivity --model digits-cnn --data digits --out scores.safetensors
    """
    from safetensors.torch import save

    from sipp.cli.data_option import Reader, normalisation_lines, summary
    from sipp.cli.model_option import load_model, norm_stats_lines, norm_stats_of
    from sipp.cli.out_option import check_out, write_out

    check_out(out, force=force, reads={"--weights": weights, "--data": data, "--holdout": holdout})
    network = load_model(model, weights, seed=seed, device=device)
    norm_stats = norm_stats_of(network, batchnorm)
    reader = Reader(network, model, inputs, seed)
    test = None if holdout is None else reader.holdout(holdout, None)
    chosen = reader.calibration(data, points, include=include, exclude=exclude, k_constant=k_constant)
    with naming_option(f"--model {model}, --data {data}", "see sipp sensitivity --help"):
        scores = sipp.sensitivity(network, chosen.batches, include=include, exclude=exclude, norm_stats=norm_stats)
        assumption = sipp.check_assumption(
            network, chosen.batches, None if test is None else test.batches, include=include, exclude=exclude,
            norm_stats=norm_stats, c_constant=c_constant, k_constant=k_constant,
        )  # fmt: skip
    write_out(out, save({name: score.contiguous() for name, score in scores.items()}))
    shown = [words.labelled_line("network", model), words.labelled_line("data", chosen.words)]
    shown += [] if test is None else [words.labelled_line("holdout", test.words)]
    shown += [*normalisation_lines(chosen, test), *norm_stats_lines(norm_stats, batchnorm), str(assumption)]
    n_scores = sum(score.numel() for score in scores.values())
    shown.append(words.labelled_line("written", f"{out}: {n_scores:,} scores of {len(scores)} weights"))
    about = {"kind": "sensitivities", "sipp": sipp.__version__, "model": model, "seed": seed}
    points_read = {"norm_stats": norm_stats, "data": summary(chosen), "holdout": summary(test)}
    return Answer(shown, about | points_read | {"assumption": assumption, "written": str(out), "n_scores": n_scores})
