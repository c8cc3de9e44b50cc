"""The result of a command, and how it is printed: tables and lines, or one JSON document with --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import typer
from rich.console import Console, RenderableType

from sipp.results import to_json, words

UNBOUNDED = 10_000  # columns for files and pipes, so that no name is wrapped


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
