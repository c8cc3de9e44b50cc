"""What the commands print: one JSON document or text on stdout, everything else on stderr; shared options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from sipp.records.display import plain_table
from sipp.records.json_values import json_value

UNBOUNDED = 10_000  # columns where stdout is a file or a pipe: no name is folded there


@contextmanager
def only_json(wanted: bool) -> Iterator[None]:
    """A context in which, with --json, whatever anything prints goes to stderr: stdout is for the document alone."""
    if not wanted:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def print_json(values: Any) -> None:
    """Prints the document. Call it outside of `only_json`."""
    typer.echo(json.dumps(json_value(values), indent=2, allow_nan=False))


def show_list(what: str, meaning: str, kind: str, found: dict[str, str], as_json: bool) -> None:
    """Prints names and what each is, as a table or as the document `kind`."""
    if as_json:
        print_json({"kind": kind, kind: [{"name": name, "description": words} for name, words in found.items()]})
        return
    table = plain_table(what, meaning, texts=(meaning,))
    for name, words in found.items():
        table.add_row(name, words)
    show(table)


def is_terminal() -> bool:
    """Whether stdout is one; it may be closed, and is None then."""
    return sys.stdout is not None and sys.stdout.isatty()


def too_wide(table: Table) -> bool:
    """Whether the table would be cut on the terminal at hand; a file or a pipe has no width."""
    natural = Console(file=StringIO(), width=UNBOUNDED).measure(table).maximum
    return is_terminal() and natural > Console().width


def show(*parts: Table | str) -> None:
    """Prints tables and lines on stdout. In a file or a pipe nothing is cut, and lines end where they end."""
    for part in parts:
        if isinstance(part, str):
            typer.echo(part)
        elif is_terminal():
            Console(highlight=False).print(part)
        else:
            text = StringIO()
            Console(file=text, width=UNBOUNDED, highlight=False, color_system=None).print(part)
            typer.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip()))
