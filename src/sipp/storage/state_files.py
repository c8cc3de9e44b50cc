"""Saves tensors together with JSON values, as NAME.safetensors and NAME.json.

The JSON is written last and holds the SHA-256 of the tensors and of itself: without a valid JSON file there is no
state. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sipp.errors import DataError
from sipp.storage.files import (
    Values,
    child_path,
    make_folder,
    read_file,
    read_json,
    sha256_of,
    write_atomic,
    write_json,
)
from sipp.storage.tensors import tensors_from_bytes, tensors_to_bytes

Tensor = Any  # torch is not imported here, so that reading records is fast
TENSORS = ".safetensors"
VALUES = ".json"


def save_state(folder: Path, name: str, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Saves tensors and values under this name; readers see both or neither."""
    data = tensors_to_bytes(tensors)
    make_folder(folder)
    write_atomic(child_path(folder, name + TENSORS), data)
    write_json(child_path(folder, name + VALUES), {"tensors_sha256": sha256_of(data), "values": values})


def load_state(folder: Path, name: str) -> tuple[dict[str, Tensor], Values]:
    """The tensors (on the CPU) and values saved under this name, checked against their checksums."""
    data, values = _checked_state(folder, name)
    return tensors_from_bytes(data, child_path(folder, name + TENSORS)), values


def load_sound_values(folder: Path, name: str) -> Values:
    """The values saved under this name, after the same checks as `load_state`."""
    return _checked_state(folder, name)[1]


def _checked_state(folder: Path, name: str) -> tuple[bytes, Values]:
    """The bytes of the tensors, and the values; DataError if either was changed."""
    outer = read_json(child_path(folder, name + VALUES))
    path = child_path(folder, name + TENSORS)
    data = read_file(path)
    digest = sha256_of(data)
    if digest != outer.get("tensors_sha256"):
        raise DataError(
            f"SHA-256 {digest[:12]} is not the one it was saved with; it was changed after it was written, or cut",
            where=path,
        )
    if not isinstance(outer.get("values"), dict):
        raise DataError("holds no values", where=child_path(folder, name + VALUES))
    return data, outer["values"]


def load_values(folder: Path, name: str) -> Values:
    """The values saved under this name, without reading the tensors."""
    values: Values = read_json(child_path(folder, name + VALUES))["values"]
    return values


def has_state(folder: Path, name: str) -> bool:
    """Whether a state was saved under this name; `load_state` checks it."""
    return child_path(folder, name + VALUES).is_file()


def remove_state(folder: Path, name: str) -> None:
    """Removes the state, the JSON first, so that half of it is never taken for a state."""
    child_path(folder, name + VALUES).unlink(missing_ok=True)
    child_path(folder, name + TENSORS).unlink(missing_ok=True)
