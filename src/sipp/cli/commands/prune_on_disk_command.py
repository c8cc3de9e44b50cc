"""`sipp prune-on-disk`: prunes a Hugging Face folder that may be larger than memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sipp.cli import options as shared
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.options import MODEL_PANEL, OUTPUT_PANEL, PRUNE_PANEL, REPAIR_PANEL, option, prune_option
from sipp.cli.output import Answer
from sipp.errors import OptionError
from sipp.results.jsonio import to_json


@dataclass(frozen=True, kw_only=True)
class OnDiskRequest:
    """The options of the command; each field is one."""

    model: Annotated[str, option("hf:DIR, a Hugging Face folder with .safetensors.", MODEL_PANEL)]
    data: Annotated[
        str, option("Calibration text: .txt, .jsonl or a folder of these; or token numbers in a file.", MODEL_PANEL)
    ]
    length: shared.Length = None
    points: Annotated[
        int | None,
        option("How many sequences; default: 128 from text, all from a file of token numbers.", MODEL_PANEL, least=1),
    ] = None
    keep: Annotated[float | None, prune_option("keep")] = None
    pattern: Annotated[str | None, prune_option("pattern")] = None
    method: Annotated[str, option("How weights are chosen, as for sipp prune.", PRUNE_PANEL)] = "wanda"
    repair: Annotated[
        bool, option("Find the mask and the weights together on the data, without labels.", REPAIR_PANEL, "--repair")
    ] = False
    blocks: Annotated[str | None, prune_option("blocks")] = None
    out: Annotated[
        Path,
        option(
            "Folder for the sparse model, which from_pretrained can read; give the same one to resume.", OUTPUT_PANEL
        ),
    ]
    seed: shared.Seed = 0
    device: shared.Device = "auto"
    batch_size: shared.BatchSize = None


def prune_on_disk(request: OnDiskRequest) -> Answer:
    """Prune a Hugging Face folder larger than memory, block by block; run it again to resume.

    For example: sipp prune-on-disk --model hf:llama --data train.jsonl --keep 0.5 --repair --out sparse. Only one
    block and one batch are in memory. A stopped run resumes after its last finished block.
    """
    import sipp
    from sipp.cli.data_option import Reader
    from sipp.cli.hugging_face_models import PREFIX, folder_of, hf_model_without_weights
    from sipp.cli.language_text import N_SEQUENCES
    from sipp.storage.outputs import check_place, refuse_input
    from sipp_lab.training.setup import device_named

    if not request.model.startswith(PREFIX):
        raise CommandError(
            f"{request.model} is not a Hugging Face folder", where=f"--model {request.model}", fix="give hf:DIR"
        )
    if (request.keep is None) == (request.pattern is None):
        raise OptionError("one of --keep and --pattern says how much is kept", fix="give --keep 0.5 or --pattern 2:4")
    with naming_option(f"--model {request.model}", "give hf:DIR"):
        folder = folder_of(request.model)
        with naming_option(f"--out {request.out}", "give another folder"):
            check_place(request.out)
            refuse_input(request.out, "--model", folder)
        model = hf_model_without_weights(request.model)
    with naming_option(f"--device {request.device}", "use --device cpu, or leave it out"):
        device = device_named(request.device)
    reading = shared.InputOptions(length=request.length, batch_size=request.batch_size)
    reader = Reader(model, request.model, reading, request.seed)
    source = reader.open(request.data)
    points = reader.draw(source, request.points or (N_SEQUENCES if source.kind == "text" else None))
    with naming_option(f"--model {request.model}, --data {request.data}, --out {request.out}", "see --help"):
        done = sipp.prune_on_disk(
            model, folder, points.batches, request.out, keep=request.keep, pattern=request.pattern,
            method=request.method, repair=request.repair, blocks=request.blocks, seed=request.seed, device=device,
        )  # fmt: skip
    about = {"kind": "pruned on disk", "sipp": sipp.__version__, **to_json(done)}
    return Answer([str(done)], about)
