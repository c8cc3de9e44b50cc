"""A pruned network as the command line tells of it: a table, the statements below it, the levels of a walk."""

from __future__ import annotations

from rich.table import Table

from sipp.records.display import labelled, number, plain_table
from sipp.records.pruned import Pruned, PrunedLayer
from sipp.records.pruned_words import (
    BOUND_COLUMNS,
    SHOWN_AS,
    bounds_of,
    column_words,
    has_telling_layers,
    headline,
    next_step,
    summary_lines,
)
from sipp.storage.outputs import RECORD_NAME


def layer_table(pruned: Pruned, *, compact: bool = False) -> Table:
    """What each weight keeps, what goes, and its bounds where one says anything; the last line is the whole network.

    The compact one, for narrow terminals, leaves out the shape, the strategies, and the parts of the bound.
    """
    names = [] if compact else _strategies(pruned)
    rows = [(layer.name, *_cells(layer, names)) for layer in pruned.layers]
    n_rows = sum(layer.n_rows for layer in pruned.layers)
    dead = sum(len(layer.dead_rows) for layer in pruned.layers)
    sums = [str(sum(layer.strategies.get(name, 0) for layer in pruned.layers)) for name in names]
    counts = (f"{pruned.kept:,}", f"{pruned.n_weights - pruned.kept:,}", f"{pruned.keep:.2%}")
    last = ("all prunable weights", f"{n_rows:,}", "", *counts, *sums, str(dead or ""), *([""] * len(BOUND_COLUMNS)))
    strategies = tuple(f"{SHOWN_AS.get(name, name)} rows" for name in names)
    columns = ("weight", "rows", "fan-in", "kept", "removed", "keep", *strategies, "dead rows", *BOUND_COLUMNS)
    left_out = {"rows", "fan-in", *BOUND_COLUMNS[:-1]} if compact else set()
    left_out |= set() if dead else {"dead rows"}
    known = [bounds_of(layer) for layer in pruned.layers] if has_telling_layers(pruned) else []
    left_out |= {name for i, name in enumerate(BOUND_COLUMNS) if all(values[i] is None for values in known)}
    shown = [i for i, column in enumerate(columns) if column not in left_out]
    table = plain_table(*(columns[i] for i in shown), folds=compact)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    table.add_section()
    table.add_row(*(last[i] for i in shown))
    return table


def _strategies(pruned: Pruned) -> list[str]:
    """The strategies that took a row."""
    return sorted({name for layer in pruned.layers for name, n_rows in layer.strategies.items() if n_rows})


def _cells(layer: PrunedLayer, names: list[str]) -> tuple[str, ...]:
    counts = (f"{layer.kept:,}", f"{layer.n_weights - layer.kept:,}", f"{layer.keep:.2%}")
    strategies = (str(layer.strategies.get(name, 0)) for name in names)
    bounds = (number(value) for value in bounds_of(layer))
    return f"{layer.n_rows:,}", f"{layer.fan_in:,}", *counts, *strategies, str(len(layer.dead_rows) or ""), *bounds


def statements(pruned: Pruned, certified: str = "") -> list[str]:
    """What the columns mean, and the lines below: what is left, what was `certified`, what is known, what to do."""
    return [
        *column_words(_strategies(pruned), has_telling_layers(pruned)),
        headline(pruned),
        *summary_lines(pruned, certified),
        labelled("next", next_step(pruned, in_shell=True, is_certified=bool(certified))),
        labelled(
            "in full", f"--json prints every bound and statement; with a folder as --out, they are in {RECORD_NAME}"
        ),
    ]
