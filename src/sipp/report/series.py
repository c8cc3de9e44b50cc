"""Records of a run in, the numbers behind each plot out, for page and figures: mean, least, largest over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from sipp.experiments.runs.reading import Run
from sipp.records.schemas import LayerRecord, NetworkRecord
from sipp.report.numbers import Unit

PARTS = ("score", "prune", "certify", "train", "other")  # of the time of a stage; "other" is what no part accounts for
COMPILE = "compile"  # a part that no plot counts
DENSE = "dense"
Value = Callable[[NetworkRecord, NetworkRecord | None], float | None]  # of a network and the dense one of its seed


@dataclass(frozen=True)
class Point:
    """One level of one method: the mean, least and largest value over n seeds."""

    keep: float
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Curve:
    """One method's points, from most kept to least."""

    method: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Metric:
    """What is measured of a network; `value` is None where a record does not know it."""

    label: str
    unit: Unit
    value: Value


def _change(value: Callable[[NetworkRecord], float]) -> Value:
    # Far below one test point: equal shares differ by nothing, not by rounding.
    return lambda record, dense: None if dense is None else round(value(record) - value(dense), 12)


METRICS: dict[str, Metric] = {
    "delta_top1": Metric("change of top-1 accuracy", "points", _change(lambda record: record.after.top1)),
    "delta_top5": Metric("change of top-5 accuracy", "points", _change(lambda record: record.after.top5)),
    "top1": Metric("top-1 accuracy", "share", lambda record, dense: record.after.top1),
    "top5": Metric("top-5 accuracy", "share", lambda record, dense: record.after.top5),
    "before_top1": Metric(
        "top-1 accuracy before training",
        "share",
        lambda record, dense: None if record.before is None else record.before.top1,
    ),
    "dead_rows": Metric("dead rows", "count", lambda record, dense: float(record.dead_rows)),
}


def default_metric(run: Run) -> str:
    """The metric of the paper's figure for this pipeline: the loss against the trained parent, or the accuracy."""
    return "top1" if run.pipeline is None else run.pipeline.metric


def metrics_of(run: Run) -> list[str]:
    """The metrics this run has, the paper's own first."""
    first = default_metric(run)
    return [first, *(key for key in METRICS if key != first and key != "dead_rows")]


def methods_of(run: Run) -> tuple[str, ...]:
    """The methods with at least one finished level, in the order of the recipe."""
    done = {record.method for record in run.records if record.method is not None}
    listed = [name for name in run.config["prune"]["methods"] if name in done]
    return (*listed, *sorted(done - set(listed)))


def seeds_of(run: Run) -> tuple[int, ...]:
    """The seeds with at least one finished network."""
    return tuple(sorted({record.seed for record in run.records}))


def levels_of(run: Run) -> dict[int, float]:
    """{level: its keep, the mean over all networks of that level}."""
    keeps: dict[int, list[float]] = {}
    for record in run.records:
        if record.method is not None:
            keeps.setdefault(record.level, []).append(record.keep)
    return {level: _mean(keeps[level]) for level in sorted(keeps)}


def dense_of(run: Run) -> dict[int, NetworkRecord]:
    """{seed: its dense network}."""
    return {record.seed: record for record in run.records if record.method is None}


def records_at(run: Run, method: str, level: int) -> list[NetworkRecord]:
    """The networks of one method and level, by seed."""
    records = [record for record in run.records if record.method == method and record.level == level]
    return sorted(records, key=lambda record: record.seed)


def metric_curves(run: Run, metric: str) -> tuple[Curve, ...]:
    """The metric against keep, one curve per method; a difference is taken seed by seed, then averaged."""
    return _curves(by_level(run, metric))


def by_level(run: Run, metric: str) -> dict[tuple[str, int], Point]:
    """{(method, level): the metric over seeds}, where every seed knows it."""
    dense, value = dense_of(run), METRICS[metric].value
    return _points(run, lambda record: value(record, dense.get(record.seed)))


def dense_mean(run: Run, metric: str) -> float | None:
    """The metric of the dense networks, None where it has no meaning for them, or there is none."""
    point = _point(1.0, [METRICS[metric].value(record, record) for record in dense_of(run).values()])
    return None if point is None or metric == "before_top1" else point.mean


