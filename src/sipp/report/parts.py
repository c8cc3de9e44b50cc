"""What a page is made of: parts, one for a result, made of sections; and what is said beside the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sipp.report.tables import Table
from sipp.report.words import Finding

SHOWN_LENGTH = 500  # of a value in the table of the configuration


@dataclass(frozen=True)
class Section:
    """A heading that says what was found, a table, rows of plots, and a note below them."""

    kicker: str
    finding: Finding
    rows: list[list[str]]
    table: Table | None = None
    folded: tuple[str, list[str]] | None = None  # a line, and the plots that are shown when it is opened
    note: str = ""


@dataclass(frozen=True)
class Part:
    """What the page says of one run or pruned model, or of several together."""

    ident: str
    kicker: str
    title: str
    state: str  # empty where it is finished
    caveats: list[str]  # that a reader must see
    remarks: list[str]  # that can be opened: what could not be checked
    tiles: list[tuple[str, str]]
    sections: list[Section]
    tables: list[tuple[str, list[tuple[str, str]]]]


@dataclass(frozen=True)
class About:
    """What a page is about beside its results: a study's name, what it shows, and rows of what is known of it."""

    title: str
    finding: Finding
    rows: list[tuple[str, str]]


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value) of nested values, for a table."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", as_text(value)


def as_text(value: Any) -> str:
    """A value of a record as a cell, cut where it is long."""
    text = ", ".join(str(one) for one in value) if isinstance(value, list) else "none" if value is None else str(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]} ..."
