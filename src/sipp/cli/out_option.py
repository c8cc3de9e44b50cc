"""The option --out: refused before any work if it cannot be written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sipp.cli.errors import naming_option
from sipp.errors import OptionError
from sipp.results.display import labelled_line
from sipp.storage.files import seal, write_atomic
from sipp.storage.outputs import check_file, check_place, refuse_input

ANOTHER = "give another place"


def check_out(
    path: Path | None, *, force: bool, makes_folder: bool = False, reads: Mapping[str, str | Path | None] | None = None
) -> None:
    """Refuses a file that cannot be written, that exists without --force, or that an option of the command reads."""
    if path is not None:
        with naming_option(f"--out {path}", ANOTHER):
            for option, read in (reads or {}).items():
                if read is not None:
                    refuse_input(path, option, Path(read))
            check_file(path, force=force, makes_folder=makes_folder)


def check_new(path: Path) -> None:
    """Refuses a path that exists: exported files may be in use."""
    with naming_option(f"--out {path}", ANOTHER):
        check_place(path)
        if not path.parent.is_dir():
            raise OptionError(f"{path.parent} is not a folder", fix="make it first, or give another place")
        if path.exists():
            raise OptionError(f"{path} exists", fix="give another name, or move it away")


def write_out(path: Path, data: bytes, *, force: bool) -> None:
    """Writes the file."""
    with naming_option(f"--out {path}", ANOTHER):
        check_file(path, force=force)
        write_atomic(path, data)


def write_record(path: Path | None, record: dict[str, Any], *, force: bool) -> list[str]:
    """Writes a record with its checksum, if --out is given; returns the line that reports it."""
    if path is None:
        return []
    write_out(path, json.dumps(seal(record), indent=1, allow_nan=False).encode(), force=force)
    return [labelled_line("written", str(path))]
