"""The one atomic write, JSON with a checksum, and what a command checks before it works. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sipp.errors import DataError, OptionError

TEMPORARY = ".tmp-"  # start of the name of what is being written; left behind by a killed process only
CHUNK = 1 << 20  # bytes read at once
CHANGED = "it was changed after it was written"  # in errors of those who check
ROOM = "make the folder, free space or allow writing, and run it again; or give another place"
RECORD_NAME = "report.json"  # what `sipp prune` calls its record,
WEIGHTS_NAME = "model.safetensors"  # and the network,
JOURNAL_NAME = "progress.json"  # what `prune_on_disk` calls its list of finished blocks
RECORD_KEY = "sipp record"  # which has the record in its header too
FILE_SUFFIX = ".safetensors"  # of a network that is one file
JSON_LINES = (".jsonl", ".json", ".ndjson")
TEXT_SUFFIXES = (".txt", ".md", ".text", *JSON_LINES)  # of files of text

Values = dict[str, Any]


def sha256_of(*parts: bytes | memoryview) -> str:
    """SHA-256 of the concatenated parts, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file, of any size."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# --- writing ----------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Writes a file, which always has either its old content or the new one, even after a power failure."""
    unfinished = _temporary(path)
    try:
        try:
            with open(unfinished, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            _sync(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"could not be written ({error.strerror or error})", where=path, fix=ROOM) from error


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path`, to be filled in the context; then it is renamed to `path`, which must be new or empty."""
    unfinished = _temporary(path)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for inner in (*unfinished.rglob("*"), unfinished):
            _sync(inner)
        os.replace(unfinished, path)
        _sync(path.parent)
    except OSError as error:
        raise DataError(f"could not be written ({error.strerror or error})", where=path, fix=ROOM) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _temporary(path: Path) -> Path:
    """A unique path beside `path`, for a file or folder that is renamed when it is complete."""
    return path.parent / f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}"


def _sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Creates the folder, and those around it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder could not be made ({error.strerror or error})", where=folder) from error


# --- JSON with a checksum ---------------------------------------------------------------------------------------------


def write_json(path: Path, values: Values) -> None:
    """Writes the values as JSON, with a checksum."""
    write_atomic(path, json.dumps(seal(values), sort_keys=True, allow_nan=False, indent=1).encode())


def seal(values: Values) -> Values:
    """The values, and a checksum over them under "check"."""
    return {**values, "check": _check_of(values)}


def read_json(path: Path, data: bytes | str | None = None) -> Values:
    """The values given to `seal`, read from a JSON file or its content; DataError if they were changed since."""
    try:
        content = json.loads(read_file(path) if data is None else data)
    except ValueError as error:
        raise DataError(f"is not valid JSON ({error}); it was changed or truncated", where=path) from error
    check = content.pop("check", None) if isinstance(content, dict) else None
    if not isinstance(content, dict) or check != _check_of(content):
        raise DataError(f"its checksum does not match its content; {CHANGED}, or truncated", where=path)
    return content


def read_file(path: Path) -> bytes:
    """The bytes of a file; a DataError names a file that cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", where=path) from error


def _check_of(body: Values) -> str:
    return sha256_of(json.dumps(body, sort_keys=True).encode())


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, without reading its tensors; empty for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError, ValueError):
        return {}


# --- where a command may write: checked before any work -------------------------------------------------------------


def refuse_input(path: Path, option: str, read: Path) -> None:
    """Raises if the output path is what an option reads, or a folder that contains it."""
    ours, theirs = path.resolve(), read.resolve()
    if ours == theirs or ours in theirs.parents:
        what = f"{path} {'is' if ours == theirs else 'contains'} what {option} reads ({read})"
        raise OptionError(
            f"{what}, which is never overwritten, even with --force", fix="give a path that no option reads"
        )


def check_place(path: Path) -> None:
    """Raises if nothing can be written at this path, by a temporary file in the first folder around it that exists."""
    try:
        path.exists()  # a name that is too long is found here
        with tempfile.TemporaryFile(dir=next(folder for folder in path.absolute().parents if folder.exists())):
            pass
    except OSError as error:
        raise OptionError(f"{path} cannot be written ({error.strerror or error})", fix=ROOM) from error


def check_file(path: Path, *, force: bool, makes_folder: bool = False) -> None:
    """Raises if the file cannot be written, or exists and there is no --force."""
    check_place(path)
    if path.is_dir():
        raise OptionError(f"{path} is a folder", fix="give the name of a file")
    if not makes_folder and not path.parent.is_dir():
        raise OptionError(f"{path.parent} is not a folder", fix="make it first, or give another place")
    if path.exists() and not force:
        raise OptionError(f"{path} exists", fix="give another name, or --force to replace it")


def check_folder(path: Path, *, force: bool) -> None:
    """Raises if a folder cannot be written, or is not empty and there is no --force; weights of others stay."""
    check_place(path)
    if path.exists() and not path.is_dir():
        raise OptionError(f"{path} is a file", fix="give a folder that does not exist yet, or is empty")
    if (path / WEIGHTS_NAME).exists() and RECORD_KEY not in metadata_of(path / WEIGHTS_NAME):
        raise OptionError(f"{path} contains a {WEIGHTS_NAME} that sipp did not write", fix="give another folder")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise OptionError(f"{path} is not empty", fix="give another name, or --force to replace a network in it")
