"""`sipp certify`: certifies the error of a pruned network on a holdout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import sipp
from sipp.cli.errors import NOT_CERTIFIED, CommandError, naming_option
from sipp.cli.options import KINDS, Device, Reading, out as to_write
from sipp.cli.output import Answer, check_out, record_of, write_record
from sipp.errors import DataError, OptionError
from sipp.files import WEIGHTS_NAME
from sipp.results import SHARE, AnyCertificate, Measure, Option, PruneOptions


def certify(
    *,
    model: str,
    pruned: Path,
    dense: Path | None = None,
    holdout: Annotated[str, Option(f"Inputs that are new to both networks: {KINDS}.", "Model and data")],
    reading: Reading,
    epsilon: Annotated[
        float | None,
        Option(
            "Largest relative change of the output to certify. Default: the smallest that can be certified.",
            "Guarantee",
        ),
    ] = None,
    accuracy: Annotated[bool, Option("Certify the drop in accuracy instead.", "Guarantee")] = False,
    measure: Annotated[
        Measure,
        Option(
            "What to limit: the change of the output, or for a language model kl (nats per token) or next-token "
            "(share that changes).",
            "Guarantee",
        ),
    ] = "output",
    share: float = SHARE,
    confidence: float = PruneOptions.confidence,
    part: int | str | None = None,
    out: Annotated[
        Path | None, to_write("File for the certificate; sipp report shows it if it is in the network's folder.")
    ] = None,
    force: bool = False,
    device: Device = "auto",
) -> Answer:
    """Certify the error of a pruned network on new inputs.

    For example: sipp certify --model resnet20 --dense net.pt --pruned pruned --holdout cifar10
    """
    from sipp.cli.inputs import Reader, input_lines
    from sipp.cli.networks import both_networks

    if accuracy and epsilon is not None:
        raise OptionError("--accuracy and --epsilon cannot be combined", fix="give only one of them")
    if accuracy and measure != "output":
        raise CommandError("--accuracy already measures next tokens", where="--measure", fix="leave one of them out")
    check_out(out, force=force, reads={"--pruned": pruned, "--dense": dense, "--holdout": holdout})
    networks = both_networks(model, dense, pruned, device)
    fresh, known = Reader(networks[0], model, reading).holdout(holdout), _seen_by(pruned)
    certificate: AnyCertificate
    with naming_option(f"--holdout {holdout}", "see sipp certify --help"):
        if accuracy:
            certificate = sipp.certify_accuracy(
                *networks, fresh.batches, confidence=confidence, output=part, calibration=known
            )
        else:
            certificate = sipp.certify(
                *networks, fresh.batches, share=share, confidence=confidence, epsilon=epsilon, measure=measure,
                output=part, calibration=known,
            )  # fmt: skip
    record = record_of(type(certificate).__name__, certificate)
    is_failed = getattr(certificate, "verdict", "certified") != "certified"
    lines = [str(certificate), *input_lines(None, fresh), *([] if is_failed else write_record(out, record))]
    return Answer(lines, record, typer.Exit(NOT_CERTIFIED) if is_failed else None)


def _seen_by(pruned: Path) -> Any:
    """The hashes of the inputs that chose a network, from its folder (or that of its weights)."""
    from sipp.results import SeenInputs

    folder = pruned.parent if pruned.name == WEIGHTS_NAME else pruned
    try:
        record = sipp.inspect(folder)
    except DataError:  # of another program, or weights that do not match the record
        return SeenInputs()
    return SeenInputs() if record.pruned is None else record.pruned.seen
