"""The command `sipp prune-on-disk`: a Hugging Face folder that may be larger than memory in, a sparse one out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sipp.cli import options as shared
from sipp.cli.options import (
    MODEL_PANEL,
    OUTPUT_PANEL,
    PRUNE_PANEL,
    REPAIR_PANEL,
    option,
    prune_option,
)
from sipp.cli.output import Answer


@dataclass(frozen=True, kw_only=True)
class OnDiskRequest:
    """What the user asked for; each field is an option."""

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
    from sipp.cli.prune_on_disk_work import json_record, work

    done = work(request)
    return Answer([str(done)], json_record(done))
