"""The option --out: refused before any work if it cannot be written, and what is written there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sipp.cli.errors import naming_option
from sipp.files import check_file, check_folder, refuse_input, seal, write_atomic
from sipp.results import to_json, words

ANOTHER = "give another place"


def check_out(
    path: Path | None,
    *,
    force: bool,
    reads: Mapping[str, str | Path | None],
    is_folder: bool = False,
    makes_folder: bool = False,
) -> None:
    """Refuses what cannot be written, what exists without --force, and what an option of the command reads."""
    if path is None:
        return
    with naming_option(f"--out {path}", ANOTHER):
        for option, read in reads.items():
            if read is not None:
                refuse_input(path, option, Path(str(read).removeprefix("hf:")))
        if is_folder:
            check_folder(path, force=force)
        else:
            check_file(path, force=force, makes_folder=makes_folder)


def write_out(path: Path, data: bytes) -> None:
    """Writes the file."""
    with naming_option(f"--out {path}", ANOTHER):
        write_atomic(path, data)


def write_record(path: Path | None, record: dict[str, Any]) -> list[str]:
    """Writes a record with its checksum, if --out is given; returns the line that reports it."""
    if path is None:
        return []
    write_out(path, json.dumps(seal(to_json(record)), indent=1, allow_nan=False).encode())
    return [words.labelled_line("written", str(path))]
