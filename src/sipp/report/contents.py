"""What a page is made of: articles, each about a result or several, made of sections with plots and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Plot = dict[str, Any]  # plain values for the page's script: see `plots.py`
SHOWN_LENGTH = 500  # of a value in the table of the configuration


@dataclass(frozen=True)
class Finding:
    """A heading that says what was found, and a sentence that says how far it goes."""

    heading: str
    detail: str


@dataclass(frozen=True)
class TableCell:
    """One value of a table; `tone` is the class of its colour, `title` what it says when pointed at."""

    text: str
    tone: str = ""
    title: str = ""


@dataclass(frozen=True)
class SummaryTile:
    """One number that is read first, and a line that says what it is."""

    name: str
    value: str
    words: str = ""


@dataclass(frozen=True)
class NextStep:
    """Something to do next: why, and what to type."""

    words: str
    command: str


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head, each with its name."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[TableCell, ...]], ...]
    wraps: bool = False  # names and heads are long, and may take several lines


@dataclass(frozen=True)
class Section:
    """A heading that says what was found, a table, rows of plots, and a note below them."""

    kicker: str
    finding: Finding
    rows: Sequence[Sequence[Plot]] = ()
    table: Table | None = None
    folded: tuple[str, Plot] | None = None  # a line, and the plot that is shown when it is opened
    note: str = ""
    is_closed: bool = False  # only its heading is shown until it is opened

    @property
    def plots(self) -> list[Plot]:
        return [plot for row in self.rows for plot in row] + ([] if self.folded is None else [self.folded[1]])


@dataclass(frozen=True)
class Article:
    """What the page says of one run or pruned model, or of several together."""

    ident: str
    kicker: str
    title: str
    sections: list[Section]
    state: str = ""  # empty where it is finished
    caveats: list[str] = field(default_factory=list)  # that a reader must see
    remarks: Sequence[str] = ()  # that can be opened: what could not be checked
    lead: Finding | None = None  # the first card, with the tiles and what to do next
    steps: list[NextStep] = field(default_factory=list)
    tiles: list[SummaryTile] = field(default_factory=list)
    is_closed: bool = False  # only its title is shown until it is opened
    tables: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)


@dataclass(frozen=True)
class About:
    """What a page is about beside its results: a study's name, what it shows, and rows of what is known of it."""

    title: str
    finding: Finding
    rows: list[tuple[str, str]]


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested values."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def key_value_rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of a table: the dotted keys of nested values, and each value in words, cut where it is long."""
    return [(key, _as_text(value)) for key, value in flat(values)]


def _as_text(value: Any) -> str:
    text = (
        ", ".join(str(item) for item in value) if isinstance(value, list) else "none" if value is None else str(value)
    )
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]} ..."
