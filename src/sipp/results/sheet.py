"""How results are shown: as text by print, and as HTML in a notebook.

Every result makes its sheet once; `@shown` prints it and shows it in a notebook. HTML has inline styles, since a
notebook may drop a stylesheet, and takes the colour of the text around it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from html import escape
from io import StringIO
from typing import Any, TypeVar

from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape as without_markup
from rich.measure import Measurement
from rich.table import Table as RichTable

from sipp.results import words

BAR = "#3b82c4"  # readable on white and on black
LINE = "1px solid rgba(128,128,128,.35)"
BAR_WIDTHS = (7, 3)  # em; the second where more than two columns have bars
TEXT_WIDTH = 60  # em
UNLIMITED = 10_000  # columns of a table that is measured
SHORT = 40  # characters of a text in a repr
PERCENT = "{:.2%}".format

Class = TypeVar("Class", bound=type)
Entry = str | float | None  # of a table: a text, a number, or nothing


@dataclass(frozen=True)
class Table:
    """Named columns: the first and those in `texts` hold words, the others numbers, which are written when drawn."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    texts: tuple[str, ...] = ()
    bars: tuple[str, ...] = ()  # columns of shares, or of sizes on one scale: a notebook draws a bar beside each
    words: str = ""  # what the columns mean
    forms: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)  # how a column's numbers are written

    @classmethod
    def of(cls, records: Iterable[Any], columns: Mapping[str, str], **drawn: Any) -> Table:
        """A table with one line for each record; `columns` names the attribute below each heading."""
        rows = tuple(tuple(getattr(record, attribute) for attribute in columns.values()) for record in records)
        return cls(tuple(columns), rows, **drawn)

    def column(self, name: str) -> list[Entry]:
        """The entries of a column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def written(self, row: tuple[Entry, ...]) -> list[str]:
        """One line as texts."""
        return [self._written(name, entry) for name, entry in zip(self.columns, row)]

    def is_share(self, column: str) -> bool:
        """Whether its numbers are written as percentages."""
        return column in self.forms and self.forms[column](1.0).endswith("%")

    def _written(self, column: str, entry: Entry) -> str:
        if entry is None or isinstance(entry, str):
            return entry or ""
        form = self.forms.get(column)
        return form(entry) if form is not None else f"{entry:,}" if isinstance(entry, int) else words.number(entry)


@dataclass(frozen=True)
class Sheet:
    """The content of a shown result: a title, labelled facts, tables, and a note at the end."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()  # labels and texts
    tables: tuple[Table, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """The sheet as text, about as wide as a screen."""
        lines = [_wrapped(self.title), *(words.labelled(label, text) for label, text in self.facts)]
        for table in self.tables:
            lines += [table_text(table), *([_wrapped(table.words, indent="  ")] if table.words else [])]
        return "\n".join([*lines, *([_wrapped(self.note)] if self.note else [])])


def shown(cls: Class) -> Class:
    """Decorates a result that has a `sheet`, or at least a `sentence`: it is printed, and shown in a notebook.

    Its repr, unless it has one, holds the short values of its fields, because a sheet may take long to make.
    """

    def sheet(self: Any) -> Sheet:
        return self.sheet if hasattr(type(self), "sheet") else Sheet(self.sentence)

    def representation(self: Any) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        short = [f"{name}={value!r}" for name, value in values.items() if _is_short(value)]
        return f"<{type(self).__name__} {', '.join(short)}; print() shows it>"

    result: Any = cls
    result.__str__ = lambda self: str(sheet(self))
    result._repr_html_ = lambda self: sheet_html(sheet(self))
    if "__repr__" not in cls.__dict__:
        result.__repr__ = representation
    return cls


def _is_short(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, str) and 0 < len(value) <= SHORT)


def without_empty(table: Table) -> Table:
    """The table without columns that have no text."""
    kept = [i for i, texts in enumerate(zip(*map(table.written, table.rows))) if any(texts)]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=rows)


# --- as text ----------------------------------------------------------------------------------------------------------


