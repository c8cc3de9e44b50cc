"""Reads and writes the folder of a pruned network: its weights and its record.

`sipp prune --out DIR` and `sipp.save_folder` write it; `sipp report`, `bench`, `eval` and `certify` read it.

Only one file can be replaced atomically, not two. So the record is stored in the header of the weights, where it always
belongs to them, and report.json is a copy of it for people.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sipp.errors import DataError
from sipp.results.json_values import json_value
from sipp.results.network_hash import with_buffers
from sipp.results.schemas import PRUNED_FORMAT, PRUNED_KIND, PrunedRecord, checked
from sipp.storage.files import CHANGED, new_folder, read_json, seal, write_atomic
from sipp.storage.outputs import RECORD_KEY, RECORD_NAME, WEIGHTS_NAME, check_folder
from sipp.storage.tensors import metadata_of, read_tensors, tensors_to_bytes

NO_NETWORK = "The network is missing, so its record could not be checked against it."


def write_pruned(folder: Path, tensors: dict[str, Any], record: dict[str, Any], *, force: bool) -> dict[Path, int]:
    """Writes the network and its record into the folder; returns {file: bytes}."""
    report = json.dumps(seal(json_value(record)), indent=1, allow_nan=False)
    contents = {
        WEIGHTS_NAME: tensors_to_bytes(tensors, {"format": "pt", RECORD_KEY: report}),
        RECORD_NAME: report.encode(),
    }
    check_folder(folder, force=force)
    if folder.is_dir():
        for name, content in contents.items():
            write_atomic(folder / name, content)
    else:
        with new_folder(folder) as place:
            for name, content in contents.items():
                (place / name).write_bytes(content)
    return {folder / name: len(content) for name, content in contents.items()}


def is_pruned_folder(folder: Path) -> bool:
    """Whether the folder holds the record of a pruned network, valid or not."""
    return (folder / RECORD_NAME).exists() or RECORD_KEY in metadata_of(folder / WEIGHTS_NAME)


def read_pruned(folder: Path) -> tuple[PrunedRecord, tuple[str, ...]]:
    """The record of a folder that `sipp prune` wrote, and notes for the reader; DataError if it was changed.

    It is checked by its checksum, and by the hash of the network beside it.
    """
    copy, path = folder / RECORD_NAME, folder / WEIGHTS_NAME
    if not path.exists():
        return _record(copy, None), (NO_NETWORK,)
    tensors, metadata = read_tensors(path)
    if RECORD_KEY not in metadata:
        raise DataError("is not a network of `sipp prune`: it holds no record", where=path)
    record = _record(path, metadata[RECORD_KEY])
    from sipp.results.network_hash import state_hash

    if with_buffers(state_hash(tensors), record.buffers_hash) != record.pruned_hash:
        raise DataError(f"its weights are not those that its record speaks of; {CHANGED}", where=path)
    return record, ()


def _record(path: Path, data: str | None) -> PrunedRecord:
    """The record in a file or in its content."""
    values = read_json(path, data)
    if values.get("kind") != PRUNED_KIND or values.get("format") != PRUNED_FORMAT:
        raise DataError(f"is not a record of `sipp prune` in format {PRUNED_FORMAT}", where=path)
    return checked(PrunedRecord, values, path)
