"""Shows records in a notebook: the tables of a shell as HTML, with a bar beside each share.

Styles are inline, since a notebook may drop a stylesheet, and use the text colour, so that they suit light and dark
themes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape

from rich.table import Table
from rich.text import Text

BAR = "#3b82c4"  # readable on white and on black
LINE = "1px solid rgba(128,128,128,.35)"
BAR_WIDTHS = (7, 3)  # em; the second where more than two columns have bars
TEXT_WIDTH = 60  # em


def view(title: str, *parts: str) -> str:
    """The HTML of a record: a headline, and parts below it."""
    head = f'<div style="font-weight:600;margin-bottom:.4em;max-width:{TEXT_WIDTH}em">{escape(title)}</div>'
    return f'<div style="line-height:1.45">{head}{"".join(parts)}</div>'


def text_html(text: str) -> str:
    """A paragraph."""
    return f'<p style="margin:.4em 0;max-width:{TEXT_WIDTH}em">{escape(text)}</p>' if text else ""


def labels_html(pairs: Iterable[tuple[str, str]]) -> str:
    """A two-column table of labels and texts."""
    cell = 'style="text-align:left;vertical-align:top;padding:.1em .8em .1em 0;white-space:normal;background:none"'
    rows = "".join(f"<tr><th {cell}>{escape(a)}</th><td {cell}>{escape(b)}</td></tr>" for a, b in pairs)
    style = f"border-collapse:collapse;margin:.4em 0;max-width:{TEXT_WIDTH}em"
    return f'<table style="{style}">{rows}</table>' if rows else ""


def folded(title: str, text: str) -> str:
    """Preformatted text that opens on a click."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def table_html(table: Table, *, bars: Sequence[str] = ()) -> str:
    """The table as HTML; columns named in `bars` show a bar before each number, on a common scale.

    A percentage is a share of the whole, other numbers are shares of the largest of them.
    """
    columns = [([_plain(cell) for cell in column.cells], _plain(column.header)) for column in table.columns]
    barred = [head in bars for _, head in columns]
    drawn = [cell for (cells, _), is_barred in zip(columns, barred) for cell in cells if is_barred]
    finite = [cell for cell in drawn if math.isfinite(_value(cell) or math.inf)]
    is_share = all("%" in cell for cell in finite)
    scale = 100.0 if is_share else _largest(drawn)
    width = BAR_WIDTHS[sum(barred) > 2]
    sides = ["left" if column.justify == "left" else "right" for column in table.columns]
    heads = "".join(
        f'<th style="{_cell(side)};border-bottom:{LINE}">{escape(head)}</th>' for (_, head), side in zip(columns, sides)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td style="{_cell(side)}">{_bar(cells[i], scale, width) if is_barred else escape(cells[i])}</td>'
            for (cells, _), side, is_barred in zip(columns, sides, barred)
        )
        + "</tr>"
        for i in range(table.row_count)
    )
    style = "border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.4em 0"
    scroll = '<div style="overflow-x:auto">'  # a wide table scrolls inside its box
    return f'{scroll}<table style="{style}"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(side: str) -> str:
    return f"text-align:{side};padding:.15em .7em .15em 0;background:none;white-space:nowrap"


def _plain(cell: object) -> str:
    """The text of a cell, without rich markup."""
    return " ".join(Text.from_markup(cell).plain.split()) if isinstance(cell, str) else str(cell)


def _value(cell: str) -> float | None:
    """The first number in a cell; infinity for "inf" and "unlimited", None without a number."""
    if re.match(r"inf|unlimited", cell):
        return math.inf
    match = re.search(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?", cell)
    return None if match is None else float(match[0].replace(",", ""))


def _largest(cells: Iterable[str]) -> float:
    values = [value for value in map(_value, cells) if value is not None and math.isfinite(value)]
    return max(values, default=0.0) or 1.0


def _bar(cell: str, scale: float, width: int) -> str:
    """The cell with a bar before it, full at the scale and above; no bar without a number."""
    value = _value(cell)
    if value is None:
        return escape(cell)
    ground = f"display:inline-block;width:{width}em;height:.7em;background:rgba(128,128,128,.22)"
    filled = f"display:block;width:{100 * min(1.0, value / scale):.3g}%;height:100%;background:{BAR}"
    number = "display:inline-block;min-width:4.6em;padding-left:.5em"  # fixed width, so that bars line up
    bar = f'<span style="{ground}" aria-hidden="true"><span style="{filled}"></span></span>'
    return f'{bar}<span style="{number}">{escape(cell)}</span>'
