"""Files that are whole or not there: atomic writes, checksums, tensors as safetensors and everything else as JSON.

A saved pair is NAME.safetensors and NAME.json. The JSON is written last and holds the SHA-256 of the tensors and of
itself: a pair without a sound JSON does not exist. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from sipp.errors import DataError, OptionError

TENSORS = ".safetensors"
VALUES = ".json"
TEMPORARY = ".tmp-"  # start of the name of a file that is being written
FORMAT = 1
MAX_NAME = 160
_NAME = re.compile(r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*")

Values = dict[str, Any]


def is_name(name: str) -> bool:
    """Whether this can be the name of a run, a stage or a file."""
    return _NAME.fullmatch(name) is not None and len(name) <= MAX_NAME


def check_name(name: str) -> str:
    """The name, if it can be a file's: letters, digits, and single dots or dashes between them."""
    if not is_name(name):
        raise OptionError(
            f"{name!r} cannot name a run, a stage or a file: use letters, digits, and . or - between them"
        )
    return name


def inside(folder: Path, name: str) -> Path:
    """The path of `name` directly in `folder`; a link there is refused, since it leads elsewhere."""
    path = folder / check_name(name)
    if path.is_symlink():
        raise OptionError(f"{path} is a symbolic link: runs are read and written in place only; remove it")
    return path


def write_atomic(path: Path, data: bytes) -> None:
    """Nothing; `path` holds the data, and held its old content whole until then, whatever happens on the way.

    Order: temporary file, its fsync, replace, fsync of the folder. Without the last, power loss may undo the replace.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"{path}: could not be written ({error.strerror or error}); what was there before is whole; "
            "free space or allow writing, then run again, it goes on from the last checkpoint"
        ) from error


def sync_folder(folder: Path) -> None:
    """Nothing; the folder's list of names is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Nothing; the folder exists, and so does its name in the folder above."""
    if not folder.is_dir():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        except OSError as error:
            raise DataError(f"{folder}: the folder could not be made ({error.strerror or error})") from error


def remove_leftovers(folder: Path) -> None:
    """Nothing; temporary files of processes that were killed are gone. Only the holder of the lock may call this."""
    for path in folder.rglob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)


def write_json(path: Path, values: Values) -> None:
    """Nothing; `path` holds the values with a checksum over them."""
    text = json.dumps(seal({"format": FORMAT, "values": values}), sort_keys=True, allow_nan=False, indent=1)
    write_atomic(path, text.encode())


def read_json(path: Path) -> Values:
    """The values of a file of `write_json`; DataError names the file and what is wrong with it."""
    found = read_sealed(path)
    if found.get("format") != FORMAT or not isinstance(found.get("values"), dict):
        raise DataError(f"{path}: format {found.get('format')!r} is not {FORMAT}, the one this version reads")
    values: Values = found["values"]
    return values


def seal(values: Values) -> Values:
    """The values, and a checksum over them under "check"."""
    return {**values, "check": _check_of(values)}


def read_sealed(path: Path) -> Values:
    """The values that `seal` was given, from a JSON file; DataError where they were changed since."""
    found = _parsed(_read(path), path)
    check = found.pop("check", None) if isinstance(found, dict) else None
    if not isinstance(found, dict) or check != _check_of(found):
        raise DataError(f"{path}: its checksum does not fit its content; it was changed after it was written, or cut")
    return found


def save_pair(folder: Path, name: str, tensors: Mapping[str, Tensor], values: Values) -> None:
    """Nothing; tensors and values are saved under this name, both or (as far as any reader can tell) neither."""
    # Copies: safetensors refuses memory that two names share (tied weights).
    plain = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    data = tensors_to_bytes(plain)
    make_folder(folder)
    write_atomic(inside(folder, name + TENSORS), data)
    digest = hashlib.sha256(data).hexdigest()
    write_json(inside(folder, name + VALUES), {"tensors_sha256": digest, "values": values})


def load_pair(folder: Path, name: str) -> tuple[dict[str, Tensor], Values]:
    """The tensors (on the CPU) and values saved under this name, checked against their checksums."""
    data, values = _checked_pair(folder, name)
    try:
        tensors: dict[str, Tensor] = tensors_from_bytes(data)
    except (SafetensorError, ValueError, KeyError, torch.cuda.OutOfMemoryError) as error:
        raise DataError(f"{inside(folder, name + TENSORS)}: not a safetensors file: {error}") from error
    return tensors, values


def load_sound_values(folder: Path, name: str) -> Values:
    """The values saved under this name, after the same checks as `load_pair`, of the tensors' checksum too."""
    return _checked_pair(folder, name)[1]


def _checked_pair(folder: Path, name: str) -> tuple[bytes, Values]:
    """The bytes of the tensors, and the values, if neither was changed since they were saved."""
    outer = read_json(inside(folder, name + VALUES))
    path = inside(folder, name + TENSORS)
    data = _read(path)
    found = hashlib.sha256(data).hexdigest()
    if found != outer.get("tensors_sha256"):
        raise DataError(
            f"{path}: SHA-256 {found[:12]} is not the one it was saved with; it was changed after it was written, or "
            "cut"
        )
    if not isinstance(outer.get("values"), dict):
        raise DataError(f"{inside(folder, name + VALUES)}: holds no values")
    return data, outer["values"]


def load_values(folder: Path, name: str) -> Values:
    """The values saved under this name, without reading the tensors."""
    values: Values = read_json(inside(folder, name + VALUES))["values"]
    return values


def has_pair(folder: Path, name: str) -> bool:
    """Whether something was saved under this name; whether it is sound shows when it is loaded."""
    return inside(folder, name + VALUES).is_file()


def remove_pair(folder: Path, name: str) -> None:
    """Nothing; the pair is gone, its JSON first, so that no half of it is ever taken for a pair."""
    inside(folder, name + VALUES).unlink(missing_ok=True)
    inside(folder, name + TENSORS).unlink(missing_ok=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parsed(data: bytes, path: Path) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not whole JSON ({error}); it was changed or cut") from error


def _check_of(body: Values) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
