"""The plots of a run, and the data behind them: mean, smallest and largest value over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sipp.report import numbers, plots
from sipp.results import Certificate, PrunedLayer
from sipp_lab.pipelines import PIPELINES, Pipeline
from sipp_lab.runs.folder import Run
from sipp_lab.runs.records import NetworkRecord

Plot = dict[str, Any]  # plain values for the page's script
Value = Callable[[NetworkRecord, NetworkRecord | None], float | None]  # from a network and the dense one of its seed


@dataclass(frozen=True)
class Metric:
    """A quantity measured for each network; `value` returns None if a record lacks it."""

    label: str
    unit: numbers.Unit
    value: Value


def _change(value: Callable[[NetworkRecord], float]) -> Value:
    # Rounded far below one test point, so that equal shares have difference 0.
    return lambda record, dense: None if dense is None else round(value(record) - value(dense), 12)


METRICS: dict[str, Metric] = {
    "delta_top1": Metric("change of top-1 accuracy", "points", _change(lambda record: record.after.top1)),
    "delta_top5": Metric("change of top-5 accuracy", "points", _change(lambda record: record.after.top5 or 0.0)),
    "top1": Metric("top-1 accuracy", "share", lambda record, dense: record.after.top1),
    "top5": Metric("top-5 accuracy", "share", lambda record, dense: record.after.top5),
    "before_top1": Metric(
        "top-1 accuracy before training",
        "share",
        lambda record, dense: None if record.before is None else record.before.top1,
    ),
    "multiply_adds": Metric(
        "multiply-adds left",
        "share",
        lambda record, dense: (
            None
            if dense is None or not dense.multiply_adds or record.multiply_adds is None
            else record.multiply_adds / dense.multiply_adds
        ),
    ),
    "dead_rows": Metric("dead rows", "count", lambda record, dense: float(record.dead_rows)),
}

COUNTS = ("multiply_adds", "dead_rows")  # metrics that say what a network is, not how well it does


def pipeline_of(run: Run) -> Pipeline | None:
    """The pipeline that made it; None if this version has no pipeline of that name."""
    return PIPELINES.get(str(run.config["pipeline"]))


def metrics_of(run: Run) -> list[str]:
    """The metrics of this run, first that of the paper's figure for its pipeline: accuracy, or its change."""
    pipeline = pipeline_of(run)
    first = "top1" if pipeline is None else pipeline.metric
    return [first, *(key for key in METRICS if key != first and key not in COUNTS)]


def methods_of(run: Run) -> tuple[str, ...]:
    """The methods with at least one finished level, in the order of the recipe."""
    done = {record.method for record in run.records if record.method is not None}
    listed = [name for name in run.config["prune"]["methods"] if name in done]
    return (*listed, *sorted(done - set(listed)))


def seeds_of(run: Run) -> tuple[int, ...]:
    """The seeds with at least one finished network."""
    return tuple(sorted({record.seed for record in run.records}))


def levels_of(run: Run) -> dict[int, float]:
    """{level: mean keep of its networks}."""
    keeps: dict[int, list[float]] = {}
    for record in run.records:
        if record.method is not None:
            keeps.setdefault(record.level, []).append(record.keep)
    return {level: fmean(keeps[level]) for level in sorted(keeps)}


def dense_of(run: Run) -> dict[int, NetworkRecord]:
    """{seed: its dense network}."""
    return {record.seed: record for record in run.records if record.method is None}


def records_at(run: Run, method: str, level: int) -> list[NetworkRecord]:
    """The networks of one method and level, by seed."""
    records = [record for record in run.records if record.method == method and record.level == level]
    return sorted(records, key=lambda record: record.seed)


def metric_curves(run: Run, metric: str) -> tuple[plots.Curve, ...]:
    """The metric against keep, one curve per method; differences are taken per seed, then averaged."""
    return _curves(by_level(run, metric))


def by_level(run: Run, metric: str) -> dict[tuple[str, int], plots.Point]:
    """{(method, level): the metric over seeds}, if every seed has it."""
    dense, value = dense_of(run), METRICS[metric].value
    return _points(run, lambda record: value(record, dense.get(record.seed)))


