"""Tables a person wants to read, as plain text."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from sipp.pruned import Pruned

WIDTH = 118


def pruned_table(pruned: Pruned) -> str:
    """The layers of a pruned network, what each keeps and what is promised, and the statements below."""
    names = sorted({name for layer in pruned.layers for name in layer.strategies})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("weight", overflow="fold")
    has_measured = any(layer.eps_measured is not None for layer in pruned.layers)
    columns = ("rows", "fan-in", "kept", "keep", *names, "dead rows", "eps", "Delta", "eps*Delta", "kappa")
    for column in (*columns, "measured") if has_measured else columns:
        table.add_column(column, justify="right")
    for layer in pruned.layers:
        table.add_row(
            layer.name,
            str(layer.n_rows),
            str(layer.fan_in),
            f"{layer.kept:,}",
            f"{layer.keep:.2%}",
            *(str(layer.strategies.get(name, 0)) for name in names),
            str(len(layer.dead_rows) or ""),
            *(_number(value) for value in (layer.eps, layer.sign_complexity, layer.bound, layer.kappa)),
            *([_number(layer.eps_measured)] if has_measured else []),
        )
    lines = [
        f"{pruned.method}: {pruned.kept:,} of {pruned.n_weights:,} prunable weights kept ({pruned.keep:.2%})",
        text_of(table),
        *statement_lines(pruned),
    ]
    if missing := budget_line(pruned):
        lines.insert(1, missing)
    if pruned.assumption is not None:
        lines.append(f"assumption:      {pruned.assumption.verdict} {pruned.assumption.es_verdict}")
    dead = [layer for layer in pruned.layers if layer.dead_rows]
    if dead:
        n_rows = sum(len(layer.dead_rows) for layer in dead)
        lines.append(
            f"warning:         {n_rows} rows died, in {', '.join(layer.name for layer in dead[:6])}"
            + (", ..." if len(dead) > 6 else "")
        )
    return "\n".join(lines)


def budget_line(pruned: Pruned) -> str:
    """Why the number kept is not the number asked for; empty where it is."""
    if pruned.kept == pruned.budget:
        return ""
    if pruned.draws == "fixed":
        return f"asked for {pruned.budget:,}: with draws='fixed' the number kept is random, and at most that on average"
    return f"asked for {pruned.budget:,}: only {pruned.kept:,} weights have a positive sensitivity to draw by"


def statement_lines(pruned: Pruned) -> list[str]:
    """What is promised, first with the constant that the theory assumes, then with the one that was measured."""
    if pruned.guarantee is None:
        return ["rows and layers: no statement", f"network:         {pruned.bound}"]
    lines = [f"assumed C:       rows and layers: {pruned.guarantee}"]
    if pruned.guarantee.met:
        lines.append(f"                 Delta, of each layer by itself: {pruned.guarantee.layers}")
    if pruned.measured is not None:
        trust = "" if pruned.measured.c_constant is None else " (the one to trust)"
        lines.append(f"measured C:      {pruned.measured}{trust}")
    return [*lines, f"network:         {pruned.bound}"]


def text_of(table: Table) -> str:
    """The table as plain text."""
    buffer = StringIO()
    Console(file=buffer, width=WIDTH, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
