"""Several pruned networks in, one part of the page out: their curves over keep, and a table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum

from sipp.report.evaluations import accuracies_on, common_points
from sipp.report.parts import Part, Section
from sipp.report.plots import KEEP_AXIS, Plot, curve_series
from sipp.report.read import PrunedModel
from sipp.report.series import Curve, Point
from sipp.report.tables import networks_table
from sipp.report.words import USELESS, Finding, number

SAME_KEEP = 1e-3  # relative: the budgets of two methods may differ by a few weights
ACCURACY = "accuracy, measured"
MOVED = "output moved on calibration points"
CERTIFIED = "certified error of the output"

Value = Callable[[PrunedModel], float | None]


def by_parent(models: Sequence[PrunedModel]) -> list[list[PrunedModel]]:
    """The networks in groups that were pruned from one dense network: only those can be compared point by point.

    Of a program that says nothing of its dense network, those of the same layers, which were given together.
    """
    groups: dict[str, list[PrunedModel]] = {}
    for model in models:
        layers = [(layer.name, layer.n_rows, layer.fan_in) for layer in model.record.layers]
        groups.setdefault(model.record.dense_hash or repr(layers), []).append(model)
    return list(groups.values())


def moved(model: PrunedModel) -> float | None:
    """How far the output moved on a few calibration points, None where that is not known."""
    return None if model.record.moved is None else model.record.moved.error


def certified(model: PrunedModel) -> float | None:
    """The certified error; of several certificates the largest, because the best of several is no claim."""
    found = [one.limit for one in (model.record.certificate, *model.certificates.values()) if one is not None]
    known = [limit for limit in found if limit is not None]
    return max(known, default=None)


def accuracy_of(models: Sequence[PrunedModel]) -> Value:
    """How the accuracy of each of these networks is found: on the points that most of them were measured on."""
    points = common_points(models)

    def value(model: PrunedModel) -> float | None:
        found = accuracies_on(model, points)
        return None if found is None else found[1]

    return value


def dense_accuracy(models: Sequence[PrunedModel]) -> float | None:
    """The accuracy of the dense network on the same points, None where it was not measured."""
    points = common_points(models)
    found = [known for model in models if (known := accuracies_on(model, points)) is not None]
    return found[0][0] if found else None


def network_curves(models: Sequence[PrunedModel], value: Value) -> tuple[Curve, ...]:
    """The value against keep, one curve for each method, repaired or not; networks of one method and keep are one."""
    arms: dict[str, dict[float, list[float]]] = {}
    for model in sorted(models, key=lambda one: -one.record.keep):
        known = value(model)
        if known is None:
            continue
        points = arms.setdefault(model.arm, {})
        keep = next((one for one in points if abs(one - model.record.keep) <= SAME_KEEP * one), model.record.keep)
        points.setdefault(keep, []).append(known)
    return tuple(
        Curve(arm, tuple(Point(k, fsum(v) / len(v), min(v), max(v), len(v)) for k, v in points.items()))
        for arm, points in arms.items()
    )


def networks_part(models: Sequence[PrunedModel]) -> tuple[Part, list[Plot]]:
    """The networks side by side, and the plots of that."""
    plots, rows = [], []
    groups = [group for group in by_parent(models) if len(group) > 1]
    for index, group in enumerate(groups):
        of = f", {_model_name(group[0])}" if len(groups) > 1 else ""
        drawn = [
            _accuracy_plot(f"networks{index}-accuracy", f"Accuracy{of}", group),
            _plot(f"networks{index}-moved", f"Output moved{of}", MOVED, network_curves(group, moved)),
            _plot(f"networks{index}-certified", f"Certified{of}", CERTIFIED, network_curves(group, certified)),
        ]
        plots += [plot for plot in drawn if plot]
        rows.append([plot["id"] for plot in drawn if plot])
    note = (
        "Output moved: how far the output is from the dense network's, over its length, on a few calibration points, "
        "some of which may have chosen weights. Certified: on held-out points; each certificate holds by itself, the "
        "best of several does not."
    )
    if common_points(models) is not None:
        note = f"Accuracy: measured by sipp eval, no claim about other points. {note}"
    part = Part(
        ident="networks",
        kicker="pruned models",
        title="Networks side by side",
        state="",
        caveats=[],
        remarks=[] if len(by_parent(models)) == 1 else ["Not all networks were pruned from the same dense network."],
        tiles=[],
        sections=[
            Section("Comparison", _finding(groups), [row for row in rows if row], networks_table(models), note=note)
        ],
        tables=[],
    )
    return part, plots


def _model_name(model: PrunedModel) -> str:
    """The network that was pruned, as the command line was told of it."""
    known = model.record.dense_hash
    return str((model.record.model_extra or {}).get("model") or ("a network" if known is None else known[:8]))


def _finding(groups: Sequence[Sequence[PrunedModel]]) -> Finding:
    """Which method is best at the least keep that several methods reached: by accuracy, or by how the output moved."""
    for group in groups:
        for value, is_better, words in (
            (accuracy_of(group), max, ("is most accurate", "Accuracy {}; {} has {}.")),
            (moved, min, ("moves the output least", "By {} of its length; {} by {}.")),
        ):
            near = _nearest(network_curves(group, value))
            if near is not None:
                keep, values = near
                best = is_better(values, key=lambda one: values[one])
                worst = (min if is_better is max else max)(values, key=lambda one: values[one])
                shown = (number(values[best], "share"), worst, number(values[worst], "share"))
                return Finding(f"At keep {number(keep, 'share')}, {best} {words[0]}", words[1].format(*shown))
    return Finding("Networks side by side", "No two methods were pruned to the same keep from one dense network.")


def _nearest(curves: Sequence[Curve]) -> tuple[float, dict[str, float]] | None:
    """The least keep that several methods reached, and what each of them has there; None: there is none."""
    for keep in sorted({point.keep for curve in curves for point in curve.points}):
        near = {
            curve.method: point.mean
            for curve in curves
            for point in curve.points
            if abs(point.keep - keep) <= 2 * SAME_KEEP * keep
        }
        if len(near) > 1:
            return keep, near
    return None


def _accuracy_plot(ident: str, title: str, group: Sequence[PrunedModel]) -> Plot:
    plot = _plot(ident, title, ACCURACY, network_curves(group, accuracy_of(group)), log=False)
    dense = dense_accuracy(group)
    if plot and dense is not None:
        plot["views"]["reference"] = {"label": "dense", "value": dense}
    return plot


def _plot(ident: str, title: str, label: str, curves: tuple[Curve, ...], *, log: bool = True) -> Plot:
    """Curves over keep; `log`: errors, of which those near the output's length say nothing."""
    if not curves:
        return {}
    view: Plot = {"y": {"label": label, "unit": "share", "log": log}, "series": curve_series(curves)}
    if log:
        view["useless"] = USELESS
    return {"id": ident, "kind": "lines", "title": title, "x": KEEP_AXIS, "of": "network", "choices": [], "views": view}
