"""The article that compares several pruned networks: curves over keep, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sipp.report.contents import Article, Finding, Section, Table, TableCell
from sipp.report.numbers import WORST, number, tone_of
from sipp.report.plots import curve_view, lines
from sipp.report.results import PrunedModel, shared_holdout
from sipp.report.series import Curve, point_of
from sipp.results import USELESS, Certificate, Evaluation, limit_words, words

SAME_KEEP = 1e-3  # relative: the budgets of two methods may differ by a few weights
NOTE = (
    "Output moved: distance from the dense network's output, divided by its norm, on a few calibration inputs, some "
    "of which may have been used for pruning. Certified: on holdout inputs; each certificate holds on its own, but "
    "the best of several does not."
)

Value = Callable[[PrunedModel], float | None]


def by_dense_network(models: Sequence[PrunedModel]) -> list[list[PrunedModel]]:
    """Groups the networks by the dense network they were pruned from: only those can be compared point by point.

    If that is not recorded, networks with the same layers are grouped.
    """
    groups: dict[str, list[PrunedModel]] = {}
    for model in models:
        layers = [(layer.name, layer.n_rows, layer.fan_in) for layer in model.pruned.layers]
        groups.setdefault(model.identity.dense_hash or repr(layers), []).append(model)
    return list(groups.values())


# --- values to compare ---------------------------------------------------------------------------------------------


def common_points(models: Sequence[PrunedModel]) -> Evaluation | None:
    """An evaluation on the points that most of these networks share; accuracies on other points are not comparable."""
    evaluations = [evaluation for model in models for evaluation in _with_accuracy(model)]
    counts = Counter(evaluation.data_hash for evaluation in evaluations)
    return max(evaluations, key=lambda evaluation: (counts[evaluation.data_hash], evaluation.n_inputs), default=None)


def _with_accuracy(model: PrunedModel) -> list[Evaluation]:
    known = (measured for measured in model.evaluations.values() if isinstance(measured, Evaluation))
    return [measured for measured in known if measured.accuracies is not None]


def accuracies_on(model: PrunedModel, points: Evaluation | None) -> tuple[float, float] | None:
    """The accuracies of the dense and the pruned network on these points; None if not measured."""
    same = (one for one in _with_accuracy(model) if points is not None and one.data_hash == points.data_hash)
    return next((evaluation.accuracies for evaluation in same), None)


def network_curves(models: Sequence[PrunedModel], value: Value) -> tuple[Curve, ...]:
    """The value against keep, one curve per method (repaired or not); averages networks of equal method and keep."""
    arms: dict[str, dict[float, list[float]]] = {}
    for model in sorted(models, key=lambda network: -network.pruned.keep):
        known = value(model)
        if known is None:
            continue
        points = arms.setdefault(model.arm, {})
        keep = next((k for k in points if abs(k - model.pruned.keep) <= SAME_KEEP * k), model.pruned.keep)
        points.setdefault(keep, []).append(known)
    return tuple(
        Curve(arm, tuple(point_of(keep, values) for keep, values in points.items())) for arm, points in arms.items()
    )


@dataclass(frozen=True)
class ComparedNetworks:
    """One comparison of networks: its curves over keep, and the view that draws them."""

    key: str
    title: str
    curves: tuple[Curve, ...]
    view: dict[str, Any]


def comparisons_of(group: Sequence[PrunedModel]) -> list[ComparedNetworks]:
    """The comparisons these networks have values for: accuracy, output change, certified error."""
    points = common_points(group)
    measured = {id(model): accuracies_on(model, points) for model in group}
    dense = next((accuracies[0] for accuracies in measured.values() if accuracies is not None), None)
    kinds: list[tuple[str, str, str, Value]] = [
        ("accuracy", "Accuracy", "accuracy, measured", lambda model: (measured[id(model)] or (None, None))[1]),
        ("moved", "Output moved", "output moved on calibration inputs", lambda model: model.output_change),
        ("certified", "Certified", "certified error of the output", lambda model: model.certified_error),
    ]
    comparisons = []
    for key, title, label, value in kinds:
        if curves := network_curves(group, value):
            is_error = key != "accuracy"
            view = curve_view(curves, label, "share", are_errors=is_error, dense=None if is_error else dense)
            comparisons.append(ComparedNetworks(key, title, curves, view))
    return comparisons


# --- the article ----------------------------------------------------------------------------------------------------


def networks_article(models: Sequence[PrunedModel]) -> Article:
    """The article that shows the networks side by side."""
    by_dense = by_dense_network(models)
    groups = [group for group in by_dense if len(group) > 1]
    rows = []
    for index, group in enumerate(groups):
        of = f", {_dense_name(group[0])}" if len(groups) > 1 else ""
        plots = [
            lines(f"networks{index}-{comparison.key}", f"{comparison.title}{of}", comparison.view, of="network")
            for comparison in comparisons_of(group)
        ]
        rows += [plots] if plots else []
    has_accuracy = common_points(models) is not None
    note = f"Accuracy: measured by sipp eval, and not a claim about other inputs. {NOTE}" if has_accuracy else NOTE
    return Article(
        ident="networks",
        topic="pruned models",
        title="Networks side by side",
        notes=[] if len(by_dense) == 1 else ["Not all networks were pruned from the same dense network."],
        sections=[Section("Comparison", _finding(groups), rows, networks_table(models), note=note)],
    )


def _dense_name(model: PrunedModel) -> str:
    """The name of the dense network, as given on the command line."""
    known = model.identity.dense_hash
    return model.identity.model if "asked" in model.rest else "a network" if known is None else known[:8]


def _finding(groups: Sequence[Sequence[PrunedModel]]) -> Finding:
    """The best method at the smallest keep that several methods reached, by accuracy or by output change."""
    words = {
        "accuracy": (max, min, "is most accurate", "Accuracy {}; {} has {}."),
        "moved": (min, max, "moves the output least", "By {} of its norm; {} by {}."),
    }
    comparisons = [comparison for group in groups for comparison in comparisons_of(group) if comparison.key in words]
    for comparison in comparisons:
        if (shared := _smallest_common_keep(comparison.curves)) is not None:
            keep, values = shared
            find_best, find_worst, does, sentence = words[comparison.key]
            best, worst = find_best(values, key=values.__getitem__), find_worst(values, key=values.__getitem__)
            shown = (number(values[best], "share"), worst, number(values[worst], "share"))
            return Finding(f"At keep {number(keep, 'share')}, {best} {does}", sentence.format(*shown))
    return Finding("Networks side by side", "No two methods were pruned to the same keep from the same dense network.")


def _smallest_common_keep(curves: Sequence[Curve]) -> tuple[float, dict[str, float]] | None:
    """The smallest keep that several methods reached, with the value of each; None if there is none."""
    points = [(curve.method, point) for curve in curves for point in curve.points]
    for keep in sorted({point.keep for _, point in points}):
        near = {method: point.mean for method, point in points if abs(point.keep - keep) <= 2 * SAME_KEEP * keep}
        if len(near) > 1:
            return keep, near
    return None


# --- the table ------------------------------------------------------------------------------------------------------


def networks_table(models: Sequence[PrunedModel]) -> Table:
    """A table of the networks: what each keeps, and what that costs."""
    points = common_points(models)
    has_drops = any(model.certified_drop is not None for model in models)
    rows = []
    for model in sorted(models, key=lambda network: -network.pruned.keep):
        cells = {"method": TableCell(model.arm), "keep": TableCell(number(model.pruned.keep, "share"))}
        if points is not None:
            cells |= _accuracy_cells(accuracies_on(model, points))
        cells["dead rows"] = TableCell(f"{model.pruned.dead_rows:,}")
        moved = model.output_change
        cells["output moved"] = TableCell("unknown" if moved is None else number(moved, "share"))
        cells["certified within"] = certified_cell(model)
        if has_drops:
            drop = None if model.certified_drop is None else model.certified_drop.drop_upper
            cells["certified drop"] = TableCell(
                "none" if drop is None else f"{words.percent_up(drop).removesuffix(' %')} points"
            )
        rows.append((model.name, cells))
    caption = f"From most to least kept; of several certificates, the weakest. {shared_holdout(models)}"
    caption += f" Accuracy: on {points.inputs}." if points is not None else ""
    caption += " Certified drop: the accuracy falls by at most this much; below 0, it rises." if has_drops else ""
    return Table(caption, ("network", *rows[0][1]), tuple((name, tuple(cells.values())) for name, cells in rows))


def _accuracy_cells(accuracies: tuple[float, float] | None) -> dict[str, TableCell]:
    if accuracies is None:
        return {
            "accuracy": TableCell("not measured", "", "on these inputs"),
            "accuracy, dense": TableCell("not measured"),
        }
    dense, pruned = accuracies
    title = f"{number(pruned - dense, 'points')} against the dense network"
    cell = TableCell(number(pruned, "share"), tone_of(pruned - dense), title)
    return {"accuracy": cell, "accuracy, dense": TableCell(number(dense, "share"))}


def certified_cell(model: PrunedModel) -> TableCell:
    """The certified output error, marked if it is useless; without one, what is certified about tokens."""
    limit = model.certified_error
    if limit is None:
        claims = [claim for claim in model.all_certificates if isinstance(claim, Certificate)]
        limits = [limit_words(claim) for claim in claims if claim.limit is not None]
        return TableCell(", ".join(limits) or "none")
    if limit >= USELESS:
        return TableCell(f"{words.percent_up(limit)}: useless", WORST, "an error about as large as the output itself")
    return TableCell(words.percent_up(limit))
