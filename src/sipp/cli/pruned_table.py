"""How `sipp prune` prints a pruned network: the table of layers and the lines below it."""

from __future__ import annotations

from rich.table import Table

from sipp.records.display import labelled
from sipp.records.pruned import Pruned
from sipp.records.pruned_words import (
    column_words,
    has_useful_layer_bounds,
    headline,
    layers_table,
    next_step,
    summary_lines,
)
from sipp.storage.outputs import RECORD_NAME


def layer_table(pruned: Pruned, *, compact: bool = False) -> Table:
    """What each weight keeps, its strategies, and its bounds where one says anything; a compact one has neither."""
    if compact:
        return layers_table(pruned, strategies=[], bounds=False)
    return layers_table(pruned, strategies=_strategies(pruned), bounds=has_useful_layer_bounds(pruned))


def _strategies(pruned: Pruned) -> list[str]:
    """The strategies that took a row."""
    return sorted({name for layer in pruned.layers for name, n_rows in layer.strategies.items() if n_rows})


def statements(pruned: Pruned, certified: str = "") -> list[str]:
    """What the columns mean, and the lines below: what is left, what was `certified`, what is known, what to do."""
    return [
        *column_words(_strategies(pruned), has_useful_layer_bounds(pruned)),
        headline(pruned),
        *summary_lines(pruned, certified),
        labelled("next", next_step(pruned, in_shell=True, is_certified=bool(certified))),
        labelled(
            "in full", f"--json prints every bound and statement; with a folder as --out, they are in {RECORD_NAME}"
        ),
    ]