def table_text(table: Table) -> str:
    """The table as plain text, also in a notebook, where rich would show it at once.

    Texts are folded where the table would be too wide, names and numbers never.
    """
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, name in enumerate(table.columns):
        is_text = i == 0 or name in table.texts
        side: JustifyMethod = "left" if is_text else "right"
        drawn.add_column(name.replace(" ", "\n"), justify=side, no_wrap=not is_text, overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(without_markup, table.written(row)))
    buffer = StringIO()
    console = Console(file=buffer, width=words.WIDTH, force_terminal=False, force_jupyter=False)
    wide = console.options.update(max_width=UNLIMITED)
    console.width = max(words.WIDTH, Measurement.get(console, wide, drawn).minimum)
    console.print(drawn)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text,
        words.WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# --- as HTML ----------------------------------------------------------------------------------------------------------


def sheet_html(sheet: Sheet) -> str:
    """The sheet as HTML for a notebook: bars beside shares, everything else as text."""
    head = f'<div style="font-weight:600;margin-bottom:.4em;max-width:{TEXT_WIDTH}em">{escape(sheet.title)}</div>'
    tables = (table_html(table) + _paragraph(table.words) for table in sheet.tables)
    parts = "".join([head, _facts_html(sheet.facts), *tables, _paragraph(sheet.note)])
    return f'<div style="line-height:1.45">{parts}</div>'


def _paragraph(text: str) -> str:
    return f'<p style="margin:.4em 0;max-width:{TEXT_WIDTH}em">{escape(text)}</p>' if text else ""


def _facts_html(facts: Iterable[tuple[str, str]]) -> str:
    cell = 'style="text-align:left;vertical-align:top;padding:.1em .8em .1em 0;white-space:normal;background:none"'
    rows = "".join(f"<tr><th {cell}>{escape(label)}</th><td {cell}>{escape(text)}</td></tr>" for label, text in facts)
    style = f"border-collapse:collapse;margin:.4em 0;max-width:{TEXT_WIDTH}em"
    return f'<table style="{style}">{rows}</table>' if rows else ""


def table_html(table: Table) -> str:
    """The table as HTML, with a bar before each number of the columns in `bars`, on one scale.

    A share is one of the whole, other numbers are shares of the largest of them.
    """
    scale = 1.0 if all(map(table.is_share, table.bars)) else _largest(table)
    width = BAR_WIDTHS[len(table.bars) > 2]
    sides = ["left" if i == 0 or name in table.texts else "right" for i, name in enumerate(table.columns)]
    heads = "".join(
        f'<th style="{_cell(side)};border-bottom:{LINE}">{escape(head)}</th>'
        for head, side in zip(table.columns, sides)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_cell(side)}">{_bar(entry, text, scale, width) if name in table.bars else escape(text)}</td>'
            for name, entry, text, side in zip(table.columns, row, table.written(row), sides)
        )
        + "</tr>"
        for row in table.rows
    )
    style = "border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.4em 0"
    scroll = '<div style="overflow-x:auto">'  # a wide table scrolls inside its box
    return f'{scroll}<table style="{style}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(side: str) -> str:
    return f"text-align:{side};padding:.15em .7em .15em 0;background:none;white-space:nowrap"


def _largest(table: Table) -> float:
    entries = [entry for name in table.bars for entry in table.column(name)]
    return max((entry for entry in entries if isinstance(entry, int | float) and math.isfinite(entry)), default=0) or 1


def _bar(entry: Entry, text: str, scale: float, width: int) -> str:
    """The entry with a bar before it, full at the scale and above; no bar without a number."""
    if not isinstance(entry, int | float) or math.isnan(entry):
        return escape(text)
    ground = f"display:inline-block;width:{width}em;height:.7em;background:rgba(128,128,128,.22)"
    filled = f"display:block;width:{100 * min(1.0, max(0.0, entry / scale)):.3g}%;height:100%;background:{BAR}"
    number = "display:inline-block;min-width:4.6em;padding-left:.5em"  # fixed width, so that bars line up
    bar = f'<span style="{ground}" aria-hidden="true"><span style="{filled}"></span></span>'
    return f'{bar}<span style="{number}">{escape(text)}</span>'
