"""Saves tensors together with JSON values in one file, NAME.safetensors: a checkpoint of a run.

The metadata hold the values and the SHA-256 of the tensors, with a checksum of both. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sipp.errors import DataError
from sipp.files import CHANGED, Values, check_name, make_folder, read_json, seal, write_atomic
from sipp.storage.tensors import read_tensors, tensors_to_bytes

Tensor = Any  # torch is not imported here, so that runs are listed fast
KEY = "sipp state"  # of the values in the metadata
SUFFIX = ".safetensors"


def save_state(folder: Path, name: str, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Saves tensors and values under this name, atomically."""
    text = json.dumps(seal({"tensors_sha256": _hash(tensors), "values": values}), allow_nan=False)
    make_folder(folder)
    write_atomic(_path(folder, name), tensors_to_bytes(tensors, {KEY: text}))


def load_state(folder: Path, name: str) -> tuple[dict[str, Tensor], Values]:
    """The tensors (on the CPU) and values saved under this name; DataError if either was changed."""
    path = _path(folder, name)
    tensors, metadata = read_tensors(path)
    state = read_json(path, metadata.get(KEY, ""))
    if _hash(tensors) != state["tensors_sha256"]:
        raise DataError(f"its tensors do not have the SHA-256 they were saved with; {CHANGED}", where=path)
    return tensors, state["values"]


def load_values(folder: Path, name: str) -> Values:
    """The values saved under this name, after the same checks as `load_state`."""
    return load_state(folder, name)[1]


def has_state(folder: Path, name: str) -> bool:
    """Whether a state was saved under this name; `load_state` checks it."""
    return _path(folder, name).is_file()


def remove_state(folder: Path, name: str) -> None:
    """Removes the state."""
    _path(folder, name).unlink(missing_ok=True)


def _hash(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the bytes: of a bool, torch would hash the value alone."""
    from sipp.results import hashing

    return hashing.of_state({f"{name} {t.dtype} {tuple(t.shape)}": hashing.raw_bytes(t) for name, t in tensors.items()})


def _path(folder: Path, name: str) -> Path:
    return folder / check_name(name + SUFFIX)
