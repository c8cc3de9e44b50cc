"""The result of a command: printed, or one JSON document with --json; and what --out receives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import sipp
from sipp.cli.errors import naming_option
from sipp.errors import OptionError
from sipp.files import FILE_SUFFIX, check_file, check_folder, refuse_input, write_atomic
from sipp.results import Sheet, Table, to_json, words

ANOTHER = "give another place"
FILES = (".pt", ".pth", ".bin", ".onnx", ".json", ".zip")  # endings that no folder has


@dataclass(frozen=True)
class Answer:
    """The result of a command: results and lines for people, values for --json, and an optional failure."""

    shown: Sequence[object]  # printed one after the other
    values: Any  # JSON values, or results
    failure: Exception | None = None  # raised after printing; None: exit code 0


def print_answer(answer: Answer, *, as_json: bool) -> None:
    """Prints the answer, then raises its failure, if any."""
    if as_json:
        typer.echo(json.dumps(to_json(answer.values), indent=2, allow_nan=False))
    else:
        for part in answer.shown:
            typer.echo(str(part))
    if answer.failure is not None:
        raise answer.failure


def record_of(kind: str, result: Any, about: Mapping[str, Any] = {}) -> dict[str, Any]:
    """A result as --json and --out write it, with further facts of the command."""
    return {"kind": kind, "sipp": sipp.__version__, **to_json(about), **to_json(result)}


def listing(kind: str, descriptions: Mapping[str, str]) -> Answer:
    """An answer that lists names with descriptions."""
    table = Table(("name", "description"), tuple(descriptions.items()), texts=("description",))
    rows = [{"name": name, "description": text} for name, text in descriptions.items()]
    return Answer([Sheet(kind, tables=(table,))], {"kind": kind, kind: rows})


# --- what --out receives ----------------------------------------------------------------------------------------------


def check_out(
    path: Path | None,
    *,
    force: bool,
    reads: Mapping[str, str | Path | None],
    is_folder: bool = False,
    makes_folder: bool = False,
) -> None:
    """Raises, before any work, if --out cannot be written, exists (without --force), or is what the command reads."""
    if path is None:
        return
    with naming_option(f"--out {path}", ANOTHER):
        for option, read in reads.items():
            if read is not None:
                refuse_input(path, option, Path(str(read).removeprefix("hf:")))
        if is_folder and path.suffix in FILES:
            raise OptionError(
                f"{path.name} names a file, and this is written as a folder",
                fix=f"give a name without {path.suffix}, or NAME{FILE_SUFFIX} for one small file",
            )
        if is_folder:
            check_folder(path, force=force)
        else:
            check_file(path, force=force, makes_folder=makes_folder)


def write_out(path: Path, data: bytes) -> None:
    """Writes the bytes of --out."""
    with naming_option(f"--out {path}", ANOTHER):
        write_atomic(path, data)


def write_record(path: Path | None, record: dict[str, Any]) -> list[str]:
    """Writes a record, if --out is given; returns the line that reports it."""
    if path is None:
        return []
    write_out(path, json.dumps(to_json(record), indent=1, allow_nan=False).encode())
    return [words.labelled_line("written", str(path))]
