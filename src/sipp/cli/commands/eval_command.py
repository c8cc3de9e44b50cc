"""`sipp eval`: measures a pruned network against the dense one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sipp.cli import options as shared
from sipp.cli.options import KINDS, MODEL_PANEL, OUTPUT_PANEL, option
from sipp.cli.output import Answer


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """The options of the command; each field is one."""

    model: shared.Model
    pruned: shared.PrunedWeights
    dense: shared.Dense = None
    data: Annotated[str, option(f"Inputs to measure on: {KINDS}. For a data set, its test part.", MODEL_PANEL)]
    device: shared.Device = "auto"
    inputs: shared.InputOptions
    points: shared.HoldoutPoints = None
    output: shared.OutputPart = None
    out: Annotated[
        Path | None, option("New file for the record; in the network's folder, it appears on the page.", OUTPUT_PANEL)
    ] = None
    force: shared.Force = False
    seed: shared.Seed = 0


def eval(request: EvalRequest) -> Answer:  # the name of the command
    """Compare a pruned network with the dense one: accuracy, loss, and how far outputs move."""
    from sipp.cli.eval_work import run_eval

    return run_eval(request)