def dense_mean(run: Run, metric: str) -> float | None:
    """The mean metric of the dense networks; None if there are none or it does not apply."""
    point = _point([1.0], [METRICS[metric].value(record, record) for record in dense_of(run).values()])
    return None if point is None or metric == "before_top1" else point.mean


def certified_curves(run: Run) -> tuple[plots.Curve, ...]:
    """Certified epsilon against keep; no point for a level where some seed has no finite one."""
    return _curves(_points(run, _certified))


def _certified(record: NetworkRecord) -> float | None:
    claim = record.certificate
    return claim.limit if isinstance(claim, Certificate) and claim.measure == "output" else None


def _points(run: Run, value: Callable[[NetworkRecord], float | None]) -> dict[tuple[str, int], plots.Point]:
    points = {}
    for method in methods_of(run):
        for level in levels_of(run):
            records = records_at(run, method, level)
            point = _point([record.keep for record in records], [value(record) for record in records])
            if point is not None:
                points[method, level] = point
    return points


def _curves(points: Mapping[tuple[str, int], plots.Point]) -> tuple[plots.Curve, ...]:
    by_method: dict[str, list[plots.Point]] = {}
    for (method, _), point in points.items():
        by_method.setdefault(method, []).append(point)
    return tuple(plots.Curve(method, tuple(of_method)) for method, of_method in by_method.items())


def _point(keeps: list[float], values: list[float | None]) -> plots.Point | None:
    """The point of these values; None if one is missing, since a mean must not leave out bad values."""
    known = [value for value in values if value is not None]
    return plots.Point.of(fmean(keeps), known) if known and len(known) == len(values) else None


# --- layers ---------------------------------------------------------------------------------------------------------


def layers_of(run: Run) -> dict[str, int]:
    """{layer: its number of weights}, in the order of the network."""
    first = next((record.pruned for record in run.records if record.pruned is not None), None)
    return {} if first is None else {layer.name: layer.n_weights for layer in first.layers}


def layers_at(run: Run, method: str, level: int) -> list[tuple[PrunedLayer, ...]]:
    """The layers of each network of one method and level; empty if it is not done."""
    networks = [record.pruned for record in records_at(run, method, level)]
    return [pruned.layers for pruned in networks if pruned is not None]


# --- plots ----------------------------------------------------------------------------------------------------------


def accuracy_plot(run: Run, ident: str, title: str = "Accuracy against keep") -> Plot:
    """A plot of all metrics, starting with the change in accuracy; empty if no pruned network is finished."""
    views = {}
    for key in metrics_of(run):
        metric = METRICS[key]
        view = plots.curve_view(metric_curves(run, key), metric.label, metric.unit, dense=dense_mean(run, key))
        if view["series"]:
            views[key] = view
    if not views:
        return {}
    start = list(views).index("delta_top1") if "delta_top1" in views else 0
    choice = {"label": "Show", "options": [METRICS[key].label for key in views], "start": start}
    return plots.lines(ident, title, list(views.values()), choices=[choice])


def certified_plot(run: Run, ident: str) -> Plot:
    """The certified epsilons against keep; empty if there are none."""
    view = plots.curve_view(certified_curves(run), "certified epsilon (holdout)", "share", are_errors=True)
    return plots.lines(ident, view["y"]["label"], view) if view["series"] else {}


def layers_plot(run: Run, ident: str) -> Plot:
    """What each method leaves of each layer, at each level; empty if no pruned network is finished."""
    sizes, keeps = layers_of(run), levels_of(run)
    if not sizes:
        return {}
    levels = [
        plots.layer_views({method: layers_at(run, method, level) for method in methods_of(run)}) for level in keeps
    ]
    views = {label: [level[label] for level in levels] for label in plots.LAYER_UNITS}
    dense = {"name": "dense network", "values": [size / sum(sizes.values()) for size in sizes.values()]}
    for view in views[plots.SHARE]:
        view["series"].append(dense)
    options = [f"keep {numbers.number(keep, 'share')} (level {level})" for level, keep in keeps.items()]
    choices = [
        {"label": "Show", "options": list(views)},
        {"label": "Level", "options": options, "start": len(options) - 1},
    ]
    return plots.bars(ident, "Layer by layer", "layer", list(sizes), list(views.values()), choices=choices)
