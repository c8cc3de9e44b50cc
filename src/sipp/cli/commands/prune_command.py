"""`sipp prune`: prunes a network, and writes it with a report as a folder or one file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import sipp
from sipp.cli import options as shared
from sipp.cli.errors import naming_option
from sipp.cli.options import GUARANTEE_PANEL, OUTPUT_PANEL, PRUNE_PANEL, option
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.files import FILE_SUFFIX, RECORD_NAME, WEIGHTS_NAME
from sipp.results.checking import check_drop, check_number, check_share
from sipp.results.display import bytes_in_words, labelled_line, size_words
from sipp.results.jsonio import to_json
from sipp.results.options import SHARE, Precision, PruneOptions

if TYPE_CHECKING:
    from torch import nn

    from sipp.cli.data_option import Points
    from sipp.results.certificate import AnyCertificate
    from sipp.results.pruned import Pruned
    from sipp.results.pruned_to import PrunedTo

EXACT = ("fp32", "lossless")  # values that are not rounded
SEE_BELOW = "see the certificate below."
HOLDOUT_USED = "; but the holdout was used, so take other inputs for your next claim"
FIX = "see sipp prune --help"


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
    share: Annotated[
        float | None,
        option(
            f"Share of inputs that may be further off than the certificate says. Default: {SHARE}.", GUARANTEE_PANEL
        ),
    ] = None
    part: shared.Part = None
    options: PruneOptions
    batchnorm: shared.BatchNorm = None
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
    on_disk: Annotated[
        bool,
        option(
            "For hf:DIR larger than memory: prune it block by block, from files to files; run it again to resume. The "
            "default method is wanda.",
            shared.MACHINE_PANEL,
            "--on-disk",
        ),
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
        if self.share is not None:
            check_share("share", self.share)

    @property
    def is_one_file(self) -> bool:
        """Whether --out names a file from `sipp.save`, not a folder."""
        return self.out is not None and self.out.suffix == FILE_SUFFIX

    @property
    def has_tolerance(self) -> bool:
        return self.epsilon is not None or self.max_accuracy_drop is not None

    @property
    def chosen(self) -> dict[str, Any]:
        """The options about pruning and certificates that differ from their defaults, as arguments of a verb."""
        defaults = {field.name: field.default for field in fields(PruneOptions)}
        given = {name: value for name in defaults if (value := getattr(self.options, name)) != defaults[name]}
        own = {field.name: getattr(request, field.name) for field in fields(request)}

    del own["options"], own["inputs"]
    return own | vars(request.inputs) | options


def _about_inputs(calibration: Points | None, holdout: Points | None) -> dict[str, Any]:
    from sipp.cli.data_option import summary

    return {"data": summary(calibration), "holdout": summary(holdout)}


def _write(
    request: PruneRequest, pruned: Pruned, certificate: AnyCertificate | None, values: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Writes the network; returns the lines and JSON values that say so."""
    assert request.out is not None
    with naming_option(f"--out {request.out}", "give another place"):
        if not request.is_one_file:
            sipp.save_folder(pruned, request.out, about=values)
            files = [request.out / name for name in (WEIGHTS_NAME, RECORD_NAME)]
            sizes = {str(file): file.stat().st_size for file in files}
            small = f"sipp export {request.out} --model {request.model} --out small{FILE_SUFFIX}"
            lines = [
                *(labelled_line("written", f"{file} ({bytes_in_words(n)})") for file, n in sizes.items()),
                labelled_line("", f"zeros are stored too, so this is not smaller; {small} makes a small file"),
            ]
            return lines, {"written": sizes}
        saved = sipp.save(pruned, request.out, values=request.values, certificate=certificate)
    lines = [
        labelled_line("written", f"{request.out} ({bytes_in_words(saved.n_bytes)})"),
        labelled_line("", f"{size_words(saved.n_bytes, saved.dense_bytes)}; see sipp inspect, sipp bench"),
    ]
    if words := saved.rounding_words:
        lines.append(labelled_line("values", f"{words}; the statements above are about the values before rounding"))
    return lines, {"written": {str(request.out): saved.n_bytes}, "file": to_json(saved)}


def _lines(
    request: PruneRequest,
    model: nn.Module,
    pruned: Pruned | None,
    walk: PrunedTo | None,
    certificate: AnyCertificate | None,
    calibration: Points | None,
    holdout: Points | None,
) -> list[str]:
    """The printed report."""
    from sipp.cli.data_option import normalisation_lines
    from sipp.cli.model_option import norm_stats_lines, norm_stats_of
    from sipp.results.pruned import pruned_sheet
    from sipp.results.sheet import sheet_text

    origin = f"freshly initialised (seed {request.options.seed})"
    if request.weights is not None:
        origin = f"weights {request.weights}"
    elif request.model.startswith("hf:"):
        origin = "weights of that folder"
    lines = [
        labelled_line("network", f"{request.model}, {origin}"),
        labelled_line("data", "not used" if calibration is None else calibration.words),
    ]
    lines += [] if holdout is None else [labelled_line("holdout", holdout.words)]
    lines += normalisation_lines(calibration, holdout)
    lines += [] if calibration is None else norm_stats_lines(norm_stats_of(model, request.batchnorm), request.batchnorm)
    if pruned is not None:
        certified = "" if certificate is None else SEE_BELOW
        if certificate is not None and walk is None:
            certified = ("" if request.values in EXACT else "about the stored values: ") + certificate.sentence
        lines.append(sheet_text(pruned_sheet(pruned, in_shell=True, certified=certified)))
    if calibration is not None and calibration.is_noise:
        lines.append(labelled_line("noise", "the scores and bounds above are about random inputs, not about yours"))
    if walk is not None:
        lines.append(str(walk))
        if not request.options.repair:
            hint = "--repair fits the kept weights to the dense outputs: fewer are enough then"
            lines.append(labelled_line("further", hint))
    return lines


# --- a network in files -----------------------------------------------------------------------------------------------


def _prune_on_disk(request: PruneRequest) -> Answer:
    """Prunes a Hugging Face folder block by block into the folder --out, or resumes that."""
    from sipp.cli.data_option import Reader
    from sipp.cli.hugging_face_models import folder_of, hf_model_without_weights
    from sipp.files import check_place, refuse_input
    from sipp_lab.training.setup import device_named

    if request.data is None or request.out is None or request.is_one_file:
        raise OptionError("--on-disk needs data and a folder to write to", fix="give --data and --out DIR")
    for name in ("weights", "holdout", "batchnorm", "dry_run", "force"):
        if getattr(request, name):
            raise OptionError(f"--{name.replace('_', '-')} does nothing with --on-disk", fix="leave it out")
    arguments = _arguments(request, sipp.prune_on_disk, "with --on-disk")
    with naming_option(f"--model {request.model}", "give hf:DIR"):
        folder = folder_of(request.model)
        with naming_option(f"--out {request.out}", "give another folder"):
            check_place(request.out)
            refuse_input(request.out, "--model", folder)
        model = hf_model_without_weights(request.model)
    with naming_option(f"--device {request.device}", "use --device cpu, or leave it out"):
        device = device_named(request.device)
    points = Reader(model, request.model, request.inputs, request.options.seed).calibration(
        request.data, request.points
    )
    with naming_option(f"--model {request.model}, --data {request.data}, --out {request.out}", FIX):
        done = sipp.prune_on_disk(model, folder, points.batches, request.out, **arguments, device=device)
    return Answer([str(done)], {"kind": "pruned on disk", "sipp": sipp.__version__, **to_json(done)})
