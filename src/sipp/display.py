"""Tables a person wants to read, as plain text."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context, Decimal
from html import escape
from io import StringIO
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from sipp.pruning.result import Moved, Pruned, PrunedLayer

WIDTH = 118
SENTENCE_DIGITS = 3  # of measured numbers, rounded up: the words never claim more than the record
PLAIN_RANGE = (Decimal("1e-6"), Decimal("1e9"))  # printed without an exponent
LABEL = 17  # columns before the text of a statement
NAME_LENGTH = 28  # of a weight in a table: a longer name is shortened
BOUND_COLUMNS = ("eps assumed", "eps measured", "Delta", "layer bound")  # the last with the measured eps
MUCH = 0.5  # of its length: an output that moved further than this is warned of
SHOWN_AS = {"whole": "lossless"}  # all that ever mattered on the calibration points is kept


def pruned_table(pruned: Pruned) -> str:
    """The layers of a pruned network, what each keeps and what is promised, and the statements below."""
    names = sorted({name for layer in pruned.layers for name in layer.strategies})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = ("weight", "rows", "fan-in", "kept", "keep", *(SHOWN_AS.get(name, name) for name in names), "dead rows")
    labels = short_names([layer.name for layer in pruned.layers])
    rows = [
        (
            label,
            str(layer.n_rows),
            str(layer.fan_in),
            f"{layer.kept:,}",
            f"{layer.keep:.2%}",
            *(str(layer.strategies.get(name, 0)) for name in names),
            str(len(layer.dead_rows) or ""),
            *(number(value) for value in bounds_of(layer)),
        )
        for label, layer in zip(labels, pruned.layers)
    ]
    shown = [i for i in range(len(columns) + len(BOUND_COLUMNS)) if any(row[i] for row in rows)]  # not what is empty
    for i in shown:
        header = (*columns, *BOUND_COLUMNS)[i].replace(" ", "\n")  # narrow
        table.add_column(header, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    lines = [
        f"{pruned.method}: {pruned.kept:,} of {pruned.n_weights:,} prunable weights kept ({pruned.keep:.2%})"
        + ("" if pruned.pattern is None else f", {pruned.pattern} along every row"),
        text_of(table),
        *column_words(names, any(value is not None for layer in pruned.layers for value in bounds_of(layer))),
        *statement_lines(pruned),
    ]
    if pruned.choice is not None:
        lines.insert(1, f"blend: {pruned.choice}")
    if missing := budget_line(pruned):
        lines.insert(1, missing)
    if pruned.repair is not None:
        lines.append(f"repair:          {pruned.repair.sentence}")
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


def short_names(names: Sequence[str], length: int = NAME_LENGTH) -> list[str]:
    """Names that fit a table, long ones shortened; those that differ stay different.

    Tried in turn for all of them: a cut in the middle; parts of the name from the left as initials, which keep their
    numbers (h.3.attn.c_proj.weight); a number at the end. The page's script does the same.
    """
    differ = len(set(names))
    for way in (_cut, _initials):
        texts = [way(name, length) for name in names]
        if len(set(texts)) == differ:
            return texts
    return _numbered(names, length)


def _cut(name: str, length: int) -> str:
    """Its first and last letters, with '...' between them where it is long."""
    if len(name) <= length:
        return name
    half = (length - 3) // 2
    return f"{name[: length - 3 - half]}...{name[len(name) - half :]}"


def _initials(name: str, length: int) -> str:
    """Parts from the left become their first letter and their number, as many as needed, but not the last one.

    Parts before the number of a block always do: then all blocks of a network begin alike.
    """
    parts = name.split(".")
    n_head = next((i for i, part in enumerate(parts) if re.fullmatch("[0-9]+", part)), 0)
    for i in range(len(parts) - 1):
        if i >= n_head and len(".".join(parts)) <= length:
            break
        parts[i] = re.sub(r"^([^0-9]).*?([0-9]*)$", r"\1\2", parts[i], flags=re.DOTALL)
    return _cut(".".join(parts), length)


def _numbered(names: Sequence[str], length: int) -> list[str]:
    """The last resort: initials that end in a number of their own."""
    short = {name: name for name in names if len(name) <= length}
    taken = set(short)
    for i, name in enumerate(names, start=1):
        while name not in short:
            text = f"{_initials(name, length)[: max(0, length - 3 - len(str(i)))]}...{i}"
            if text not in taken:
                short[name] = text
                taken.add(text)
            i += len(names)
    return [short[name] for name in names]


# What the columns of a table of layers mean
_STRATEGY_WORDS = {
    "det": "det: rows that keep their most sensitive weights",
    "rand": "rand: rows whose weights are drawn",
    "lossless": "lossless: rows that keep all that ever mattered on the calibration points",
}
_BOUND_WORDS = (
    "eps: largest relative error of a row, with the assumed and the measured constant (T5-T9, T19)",
    "Delta: how much terms of both signs cancel",
    "layer bound: eps measured x Delta",
)


def column_words(strategies: list[str], has_bounds: bool) -> list[str]:
    """A line or two below a table of layers: what its columns mean."""
    shown = (SHOWN_AS.get(name, name) for name in strategies)
    words = [_STRATEGY_WORDS[name] for name in shown if name in _STRATEGY_WORDS]
    words += _BOUND_WORDS if has_bounds else ()
    text = "; ".join(words)
    return [textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")] if text else []


def pruned_html(pruned: Pruned) -> str:
    """The same as HTML, for a notebook: one sentence, then the table and the statements, folded away."""
    text = escape(pruned_table(pruned))
    first, _, rest = text.partition("\n")
    return (
        f"<div><strong>{first}</strong><p>{escape(cost_of(pruned))}</p>"
        f"<details><summary>Layers and statements</summary><pre>{rest}</pre></details></div>"
    )


def budget_line(pruned: Pruned) -> str:
    """Why the number kept is not the number asked for; empty where it is."""
    if pruned.kept == pruned.budget:
        return ""
    if pruned.draws == "fixed":
        return f"asked for {pruned.budget:,}: with draws='fixed' the number kept is random, and at most that on average"
    return f"asked for {pruned.budget:,}: only {pruned.kept:,} weights have a positive sensitivity to draw by"


def bounds_of(layer: PrunedLayer) -> tuple[float | None, ...]:
    """What stands in `BOUND_COLUMNS`: eps with the assumed C, then with the measured one and times Delta (T11, T19)."""
    return layer.eps, layer.eps_measured, layer.sign_complexity, layer.bound_measured


def statement_lines(pruned: Pruned, certified: str = "") -> list[str]:
    """What is known of the cost (what was `certified`, in words), what was measured (T19), what the theory says."""
    labelled = [("what it costs", certified or cost_of(pruned))]
    if pruned.guarantee is None:
        labelled.append(("statements", f"none: {pruned.bound.reason}"))
    else:
        if pruned.measured is not None:
            labelled.append(("measured", str(pruned.measured)))
        labelled.append(("network", str(pruned.bound)))
        delta = f"; Delta of each layer holds {pruned.guarantee.layers}" if pruned.guarantee.met else ""
        labelled.append(("paper's theory", f"rows and layers: {pruned.guarantee}{delta}"))
    if warning := moved_warning(pruned):
        labelled.insert(0, ("warning", warning))
    return [
        textwrap.fill(text, WIDTH, initial_indent=f"{label + ':':<{LABEL}}", subsequent_indent=" " * LABEL)
        for label, text in labelled
    ]


def moved_warning(pruned: Pruned) -> str:
    """What to try where the output moved by more than half of its length; empty where it did not, or is not known."""
    moved = pruned.moved
    if moved is None or moved.error <= MUCH:  # NaN is warned of
        return ""
    repair = "repair=True (--repair)" if pruned.repair is None else "sipp.repair with steps= and more points"
    return (
        f"the output moved by {percent_up(moved.error)} of its length on {_points_of(moved)}: as it is, this "
        f"network is of little use. Try {repair}, another method (sipp.compare says which), or a larger "
        "keep; or train it."
    )


def _points_of(moved: Moved) -> str:
    return f"{moved.n_points:,} calibration points" + (" kept aside" if moved.aside else "")


def cost_of(pruned: Pruned) -> str:
    """The best of the statements about the network, in plain words, or how to find out."""
    if pruned.kept == pruned.n_weights:
        return "nothing was removed, the output is the same."
    found = []
    if pruned.bound.met and pruned.bound.epsilon is not None and pruned.bound.coverage is not None:
        found.append((pruned.bound.epsilon, pruned.bound.coverage.share, pruned.bound.coverage.confidence))
    if pruned.measured is not None and pruned.measured.epsilon is not None:
        found.append((pruned.measured.epsilon, pruned.measured.network_share, pruned.measured.joint_confidence))
    if not found or min(found)[0] >= 1:
        why = "the bounds below are larger than the output itself" if found else "no statement covers the whole network"
        if pruned.moved is None or moved_warning(pruned):
            return f"not known yet: {why}. Measure it on new points: sipp.certify(model, pruned.model, points)"
        return (
            f"the output moved by {percent_up(pruned.moved.error)} of its size (norm) on {_points_of(pruned.moved)}. "
            f"Nothing is promised for new ones, {why}: sipp.certify(model, pruned.model, points) does"
        )
    epsilon, share, confidence = min(found)
    return (
        f"the output moves by at most {percent_up(epsilon)} of its size (norm), for all but {percent_up(share)} of new "
        f"inputs, {sure(confidence)}. Often tighter: sipp.certify(model, pruned.model, points)"
    )


def text_of(table: Table) -> str:
    """The table as plain text."""
    buffer = StringIO()
    Console(file=buffer, width=WIDTH, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())


def number(value: float | None) -> str:
    """A number of few digits; nothing for none."""
    return "" if value is None else f"{value:.3g}"


def percent(share: float) -> str:
    """A number the caller chose, as a percentage with all its digits: 0.05 -> '5 %'."""
    if not math.isfinite(share):
        return "unlimited"
    value = (Decimal(repr(float(share))) * 100).normalize()
    plain = value == 0 or PLAIN_RANGE[0] <= abs(value) < PLAIN_RANGE[1]
    return f"{value:{'f' if plain else 'e'}} %"


def percent_up(share: float) -> str:
    """A measured number as a percentage of few digits, rounded up: 0.12341 -> '12.4 %'."""
    if not math.isfinite(share):
        return "unlimited"
    return percent(float(Context(prec=SENTENCE_DIGITS, rounding=ROUND_CEILING).create_decimal(repr(float(share)))))


def sure(confidence: float) -> str:
    """The confidence of a statement, in words."""
    return f"{100 * confidence:.4g} % sure"