def certified_curves(run: Run) -> tuple[Curve, ...]:
    """Epsilon of the holdout certificates against keep; a level at which one seed has no finite one has no point."""
    return _curves(_points(run, lambda record: record.certificate.output_limit if record.certificate else None))


def theory_curves(run: Run) -> tuple[Curve, ...]:
    """Epsilon of the theory's network statement against keep, met or not."""
    return _curves(_points(run, lambda record: record.bound.epsilon if record.bound else None))


def _points(run: Run, value: Callable[[NetworkRecord], float | None]) -> dict[tuple[str, int], Point]:
    points = {}
    for method in methods_of(run):
        for level in levels_of(run):
            records = records_at(run, method, level)
            point = _point(_mean([record.keep for record in records]), [value(record) for record in records])
            if point is not None:
                points[method, level] = point
    return points


def _curves(points: Mapping[tuple[str, int], Point]) -> tuple[Curve, ...]:
    by_method: dict[str, list[Point]] = {}
    for (method, _), point in points.items():
        by_method.setdefault(method, []).append(point)
    return tuple(Curve(method, tuple(of_method)) for method, of_method in by_method.items())


def _point(keep: float, values: list[float | None]) -> Point | None:
    """The point of these values; None if one is unknown: a mean must not leave out a bad value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Point(keep, _mean(known), min(known), max(known), len(known))


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fsum(known) / len(known) if known else 0.0


# --- layers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRow:
    """One layer at one level: keep and dead rows are means over seeds, eps is the largest (a bound on all of them)."""

    keep: float
    share: float  # of the whole budget
    eps: float | None
    dead_rows: float


def layers_of(run: Run) -> dict[str, int]:
    """{layer: its number of weights}, in the order of the network."""
    first = next((record for record in run.records if record.layers), None)
    return {} if first is None else {layer.name: layer.n_weights for layer in first.layers}


def layer_rows(run: Run, method: str, level: int) -> list[LayerRow]:
    """One row per layer, empty if this level is not done."""
    return rows_of_layers([record.layers for record in records_at(run, method, level) if record.layers])


def rows_of_layers(networks: Sequence[Sequence[LayerRecord]]) -> list[LayerRow]:
    """One row per layer of these networks, which have the same layers."""
    totals = [sum(layer.kept for layer in layers) for layers in networks]
    rows = []
    for same in zip(*networks):
        eps = [layer.eps for layer in same]
        known = [value for value in eps if value is not None]
        rows.append(
            LayerRow(
                keep=_mean(layer.kept / layer.n_weights if layer.n_weights else 0.0 for layer in same),
                share=_mean(layer.kept / total if total else 0.0 for layer, total in zip(same, totals)),
                eps=max(known) if len(known) == len(eps) else None,
                dead_rows=_mean(float(layer.dead_rows) for layer in same),
            )
        )
    return rows


# --- time -----------------------------------------------------------------------------------------------------------


def times(run: Run) -> dict[str, Mapping[str, float]]:
    """{method, or "dense": {part: seconds}}, over levels and seeds; they add up to the whole without compilation."""
    by_method: dict[str, Mapping[str, float]] = {}
    for method in (None, *methods_of(run)):
        records = [record for record in run.records if record.method == method]
        if not records:
            continue
        sums = {part: fsum(record.part_seconds.get(part, 0.0) for record in records) for part in PARTS[:-1]}
        rest = fsum(_working(record) for record in records) - fsum(sums.values())
        by_method[method or DENSE] = {**sums, "other": max(0.0, rest)}
    return by_method


def seconds_of(run: Run) -> float:
    """The seconds that all finished networks took together, without compilation."""
    return fsum(_working(record) for record in run.records)


def compiling_of(run: Run) -> float | None:
    """The seconds of compilation, at the first use after an install; None where they were not recorded."""
    known = [record.part_seconds[COMPILE] for record in run.records if COMPILE in record.part_seconds]
    return fsum(known) if known else None


def _working(record: NetworkRecord) -> float:
    return record.seconds - record.part_seconds.get(COMPILE, 0.0)
