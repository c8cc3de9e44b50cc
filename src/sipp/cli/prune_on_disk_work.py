"""The work of `sipp prune-on-disk`: check the request, read inputs, prune block by block between files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import sipp
from sipp.cli.commands.prune_on_disk_command import OnDiskRequest
from sipp.cli.data_option import Points, Reader
from sipp.cli.errors import CommandError, naming_option
from sipp.cli.hugging_face_models import PREFIX, folder_of, hf_model_without_weights
from sipp.cli.language_text import N_SEQUENCES
from sipp.experiments.training.setup import device_named
from sipp.records.pruned_on_disk import PrunedOnDisk
from sipp.storage.outputs import check_place, refuse_input


def work(request: OnDiskRequest) -> PrunedOnDisk:
    """The folder that was made, or finished."""
    if not request.model.startswith(PREFIX):
        raise CommandError(
            f"{request.model} is not a folder of Hugging Face", where=f"--model {request.model}", fix="give hf:DIR"
        )
    if (request.keep is None) == (request.pattern is None):
        raise CommandError(
            "one of --keep and --pattern says how much is kept",
            where="sipp prune-on-disk",
            fix="give --keep 0.5 or --pattern 2:4",
        )
    with naming_option(f"--model {request.model}", "give hf:DIR"):
        folder = folder_of(request.model)
        with naming_option(f"--out {request.out}", "give another folder"):
            check_place(request.out)
            refuse_input(request.out, "--model", folder)
        model = hf_model_without_weights(request.model)
    with naming_option(f"--device {request.device}", "use --device cpu, or leave it out"):
        device = device_named(request.device)
    points = _points(request, model)
    with naming_option(f"--model {request.model}, --data {request.data}, --out {request.out}", "see --help"):
        return sipp.prune_on_disk(
            model, folder, points.batches, request.out, keep=request.keep, pattern=request.pattern,
            method=request.method, repair=request.repair, blocks=request.blocks, seed=request.seed, device=device,
        )  # fmt: skip


def _points(request: OnDiskRequest, model: Any) -> Points:
    reader = Reader(model, request.model, None, request.seed, request.batch_size, request.length)
    source = reader.open(request.data, "calibration", "--data")
    return reader.draw(source, request.points or (N_SEQUENCES if source.kind == "text" else None), "--data")


def json_record(done: PrunedOnDisk) -> dict[str, Any]:
    """What --json prints."""
    kept = {"n_weights": done.n_weights, "kept": done.kept}
    return {"kind": "pruned on disk", "sipp": sipp.__version__, **kept, **asdict(done), "folder": str(done.folder)}
