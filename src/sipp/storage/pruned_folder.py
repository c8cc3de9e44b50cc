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
from sipp.files import (
    CHANGED,
    JOURNAL_NAME,
    RECORD_KEY,
    RECORD_NAME,
    WEIGHTS_NAME,
    check_folder,
    make_folder,
    read_json,
    seal,
    write_atomic,
)
from sipp.results import SavedNetwork, hashing, to_json
from sipp.storage.tensors import read_tensors, tensors_to_bytes


def write_pruned(folder: Path, tensors: dict[str, Any], record: dict[str, Any]) -> None:
    """Writes the network and its record into the folder; another network of sipp in it is replaced."""
    check_folder(folder, force=True)
    make_folder(folder)
    report = json.dumps(seal(to_json(record)), indent=1, allow_nan=False)
    write_atomic(folder / WEIGHTS_NAME, tensors_to_bytes(tensors, {"format": "pt", RECORD_KEY: report}))
    write_atomic(folder / RECORD_NAME, report.encode())


def read_pruned(folder: Path) -> SavedNetwork:
    """The record in a folder that `sipp prune` wrote; DataError if it was changed.

    It is checked by its checksum, and by the hash of the network beside it.
    """
    copy, path = folder / RECORD_NAME, folder / WEIGHTS_NAME
    if (folder / JOURNAL_NAME).exists() and not copy.exists():
        raise DataError(
            "is a plain Hugging Face folder, as `sipp prune --on-disk` writes it, without a record",
            where=folder,
            fix="load it with from_pretrained, or give it to sipp eval or sipp certify as --pruned",
        )
    if not path.exists() and not copy.exists():
        raise DataError(
            f"contains no pruned network ({RECORD_NAME})",
            where=folder,
            fix="give a folder of sipp prune or save_folder",
        )
    if not path.exists():
        raise DataError(f"contains {RECORD_NAME}, but no {WEIGHTS_NAME}", where=folder, fix="copy the whole folder")
    tensors, metadata = read_tensors(path)
    if RECORD_KEY not in metadata:
        raise DataError("is not a network of `sipp prune`: it has no record", where=path)
    record = SavedNetwork.read(read_json(path, metadata[RECORD_KEY]), path)
    if hashing.with_buffers(hashing.of_state(tensors), record.buffers_hash) != record.pruned_hash:
        raise DataError(f"its weights do not match its record; {CHANGED}", where=path)
    return record
