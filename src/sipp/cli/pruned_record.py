"""A pruned network as the command line tells of it: a table for a person, a record for report.json and --json."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import torch
from rich.table import Table

import sipp
from sipp.bounds.network import Guarantee, Measured, NetworkBound
from sipp.certificates.record import AnyCertificate, to_json
from sipp.cli.output import plain_table
from sipp.display import BOUND_COLUMNS, SHOWN_AS, bounds_of, budget_line, number, statement_lines
from sipp.pruning.result import Pruned, PrunedLayer
from sipp.pruning.tolerance import Level
from sipp.storage.marks import RECORD_FORMAT, RECORD_KIND


def layer_table(pruned: Pruned, *, compact: bool = False) -> Table:
    """What each weight keeps, what goes, and its bounds; the last line is the whole network.

    The compact one, for narrow terminals, leaves out the shape, the strategies, and the parts of the bound.
    """
    names = [] if compact else sorted({name for layer in pruned.layers for name in layer.strategies})
    rows = [(layer.name, *_cells(layer, names)) for layer in pruned.layers]
    n_rows = sum(layer.n_rows for layer in pruned.layers)
    dead = sum(len(layer.dead_rows) for layer in pruned.layers)
    sums = [str(sum(layer.strategies.get(name, 0) for layer in pruned.layers)) for name in names]
    counts = (f"{pruned.kept:,}", f"{pruned.n_weights - pruned.kept:,}", f"{pruned.keep:.2%}")
    last = ("all prunable weights", f"{n_rows:,}", "", *counts, *sums, str(dead or ""), *([""] * len(BOUND_COLUMNS)))
    strategies = tuple(f"{SHOWN_AS.get(name, name)} rows" for name in names)
    columns = ("weight", "rows", "fan-in", "kept", "goes", "keep", *strategies, "dead rows", *BOUND_COLUMNS)
    left_out = {"rows", "fan-in", *BOUND_COLUMNS[:-1]} if compact else set()
    known = [bounds_of(layer) for layer in pruned.layers]
    left_out |= {name for i, name in enumerate(BOUND_COLUMNS) if all(values[i] is None for values in known)}
    shown = [i for i, column in enumerate(columns) if column not in left_out]
    table = plain_table(*(columns[i] for i in shown), folds=compact)
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    table.add_section()
    table.add_row(*(last[i] for i in shown))
    return table


def _cells(layer: PrunedLayer, names: list[str]) -> tuple[str, ...]:
    counts = (f"{layer.kept:,}", f"{layer.n_weights - layer.kept:,}", f"{layer.keep:.2%}")
    strategies = (str(layer.strategies.get(name, 0)) for name in names)
    bounds = (number(value) for value in bounds_of(layer))
    return f"{layer.n_rows:,}", f"{layer.fan_in:,}", *counts, *strategies, str(len(layer.dead_rows) or ""), *bounds


def statements(pruned: Pruned) -> list[str]:
    """The statements below the table, one line each."""
    lines = [
        f"{pruned.method}: keeps {pruned.kept:,} of {pruned.n_weights:,} prunable weights ({pruned.keep:.2%})",
        *statement_lines(pruned),
    ]
    if missing := budget_line(pruned):
        lines.insert(1, missing)
    return lines


def pruned_record(pruned: Pruned) -> dict[str, Any]:
    """The pruned network in JSON's types; floats that are not finite are for `plain` to turn into null."""
    return {
        "kind": RECORD_KIND,
        "format": RECORD_FORMAT,
        "sipp": sipp.__version__,
        "torch": torch.__version__,
        "method": pruned.method,
        "keep": pruned.keep,
        "budget": pruned.budget,
        "kept": pruned.kept,
        "n_weights": pruned.n_weights,
        "seed": pruned.seed,
        "layers": [_layer(layer) for layer in pruned.layers],
        "bound": _bound(pruned.bound),
        "guarantee": None if pruned.guarantee is None else str(pruned.guarantee),
        "conditions": None if pruned.guarantee is None else _conditions(pruned.guarantee),
        "measured": None if pruned.measured is None else _measured(pruned.measured),
        "moved": None if pruned.moved is None else asdict(pruned.moved),
        "repaired": None if pruned.repair is None else {**asdict(pruned.repair), "words": pruned.repair.sentence},
        "dead_rows": sum(len(layer.dead_rows) for layer in pruned.layers),
    }


def _layer(layer: PrunedLayer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "layer_type": layer.layer_type,
        "n_rows": layer.n_rows,
        "fan_in": layer.fan_in,
        "n_weights": layer.n_weights,
        "kept": layer.kept,
        "keep": layer.keep,
        "dead_rows": len(layer.dead_rows),
        "strategies": layer.strategies,
        "eps": layer.eps,
        "sign_complexity": layer.sign_complexity,
        "bound": layer.bound,
        "kappa": layer.kappa,
        "eps_measured": layer.eps_measured,
        "bound_measured": layer.bound_measured,
    }


def _bound(bound: NetworkBound) -> dict[str, Any]:
    is_finite = bound.epsilon is not None and math.isfinite(bound.epsilon)
    return {
        "mode": bound.mode,
        "epsilon": bound.epsilon if is_finite else None,
        "delta": bound.delta,
        "met": bound.met and is_finite,  # an infinite epsilon reads null: it must not look like a promise kept
        "reason": bound.reason or ("" if is_finite else "epsilon is infinite"),
        "words": str(bound),
        "coverage": None if bound.coverage is None else asdict(bound.coverage),
    }


def _measured(measured: Measured) -> dict[str, Any]:
    return {**asdict(measured), "joint_confidence": measured.joint_confidence, "words": str(measured)}


def _conditions(guarantee: Guarantee) -> dict[str, Any]:
    return {
        "met": guarantee.met,
        "verdict": guarantee.verdict,
        "contradicted": guarantee.contradicted,
        "delta": guarantee.delta,
        "n": guarantee.n,
        "n_needed": guarantee.n_needed,
        "unit": guarantee.unit,
        "c_constant": guarantee.c_constant,
        "k_constant": guarantee.k_constant,
        "reason": guarantee.reason,
        "n_weights": guarantee.n_weights,
        "n_refuting": guarantee.n_refuting,
        "layers": asdict(guarantee.layers),
    }


def certificate_record(certificate: AnyCertificate | None) -> dict[str, Any] | None:
    """The certificate as `sipp certify` writes it."""
    if certificate is None:
        return None
    content: dict[str, Any] = json.loads(to_json(certificate))
    return content


def path_record(path: tuple[Level, ...]) -> list[dict[str, Any]]:
    """Every level that was tested, in order (T15)."""
    return [{"keep": l.keep, "budget": l.budget, "count": l.count, "limit": l.limit, "passed": l.passed} for l in path]
