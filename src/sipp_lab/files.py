"""Files that hold their old content or the new one, never a part: JSON, and tensors with JSON values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sipp.errors import DataError
from sipp.files import make_folder, read_file, write_atomic

KEY = "values"  # of the JSON text in the metadata of a state

Values = dict[str, Any]


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file, and the folders around it."""
    make_folder(path.parent)
    write_atomic(path, data)


def write_json(path: Path, values: Values) -> None:
    """Writes values that JSON can hold."""
    write_whole(path, json.dumps(values, sort_keys=True, allow_nan=False, indent=1).encode())


def read_json(path: Path) -> Any:
    """The values in a JSON file."""
    try:
        return json.loads(read_file(path))
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", where=path) from error


def save_state(path: Path, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Saves tensors, and values that JSON can hold, as one safetensors file."""
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(own, {KEY: json.dumps(values, allow_nan=False)}))


def load_state(path: Path) -> tuple[dict[str, Tensor], Values]:
    """The tensors (on the CPU) and values of `save_state`."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[KEY])  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"is damaged, or was not written by sipp ({error})",
            where=path,
            fix="remove it; the same command makes it again",
        ) from error


def load_values(path: Path) -> Values:
    """The values of `save_state`, without its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            values: Values = json.loads(file.metadata()[KEY])
            return values
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"is damaged, or was not written by sipp ({error})", where=path, fix="remove it") from error
