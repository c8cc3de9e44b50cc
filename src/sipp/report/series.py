"""What plots draw: points with a spread over keep, and the layers of a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, isfinite

from sipp.results import PrunedLayer


@dataclass(frozen=True)
class Point:
    """One keep of one method: mean, smallest and largest of n values."""

    keep: float
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Curve:
    """The points of one method, from the largest keep to the smallest."""

    method: str
    points: tuple[Point, ...]


def point_of(keep: float, values: Sequence[float]) -> Point:
    """The point that summarises these values."""
    return Point(keep, mean_of(values), min(values), max(values), len(values))


def mean_of(values: Iterable[float]) -> float:
    """The mean; 0 of no values."""
    known = list(values)
    return fsum(known) / len(known) if known else 0.0


@dataclass(frozen=True)
class LayerRow:
    """One layer at one level: means of keep and dead rows over seeds, and the largest eps (a bound for all)."""

    keep: float
    share: float  # of the whole budget
    eps: float | None
    dead_rows: float


def rows_of_layers(networks: Sequence[Sequence[PrunedLayer]]) -> list[LayerRow]:
    """One row per layer, for networks with the same layers."""
    totals = [sum(layer.kept for layer in layers) for layers in networks]
    rows = []
    for same in zip(*networks):
        eps = [layer.eps for layer in same]
        known = [value for value in eps if value is not None and isfinite(value)]
        rows.append(
            LayerRow(
                keep=mean_of(layer.kept / layer.n_weights if layer.n_weights else 0.0 for layer in same),
                share=mean_of(layer.kept / total if total else 0.0 for layer, total in zip(same, totals)),
                eps=max(known) if len(known) == len(eps) else None,
                dead_rows=mean_of(layer.dead_rows for layer in same),
            )
        )
    return rows
