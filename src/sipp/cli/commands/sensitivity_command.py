"""`sipp sensitivity`: writes the sensitivity of every prunable weight, and checks the theory's assumption."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import sipp
from sipp.cli.errors import naming_option
from sipp.cli.options import Device, Reading, out as to_write
from sipp.cli.output import Answer, check_out, record_of, write_out
from sipp.results import Option, PruneOptions, words


def sensitivity(
    *,
    model: str,
    data: str,
    out: Annotated[Path, to_write("A .safetensors file to write, with the sensitivities of each weight tensor.")],
    force: bool = False,
    weights: Path | None = None,
    holdout: Annotated[str | None, Option("New inputs on which to measure the theory's constant.", "Guarantee")] = None,
    reading: Reading,
    points: int | None = None,
    include: list[str] | None = None,
    exclude: list[str] | None = None,
    c_constant: float = PruneOptions.c_constant,
    k_constant: float = PruneOptions.k_constant,
    device: Device = "auto",
) -> Answer:
    """Write the sensitivity of every prunable weight to a file, and check the theory's assumption.

    For example: sipp sensitivity --model digits-cnn --data digits --out scores.safetensors
    """
    from safetensors.torch import save

    from sipp.cli.inputs import Reader, input_lines, summary_of
    from sipp.cli.networks import load_model, norm_stats_of

    check_out(out, force=force, reads={"--weights": weights, "--data": data, "--holdout": holdout})
    network = load_model(model, weights, device=device)
    norm_stats, of_norms = norm_stats_of(network)
    reader = Reader(network, model, reading)
    test = None if holdout is None else reader.holdout(holdout)
    chosen = reader.calibration(data, points, include=include, exclude=exclude, k_constant=k_constant)
    with naming_option(f"--model {model}, --data {data}", "see sipp sensitivity --help"):
        scores = sipp.sensitivity(network, chosen.batches, include=include, exclude=exclude, norm_stats=norm_stats)
        assumption = sipp.check_assumption(
            network, chosen.batches, None if test is None else test.batches, include=include, exclude=exclude,
            norm_stats=norm_stats, c_constant=c_constant, k_constant=k_constant,
        )  # fmt: skip
    write_out(out, save({name: score.contiguous() for name, score in scores.items()}))
    shown = [words.labelled_line("network", model), *input_lines(chosen, test), *of_norms, str(assumption)]
    n_scores = sum(score.numel() for score in scores.values())
    shown.append(words.labelled_line("written", f"{out}: {n_scores:,} scores of {len(scores)} weights"))
    about: dict[str, Any] = {"model": model, "data": summary_of(chosen), "holdout": summary_of(test)}
    about |= {"norm_stats": norm_stats, "assumption": assumption, "written": out, "n_scores": n_scores}
    return Answer(shown, record_of("sensitivities", {}, about))
