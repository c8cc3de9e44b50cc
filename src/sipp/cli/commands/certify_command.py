"""`sipp certify`: certifies on a holdout what pruning costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sipp.cli import options as shared
from sipp.cli.options import GUARANTEE_PANEL, MODEL_PANEL, OUTPUT_PANEL, REAL_KINDS, option
from sipp.cli.output import Answer
from sipp.results.certificate import Measure
from sipp.results.options import CONFIDENCE, SHARE


@dataclass(frozen=True, kw_only=True)
class CertifyRequest:
    """The options of the command; each field is one."""

    model: shared.Model
    pruned: shared.PrunedWeights
    dense: shared.Dense = None
    holdout: Annotated[str, option(f"Inputs that are new to both networks: {REAL_KINDS}.", MODEL_PANEL)]
    calibration: Annotated[
        str | None, option("Inputs that were used for pruning; the holdout must not contain any.", MODEL_PANEL)
    ] = None
    device: shared.Device = "auto"
    inputs: shared.InputOptions
    epsilon: Annotated[
        float | None, option("Relative error to certify; default: the smallest that can be certified.", GUARANTEE_PANEL)
    ] = None
    accuracy: Annotated[bool, option("Certify the drop in accuracy instead.", GUARANTEE_PANEL, "--accuracy")] = False
    measure: Annotated[
        Measure,
        option(
            "What epsilon limits: the output; for a language model also kl (nats per token) or next-token.",
            GUARANTEE_PANEL,
        ),
    ] = "output"
    share: Annotated[float, option("Share of inputs that may be further off.", GUARANTEE_PANEL)] = SHARE
    confidence: shared.Confidence = CONFIDENCE
    points: shared.HoldoutPoints = None
    output: shared.OutputPart = None
    out: Annotated[Path | None, option("Where to write the certificate as JSON.", OUTPUT_PANEL)] = None
    force: shared.Force = False


def certify(request: CertifyRequest) -> Answer:
    """Certify on a holdout what pruning costs.

    For example: sipp certify --model resnet20 --dense net.pt --pruned pruned --holdout cifar10
    """
    from sipp.cli.certify_work import run_certify

    return run_certify(request)
