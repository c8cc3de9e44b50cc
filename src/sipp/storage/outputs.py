"""Checks, before any work, where a command may write: what exists is replaced only with --force, an input never."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sipp.errors import OptionError
from sipp.storage.files import ROOM, temporary_path
from sipp.storage.tensors import metadata_of

RECORD_NAME = "report.json"  # what `sipp prune` calls its record,
WEIGHTS_NAME = "model.safetensors"  # and the network,
RECORD_KEY = "sipp record"  # which has the record in its header too
BENCH_NAME = "bench.json"  # the result of `sipp bench`, beside the network
FILE_SUFFIX = ".safetensors"  # of a network that is one file


def refuse_input(path: Path, option: str, read: Path) -> None:
    """Raises if the output path is what an option reads (also through a link), or a folder that contains it."""
    real, theirs = Path(os.path.realpath(path)), Path(os.path.realpath(read))
    is_same = real == theirs or (os.path.exists(path) and os.path.exists(read) and os.path.samefile(path, read))
    if is_same or real in theirs.parents:
        raise OptionError(
            f"{path} {'is' if is_same else 'holds'} what {option} reads ({read}), which is never overwritten, even "
            "with --force",
            fix="give another place",
        )


def check_place(path: Path) -> None:
    """Raises if the path cannot be written, by creating a temporary file there."""
    place = path.parent
    try:
        str(path).encode()  # the safetensors library takes no other names
        temporary_path(path).exists()  # a name that is too long is found here
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except UnicodeEncodeError as error:
        raise OptionError(f"{str(path)!r} is not valid text", fix="give another name") from error
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
    """Raises if a folder cannot be written, or holds anything and there is no --force; weights of others stay."""
    check_place(path)
    if path.exists() and not path.is_dir():
        raise OptionError(f"{path} is a file", fix="give a folder that does not exist yet, or is empty")
    if path.is_dir():
        check_place(path / WEIGHTS_NAME)
        if (path / WEIGHTS_NAME).exists() and RECORD_KEY not in metadata_of(path / WEIGHTS_NAME):
            raise OptionError(f"{path} holds a {WEIGHTS_NAME} that is not of sipp", fix="give another folder")
        if any(path.iterdir()) and not force:
            raise OptionError(
                f"{path} is a folder with content", fix="give another name, or --force to replace a network in it"
            )
