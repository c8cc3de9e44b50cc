"""`sipp prune`: prunes a network, and writes it with a report as a folder or one file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from sipp.cli import options as shared
from sipp.cli.options import GUARANTEE_PANEL, OUTPUT_PANEL, PRUNE_PANEL, option
from sipp.cli.output import Answer
from sipp.results.checking import check_drop, check_number, check_share
from sipp.results.options import SHARE, Precision, PruneOptions
from sipp.storage.outputs import FILE_SUFFIX, RECORD_NAME, WEIGHTS_NAME


@dataclass(frozen=True, kw_only=True)
class PruneRequest:
    """The options of the command: `PruneOptions` and those that only the command line has."""

    model: shared.Model
    data: shared.Data = None
    weights: shared.Weights = None
    device: shared.Device = "auto"
    inputs: shared.InputOptions
    code: shared.CodeFiles = None
    points: shared.PointsOption = None
    holdout: Annotated[
        str | None,
        option(
            "Inputs for a certificate; must be new to the network. Default with --epsilon: a part of the data.",
            GUARANTEE_PANEL,
        ),
    ] = None
    holdout_points: shared.HoldoutPoints = None
    share: Annotated[
        float | None,
        option(
            f"Share of inputs that may be further off than the certificate says. Default: {SHARE}.",
            GUARANTEE_PANEL,
        ),
    ] = None
    output: shared.OutputPart = None
    options: PruneOptions
    batchnorm: shared.BatchNorm = None
    refit: shared.Refit = False
    epsilon: Annotated[
        float | None,
        option("Instead of --keep: prune as far as this relative error can be certified.", PRUNE_PANEL),
    ] = None
    max_accuracy_drop: Annotated[
        float | None, option("Instead of --keep: prune as far as this accuracy drop can be certified.", PRUNE_PANEL)
    ] = None
    out: Annotated[
        Path | None,
        option(f"New folder for {WEIGHTS_NAME} and {RECORD_NAME}; or one small file, name{FILE_SUFFIX}.", OUTPUT_PANEL),
    ] = None
    dry_run: Annotated[
        bool, option("Print what would be done and what it costs; write nothing.", OUTPUT_PANEL, "--dry-run")
    ] = False
    values: Annotated[
        Precision,
        option(
            f"Values in name{FILE_SUFFIX}: fp32 or lossless (exact), or rounded to fp16, bf16 or int8. The "
            "certificate is about what is stored.",
            OUTPUT_PANEL,
            metavar="FORMAT",
        ),
    ] = "fp32"
    force: shared.Force = False

    def __post_init__(self) -> None:
        if self.epsilon is not None:
            check_number("epsilon", self.epsilon, least=0)
        if self.max_accuracy_drop is not None:
            check_drop("max_accuracy_drop", self.max_accuracy_drop)
        check_share("share", self.allowed_share)

    @property
    def is_one_file(self) -> bool:
        """Whether --out names a file from `sipp.save`, not a folder."""
        return self.out is not None and self.out.suffix == FILE_SUFFIX

    @property
    def rounds(self) -> bool:
        """Whether the stored values are rounded."""
        return self.values not in ("fp32", "lossless")

    @property
    def allowed_share(self) -> float:
        """The share of inputs whose error may exceed the certified one."""
        return SHARE if self.share is None else self.share

    @property
    def has_tolerance(self) -> bool:
        return self.epsilon is not None or self.max_accuracy_drop is not None


def prune(request: PruneRequest) -> Answer:
    """Prune a network to a share of its weights, or as far as a certificate allows.

    For example: sipp prune --model digits-cnn --data digits --keep 0.3 --dry-run
    """
    from sipp.cli.prune_work import run_prune

    if request.refit:
        request = replace(request, options=replace(request.options, repair="refit"))
    return run_prune(request)
