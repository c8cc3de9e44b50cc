"""What `sipp eval --out` left beside pruned networks -> the section "Accuracy" of each, and what compares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sipp.records.schemas import EvalRecord
from sipp.report.plots import Plot
from sipp.report.read import PrunedModel
from sipp.report.words import Finding, number

EVALUATIONS = "evaluations"  # its plot
NO_CLAIM = "no claim about other points; sipp certify makes one"


def evaluation_of(model: PrunedModel) -> EvalRecord | None:
    """Of several evaluations the one of the most points, and one with an accuracy before those without."""
    known = list(model.evaluations.values())
    return max(known, key=lambda one: (one.accuracies is not None, one.n_points), default=None)


def common_points(models: Sequence[PrunedModel]) -> EvalRecord | None:
    """An evaluation on the points that most of these networks share: accuracies on other points do not compare."""
    known = [one for model in models for one in _by_points(model).values()]
    counts: dict[str, int] = {}
    for one in known:
        counts[one.data.hash] = counts.get(one.data.hash, 0) + 1
    return max(known, key=lambda one: (counts[one.data.hash], one.n_points), default=None)


def accuracies_on(model: PrunedModel, points: EvalRecord | None) -> tuple[float, float] | None:
    """The accuracy of the dense and of the pruned network on these points, None where it was not measured there."""
    found = None if points is None else _by_points(model).get(points.data.hash)
    return None if found is None else found.accuracies


def _by_points(model: PrunedModel) -> dict[str, EvalRecord]:
    return {one.data.hash: one for one in model.evaluations.values() if one.accuracies is not None}


def evaluation_finding(one: EvalRecord) -> Finding:
    """How good the network is beside the dense one, on which points."""
    heading = f"The output moved by {number(one.error_mean, 'share')} of its length on average"
    if one.error_mean is None:
        heading = f"An output is not finite on {one.n_not_finite:,} points"
    if one.accuracies is not None:
        dense, pruned = one.accuracies
        change = number(pruned - dense, "points")
        heading = f"Accuracy is {number(pruned, 'share')} after pruning, {number(dense, 'share')} before ({change})"
    return Finding(heading, f"Measured on {one.data.what}: {NO_CLAIM}.")


def evaluation_plots(model: PrunedModel, ident: str) -> dict[str, Plot]:
    """Everything that was measured, a card for each set of points; none where there is no record."""
    if not model.evaluations:
        return {}
    first = evaluation_of(model)
    ordered = sorted(model.evaluations.items(), key=lambda item: item[1] is not first)
    cards = [_card(name, one) for name, one in ordered]
    title = "Accuracy, loss and epsilon"
    return {
        EVALUATIONS: {"id": f"{ident}-{EVALUATIONS}", "kind": "facts", "title": title, "choices": [], "views": cards}
    }


def _card(name: str, one: EvalRecord) -> dict[str, Any]:
    """One evaluation in numbers; what is not known has no row."""
    rows = []
    if one.accuracies is not None:
        dense, pruned = one.accuracies
        rows.append(["accuracy", f"{number(pruned, 'share')} pruned, {number(dense, 'share')} dense"])
    if one.dense_loss is not None and one.pruned_loss is not None:
        rows.append(["loss", f"{number(one.pruned_loss)} pruned, {number(one.dense_loss)} dense (cross-entropy)"])
    if one.same_class is not None:
        rows.append(["same class", f"{number(one.same_class, 'share')} of points"])
    if one.error_mean is None:
        rows.append(["epsilon", f"not finite on {one.n_not_finite:,} points"])
    else:
        mean, median, largest = (number(x, "share") for x in (one.error_mean, one.error_median, one.error_max))
        rows.append(["epsilon", f"{mean} mean, {median} median, {largest} largest"])
    return {"title": f"Measured ({name})", "text": f"On {one.data.what}.", "rows": rows}
