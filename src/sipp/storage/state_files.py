"""Saves tensors together with JSON values in one file, NAME.safetensors.

The header holds the values, the SHA-256 of the tensors, and a checksum of both. Nothing is unpickled.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sipp.errors import DataError
from sipp.storage.files import Values, child_path, json_with_checksum, make_folder, read_file, read_json, write_atomic
from sipp.storage.tensors import metadata_in, raw_hash, raw_tensors, tensors_from_bytes, tensors_to_bytes

Tensor = Any  # torch is not imported here, so that reading records is fast
KEY = "sipp state"  # of the values in the header
SUFFIX = ".safetensors"


def save_state(folder: Path, name: str, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Saves tensors and values under this name, atomically."""
    from sipp.results.network_hash import state_hash

    header = json_with_checksum({"tensors_sha256": state_hash(tensors), "values": values})
    data = tensors_to_bytes(tensors, {KEY: header.decode()})
    make_folder(folder)
    write_atomic(child_path(folder, name + SUFFIX), data)


def load_state(folder: Path, name: str) -> tuple[dict[str, Tensor], Values]:
    """The tensors (on the CPU) and values saved under this name; DataError if either was changed."""
    data, values = _read_checked(child_path(folder, name + SUFFIX))
    return tensors_from_bytes(data, child_path(folder, name + SUFFIX)), values


def load_values(folder: Path, name: str) -> Values:
    """The values saved under this name, after the same checks as `load_state`. Needs no torch."""
    return _read_checked(child_path(folder, name + SUFFIX))[1]


def _read_checked(path: Path) -> tuple[bytes, Values]:
    """The whole file and its values; DataError if it was changed."""
    data = read_file(path)
    text = metadata_in(io.BytesIO(data)).get(KEY)
    if not isinstance(text, str):
        raise DataError("holds no state of a run; it was changed after it was written, or truncated", where=path)
    state, digest = read_json(path, text.encode(errors="surrogatepass")), raw_hash(raw_tensors(data, path))
    if digest != state["tensors_sha256"]:
        raise DataError(
            f"SHA-256 {digest[:12]} is not the one it was saved with; it was changed after it was written", where=path
        )
    return data, state["values"]


def has_state(folder: Path, name: str) -> bool:
    """Whether a state was saved under this name; `load_state` checks it."""
    return child_path(folder, name + SUFFIX).is_file()


def remove_state(folder: Path, name: str) -> None:
    """Removes the state."""
    child_path(folder, name + SUFFIX).unlink(missing_ok=True)
