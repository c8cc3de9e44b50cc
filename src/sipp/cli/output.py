"""The result of a command: shown as tables and lines, or as one JSON document with --json; and what --out receives."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType

import sipp
from sipp.cli.errors import naming_option
from sipp.files import check_file, check_folder, refuse_input, seal, write_atomic
from sipp.results import to_json, words

UNBOUNDED = 10_000  # columns for files and pipes, so that no name is wrapped
ANOTHER = "give another place"
# for one broken result among others
HOW_TO_REPAIR = "put back an intact copy of that file, or move its folder away and create it again"


@dataclass(frozen=True)
class Answer:
    """The result of a command: tables and lines for people, values for --json, and an optional failure."""

    shown: Sequence[RenderableType]  # tables and text
    values: Any  # JSON values, or results
    failure: Exception | None = None  # raised after printing; None: exit code 0


def print_answer(answer: Answer, *, as_json: bool) -> None:
    """Prints the answer, then raises its failure, if any."""
    if as_json:
        typer.echo(json.dumps(to_json(answer.values), indent=2, allow_nan=False))
    else:
        show(*answer.shown)
    if answer.failure is not None:
        raise answer.failure


def record_of(kind: str, result: Any, about: Mapping[str, Any] = {}) -> dict[str, Any]:
    """A result as --json and --out write it, with what else the command says about it."""
    return {"kind": kind, "sipp": sipp.__version__, **to_json(about), **to_json(result)}


def listing(what: str, meaning: str, kind: str, descriptions: dict[str, str]) -> Answer:
    """An answer that lists names with descriptions."""
    table = words.plain_table(what, meaning, texts=(meaning,))
    for name, text in descriptions.items():
        table.add_row(name, text)
    rows = [{"name": name, "description": text} for name, text in descriptions.items()]
    return Answer([table], {"kind": kind, kind: rows})


def is_terminal() -> bool:
    """Whether stdout is a terminal (None if it is closed)."""
    return sys.stdout is not None and sys.stdout.isatty()


def show(*parts: RenderableType) -> None:
    """Prints tables and lines on stdout; in files and pipes nothing is wrapped or padded."""
    for part in parts:
        if isinstance(part, str):
            typer.echo(part)
        elif is_terminal():
            Console(highlight=False).print(part)
        else:
            text = StringIO()
            Console(file=text, width=UNBOUNDED, highlight=False, color_system=None).print(part)
            typer.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip()))


# --- what --out receives ----------------------------------------------------------------------------------------------


def check_out(
    path: Path | None,
    *,
    force: bool,
    reads: Mapping[str, str | Path | None],
    is_folder: bool = False,
    makes_folder: bool = False,
) -> None:
    """Refuses, before any work, what cannot be written, what exists without --force, and what the command reads."""
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
