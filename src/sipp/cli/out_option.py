"""The option --out: refused before any work if it cannot be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sipp.cli.errors import naming_option
from sipp.errors import OptionError
from sipp.results.display import labelled_line
from sipp.storage.files import seal
from sipp.storage.outputs import OutputKind, check_file, check_place, write_file

ANOTHER = "give another place"


def check_out(path: Path | None, kind: OutputKind, *, force: bool, makes_folder: bool = False) -> None:
    """Refuses a file that cannot be written, or must not be replaced."""
    if path is not None:
        with naming_option(f"--out {path}", ANOTHER):
            check_file(path, kind, force=force, makes_folder=makes_folder)


def check_new(path: Path) -> None:
    """Refuses a path that exists, even with the same kind of content: exported files may be in use."""
    with naming_option(f"--out {path}", ANOTHER):
        check_place(path)
        if not path.parent.is_dir():
            raise OptionError(f"{path.parent} is not a folder", fix="make it first, or give another place")
        if path.is_symlink() or path.exists():
            raise OptionError(f"{path} exists", fix="give another name, or move it away")


def write_out(path: Path, data: bytes, kind: OutputKind, *, force: bool) -> None:
    """Writes the file."""
    with naming_option(f"--out {path}", ANOTHER):
        write_file(path, data, kind, force=force)


def write_record(path: Path | None, record: dict[str, Any], kind: OutputKind, *, force: bool) -> list[str]:
    """Writes a record with its checksum, if --out is given; returns the line that reports it."""
    if path is None:
        return []
    write_out(path, json.dumps(seal(record), indent=1, allow_nan=False).encode(), kind, force=force)
    return [labelled_line("written", str(path))]
