"""A sheet on the page: its title as the finding, its facts as a card, its tables as bars or as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sipp.report import contents
from sipp.report.contents import Finding, Plot, Section, TableCell
from sipp.report.numbers import Unit
from sipp.report.palette import THIS
from sipp.report.plots import bar_view, bars, cards_plot
from sipp.results import Sheet, Table, number_in


def sheet_section(topic: str, sheet: Sheet, ident: str) -> Section:
    """The section that shows a sheet; what follows a semicolon in its title is the detail."""
    heading, _, detail = sheet.title.partition("; ")
    rows: list[list[Plot]] = []
    if sheet.facts:
        rows.append([cards_plot(f"{ident}-facts", topic, [card_of(sheet, topic)])])
    drawn = [table for table in sheet.tables if table.bars and len(table.rows) > 1]
    rows += [[_drawn(table, f"{ident}-table{index}", topic)] for index, table in enumerate(drawn)]
    listed = next((_listed(table) for table in sheet.tables if table not in drawn), None)
    words = " ".join([f"{table.words}." for table in drawn if table.words] + ([sheet.note] if sheet.note else []))
    return Section(topic, Finding(sentence(heading), detail), rows, listed, note=words)


def sentence(text: str) -> str:
    """The text as it begins a line."""
    return text[:1].upper() + text[1:]


def card_of(sheet: Sheet, title: str, text: str = "") -> dict[str, Any]:
    """A card with the facts of a sheet."""
    return {"title": title, "text": text, "rows": [list(fact) for fact in sheet.facts]}


def _drawn(table: Table, ident: str, title: str) -> Plot:
    """Bars for the columns that have some side by side, and for each other column of numbers; the reader chooses."""
    columns = dict(zip(table.columns, zip(*table.rows)))
    names = columns.pop(table.columns[0])
    groups = [{name: columns[name] for name in table.bars}]
    groups += [{name: cells} for name, cells in columns.items() if name not in (*table.bars, *table.texts)]
    views, options = [], []
    for group in groups:
        series = {name if len(group) > 1 else THIS: _numbers(cells) for name, cells in group.items()}
        if any(value is not None for values in series.values() for value in values):
            options.append(", ".join(group))
            views.append(bar_view(options[-1], _unit(group), series))
    choices = [{"label": "Show", "options": options}]
    return bars(
        ident, f"{title}: {table.columns[0]} by {table.columns[0]}", table.columns[0], names, views, choices=choices
    )


def _numbers(cells: Sequence[str]) -> list[float | None]:
    """The numbers in these cells: percentages as shares, None where there is none or it is not finite."""
    found = [number_in(cell) for cell in cells]
    values = [value / 100 if value is not None and "%" in cell else value for value, cell in zip(found, cells)]
    return [value if value is not None and math.isfinite(value) else None for value in values]


def _unit(group: dict[str, tuple[str, ...]]) -> Unit:
    return "share" if any("%" in cell for cells in group.values() for cell in cells) else "number"


def _listed(table: Table) -> contents.Table:
    rows = tuple((row[0], tuple(map(TableCell, row[1:]))) for row in table.rows)
    return contents.Table(table.words, table.columns, rows, wraps=True)
