"""What the commands write: a folder of files that is whole or not there, and single files in one step."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from sipp.errors import DataError, ModelError, OptionError
from sipp.ledger import ledger_lines
from sipp.train.files import TEMPORARY, sync_folder

CHUNK = 1 << 20


def check_new(path: Path, *, force: bool) -> None:
    """Nothing; OptionError where something is there already and --force was not given."""
    if path.is_symlink():
        raise OptionError(f"{path} is a symbolic link, and leads elsewhere; give the place itself")
    if path.is_dir():
        taken = any(path.iterdir())
        if taken and not force:
            raise OptionError(
                f"{path} is a folder with content; give another one, or --force to replace what this command writes"
            )
    elif path.exists() and not force:
        raise OptionError(f"{path} exists; give another name, or --force to replace it")


def check_place(path: Path) -> None:
    """Nothing; OptionError where the path cannot be written, nor folders on the way to it be made: it is tried.

    What is tried with is a file without a name where the disk has such, and gone at once where it has not.
    """
    place = path.parent
    try:
        _staged(path).exists()  # a name that is too long is found here
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written ({error.strerror or error}); free space or allow writing, or give another place"
        ) from error


def check_folder(path: Path, *, force: bool) -> None:
    """Nothing; OptionError where the folder cannot become this command's, looked at before the work."""
    check_place(path)
    if path.exists() and not path.is_dir():
        raise OptionError(f"{path} is a file; give a folder that does not exist yet, or is empty")
    check_new(path, force=force)
    if path.is_dir() and any(path.iterdir()):
        check_place(path / path.name)  # files are moved into it, one by one


def check_file(path: Path, *, force: bool) -> None:
    """Nothing; OptionError where the file cannot be written, looked at before the work."""
    check_place(path)
    if path.is_dir():
        raise OptionError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise OptionError(f"{path.parent} is no folder; make it first, or give another place")
    check_new(path, force=force)


def check_ledger(path: Path, *, out: Path | None) -> None:
    """Nothing; an error where no use could be recorded, looked at before the work. A new ledger is not made yet."""
    if out is not None:
        ours, theirs = (Path(os.path.realpath(one)) for one in (out, path))
        if ours == theirs or (ours in theirs.parents and not path.exists()):
            raise OptionError(f"the ledger {path} would stand in the way of --out {out}; give another place for one")
    if os.path.isdir(path):
        raise OptionError(f"{path} is a folder; give the name of a file")
    if os.path.isfile(path):
        ledger_lines(path)
        return
    if os.path.lexists(path):
        raise OptionError(f"{path} is no plain file, so no use could be read back from it; give another name")
    if not os.path.isdir(path.parent):
        raise OptionError(f"{path.parent} is no folder; make it first, or give another place")
    check_place(path)


def write_folder(folder: Path, files: Mapping[str, bytes], *, force: bool) -> None:
    """Nothing; the folder holds these files, or is as it was before.

    They are staged, on the disk, in a folder beside it. A new or empty folder then appears by one rename. In a folder
    with content (--force) the last file, the one that makes claims about the others, goes first and comes back last.
    """
    check_folder(folder, force=force)
    staged = _staged(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            staged.mkdir()
            for name, data in files.items():
                _write_through(staged / name, data)
            sync_folder(staged)
            if not folder.exists() or not any(folder.iterdir()):
                os.replace(staged, folder)
            else:
                (folder / list(files)[-1]).unlink(missing_ok=True)
                for name in files:
                    os.replace(staged / name, folder / name)
                sync_folder(folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        sync_folder(folder.parent)
    except OSError as error:
        raise DataError(
            f"{folder} could not be written ({error.strerror or error}); free space or allow writing, or give "
            "another place"
        ) from error


def write_file(path: Path, data: bytes, *, force: bool) -> None:
    """Nothing; the file holds the data, or is as it was before."""
    check_file(path, force=force)
    staged = _staged(path)
    try:
        try:
            _write_through(staged, data)
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({error.strerror or error}); free space or allow writing, or give another "
            "place"
        ) from error


def _staged(path: Path) -> Path:
    """Where a file or folder is made before it gets its name."""
    return path.parent / f"{TEMPORARY}{os.getpid()}-{path.name}"


def _write_through(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def tensor_bytes(tensors: Mapping[str, object]) -> bytes:
    """The tensors as a safetensors file; tied ones are written under each of their names."""
    wrong = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if wrong:
        raise ModelError(
            f"state_dict entries {', '.join(wrong[:5])} are no tensors, and safetensors holds nothing else"
        )
    # Copies: safetensors refuses memory that two names share.
    return tensors_to_bytes(
        {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}  # type: ignore[attr-defined]
    )


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
