"""Checks where a command may write its output, so that no foreign file is ever replaced.

One rule holds for every command, `save_folder` and `sipp.page`: an existing file is replaced only with --force (from
Python always), and only if it is of the kind that the same command writes. So no foreign file and no input of another
kind is replaced. An input of the same kind (the network that is pruned or scored) is protected by `refuse_input`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sipp.errors import DataError, OptionError
from sipp.results import bench, certificate, evaluation
from sipp.storage.files import child_path, target_of_temporary, temporary_path, write_atomic

RECORD_NAME = "report.json"  # what `sipp prune` calls its record,
WEIGHTS_NAME = "model.safetensors"  # and the network
RECORD_KEY = "sipp record"  # in the header of the network, which holds its record too
BENCH_NAME = "bench.json"  # the result of `sipp bench`, beside the network
FILE_SUFFIX = ".safetensors"  # of a network that is one file
FILE_MARK = b'{"__metadata__":{"format":"sipp-file/'  # at its beginning, after the length of its header
PAGE_MARK = '<meta name="generator" content="sipp report">'  # in the head of a page
FIGURE_MARK = "sipp report"  # the creator field in a figure's metadata
HEAD = 1 << 14  # bytes in which the mark of a page or figure is searched
MOST_RECORD = 1 << 28  # bytes; a larger file is not parsed


@dataclass(frozen=True)
class OutputKind:
    """A kind of file that a command writes, and how to recognise it."""

    name: str
    is_ours: Callable[[Path], bool]


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(HEAD)


def _is_figure(path: Path) -> bool:
    data = path.read_bytes() if path.stat().st_size <= MOST_RECORD else b""
    png, pdf = b"Software\0" + FIGURE_MARK.encode(), b"/Creator (" + FIGURE_MARK.encode() + b")"
    return (data.startswith(b"\x89PNG") and png in data[:HEAD]) or (data.startswith(b"%PDF") and pdf in data)


def _is_pruned(folder: Path) -> bool:
    """Whether the folder holds a pruned network with its record."""
    from sipp.storage.pruned_folder import read_pruned

    try:
        read_pruned(folder)
    except DataError:
        return False
    return (folder / WEIGHTS_NAME).exists()


def _json_field(path: Path, key: str) -> Any:
    """The value of this key in a JSON file; None if it is no JSON object."""
    try:
        content = json.loads(path.read_bytes()) if path.stat().st_size <= MOST_RECORD else None
    except (ValueError, RecursionError):
        return None
    return content.get(key) if isinstance(content, dict) else None


PAGE = OutputKind("page of `sipp report`", lambda path: PAGE_MARK.encode() in _head(path))
FIGURE = OutputKind("figure of sipp", _is_figure)
BENCH = OutputKind("record of `sipp bench`", lambda path: _json_field(path, "kind") == bench.KIND)
EVALUATION = OutputKind("record of `sipp eval`", lambda path: _json_field(path, "kind") == evaluation.KIND)
NETWORK = OutputKind("file of `sipp.save`", lambda path: _head(path)[8:].startswith(FILE_MARK))
CERTIFICATE = OutputKind("certificate", lambda path: _json_field(path, "kind") == certificate.KIND)
PRUNED_FOLDER = OutputKind("whole folder of `sipp prune`", _is_pruned)


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


def _check_new(path: Path, kind: OutputKind, *, force: bool) -> None:
    """Raises if the path exists, unless it is of this kind and --force is given."""
    if path.is_symlink():
        raise OptionError(f"{path} is a symbolic link", fix="give the path that it points to")
    if not path.exists() or (path.is_dir() and all(target_of_temporary(inner) is not None for inner in path.iterdir())):
        return  # nothing is there, or what a killed writer left
    if not path.is_dir() and not path.is_file():
        raise OptionError(f"{path} is not a plain file, and cannot be replaced", fix="give another name")
    try:
        ours = kind.is_ours(path)
    except OSError as error:
        raise OptionError(f"{path} cannot be read ({error.strerror or error})", fix="give another place") from error
    there = "is a folder with content" if path.is_dir() else "exists"
    if not ours:
        raise OptionError(
            f"{path} {there} and is not a {kind.name}, and nothing else is replaced",
            fix="give another name, or move it away",
        )
    if not force:
        raise OptionError(f"{path} {there}", fix="give another name, or --force to replace what this command writes")


def check_place(path: Path) -> None:
    """Raises if the path cannot be written, by creating a temporary file there."""
    place = path.parent
    try:
        temporary_path(path).exists()  # a name that is too long is found here
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written ({error.strerror or error})",
            fix="free space or allow writing, or give another place",
        ) from error


def check_folder(path: Path, *, force: bool) -> None:
    """Raises, before any work is done, if `sipp prune` cannot write to the folder."""
    check_place(path)
    if path.exists() and not path.is_dir():
        raise OptionError(f"{path} is a file", fix="give a folder that does not exist yet, or is empty")
    for name in (WEIGHTS_NAME, RECORD_NAME):
        child_path(path, name)  # a folder that others made may hold links to the user's own files
    _check_new(path, PRUNED_FOLDER, force=force)
    if path.is_dir():
        check_place(path / WEIGHTS_NAME)


def check_file(path: Path, kind: OutputKind, *, force: bool, makes_folder: bool = False) -> None:
    """Raises, before any work is done, if the file cannot be written."""
    check_place(path)
    if path.is_dir():
        raise OptionError(f"{path} is a folder", fix="give the name of a file")
    if not makes_folder and not path.parent.is_dir():
        raise OptionError(f"{path.parent} is not a folder", fix="make it first, or give another place")
    _check_new(path, kind, force=force)


def write_file(path: Path, data: bytes, kind: OutputKind, *, force: bool) -> None:
    """Checks the path, then writes the file atomically."""
    check_file(path, kind, force=force)
    write_atomic(path, data)
