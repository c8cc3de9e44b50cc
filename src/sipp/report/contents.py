"""The parts of a page: articles made of sections with plots and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Plot = dict[str, Any]  # plain values for the page's script, see `plots.py`


@dataclass(frozen=True)
class Finding:
    """A heading, and a sentence that qualifies it."""

    heading: str
    detail: str


@dataclass(frozen=True)
class PageCell:
    """One table cell; `tone` is its CSS class, `title` its tooltip."""

    text: str
    tone: str = ""
    title: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table with named rows."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[PageCell, ...]], ...]
    wraps: bool = False  # long names and headings may wrap


@dataclass(frozen=True)
class Section:
    """A section: its finding, a table, rows of plots, and a note."""

    topic: str
    finding: Finding
    rows: Sequence[Sequence[Plot]] = ()
    table: PageTable | None = None
    note: str = ""

    @property
    def plots(self) -> list[Plot]:
        return [plot for row in self.rows for plot in row]


@dataclass(frozen=True)
class Article:
    """The content of a page for one run or network, or for several together."""

    ident: str
    topic: str
    title: str
    sections: list[Section]
    state: str = ""  # empty if it is finished
    caveats: list[str] = field(default_factory=list)  # warnings that are always visible
    notes: Sequence[str] = ()  # collapsed: what could not be checked
    lead: Finding | None = None  # the first card, with tiles and next steps
    steps: list[tuple[str, str]] = field(default_factory=list)  # why, and the command to type
    tiles: list[tuple[str, str, str]] = field(default_factory=list)  # a name, a key number, a line of explanation
    is_closed: bool = False  # collapsed to its title
    tables: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)  # values, also nested ones, by name


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values as (dotted key, value)."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
