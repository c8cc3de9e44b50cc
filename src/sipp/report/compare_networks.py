"""The article that compares several pruned networks: curves over keep, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sipp.report import plots
from sipp.report.contents import Article, Finding, PageCell, PageTable, Section
from sipp.report.networks import PrunedModel, shared_holdout
from sipp.report.numbers import WORST, number, tone_of
from sipp.report.one_network import pruned_article
from sipp.report.plots import Curve, Point
from sipp.results import Certificate, Evaluation

SAME_KEEP = 1e-3  # relative: the budgets of two methods may differ by a few weights
NOTE = (
    "Output error: distance from the dense network's output, divided by its norm, on a few calibration inputs, some "
    "of which may have been used for pruning. Certified: on holdout inputs; each certificate holds on its own, but "
    "the best of several does not."
)

Models = Sequence[PrunedModel]
Value = Callable[[PrunedModel], float | None]


def network_articles(models: Models) -> list[Article]:
    """The articles about pruned networks: the comparison of several first."""
    compared = [networks_article(models)] if len(models) > 1 else []
    single = [pruned_article(model, f"network{index}") for index, model in enumerate(models)]
    return compared + [replace(article, is_closed=bool(compared)) for article in single]


def networks_article(models: Models) -> Article:
    """The article that shows the networks side by side, with curves if they were pruned from one dense network."""
    measured = common_evaluations(models)
    of_one = len({_parent(model) for model in models}) == 1
    found = comparisons_of(models, measured) if of_one else []
    rows = [
        [
            plots.lines(
                f"networks-{one.key}",
                one.title,
                plots.curve_view(one.curves, one.label, "share", are_errors=one.key != "accuracy", dense=one.dense),
                of="network",
            )
        ]
        for one in found
    ]
    note = f"Accuracy: measured by sipp eval, and not a claim about other inputs. {NOTE}" if measured else NOTE
    return Article(
        ident="networks",
        topic="pruned models",
        title="Networks side by side",
        notes=[] if of_one else ["Not all networks were pruned from the same dense network."],
        sections=[Section("Comparison", _finding(found), rows, networks_table(models, measured), note=note)],
    )


def _parent(model: PrunedModel) -> str:
    """The identity of the dense network: its hash, or its layers if that is not recorded."""
    layers = [(layer.name, layer.n_rows, layer.fan_in) for layer in model.pruned.layers]
    return model.record.dense_hash or repr(layers)


def common_evaluations(models: Models) -> dict[int, Evaluation]:
    """{id of a network: its evaluation} on the inputs on which most of these networks were measured.

    Accuracies on other inputs are not comparable.
    """
    known = [(id(model), one) for model in models for one in model.known(Evaluation) if one.accuracies is not None]
    counts = Counter(one.data_hash for _, one in known)
    common = max((one for _, one in known), key=lambda one: (counts[one.data_hash], one.n_inputs), default=None)
    return {ident: one for ident, one in known if common is not None and one.data_hash == common.data_hash}


# --- curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """One value of networks, as curves over keep: a method each, repaired or not."""

    key: str  # accuracy, moved, or certified
    title: str
    label: str
    curves: tuple[Curve, ...]
    dense: float | None = None


def comparisons_of(models: Models, measured: Mapping[int, Evaluation]) -> list[Curves]:
    """The comparisons these networks have values for: accuracy, output change, certified error."""
    accuracies = {ident: one.accuracies for ident, one in measured.items() if one.accuracies is not None}
    dense = next((before for before, _ in accuracies.values()), None)
    accuracy = _curves(models, lambda model: accuracies[id(model)][1] if id(model) in accuracies else None)
    moved, certified = _curves(models, lambda m: m.moved), _curves(models, lambda m: m.certified_error)
    found = [
        Curves("accuracy", "Accuracy", "accuracy, measured", accuracy, dense),
        Curves("moved", "Output error", "output error on calibration inputs", moved),
        Curves("certified", "Certified", "certified error of the output", certified),
    ]
    return [one for one in found if one.curves]


def _curves(models: Models, value: Value) -> tuple[Curve, ...]:
    """The value against keep; averages networks of equal method and keep."""
    arms: dict[str, dict[float, list[float]]] = {}
    for model in sorted(models, key=lambda network: -network.pruned.keep):
        if (known := value(model)) is not None:
            points = arms.setdefault(model.arm, {})
            keep = next((k for k in points if abs(k - model.pruned.keep) <= SAME_KEEP * k), model.pruned.keep)
            points.setdefault(keep, []).append(known)
    return tuple(Curve(arm, tuple(Point.of(*one) for one in points.items())) for arm, points in arms.items())


def _finding(comparisons: Sequence[Curves]) -> Finding:
    """The best method at the smallest keep that several methods reached, by accuracy or by output change."""
    phrases = {
        "accuracy": (max, min, "is most accurate", "Accuracy {}; {} has {}."),
        "moved": (min, max, "has the smallest output error", "{}; {} has {}."),
    }
    for one in comparisons:
        if one.key in phrases and (shared := _smallest_common_keep(one.curves)) is not None:
            keep, values = shared
            find_best, find_worst, does, sentence = phrases[one.key]
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


# --- the table --------------------------------------------------------------------------------------------------------


def networks_table(models: Models, measured: Mapping[int, Evaluation]) -> PageTable:
    """A table of the networks: the kept share and the error of each."""
    has_drops = any(model.certified_drop is not None for model in models)
    rows = []
    for model in sorted(models, key=lambda network: -network.pruned.keep):
        moved, claim = model.moved, model.certified_drop
        cells = {"method": PageCell(model.arm), "keep": PageCell(number(model.pruned.keep, "share"))}
        if measured:
            cells |= _accuracy_cells(measured.get(id(model)))
        cells["dead rows"] = PageCell(f"{model.pruned.dead_rows:,}")
        cells["output error"] = PageCell("unknown" if moved is None else number(moved, "share"))
        cells["certified within"] = _certified_cell(model)
        if has_drops:
            cells["certified drop"] = PageCell("none" if claim is None else claim.limit_words)
        rows.append((model.name, cells))
    caption = f"From most to least kept; of several certificates, the weakest. {shared_holdout(models)}"
    caption += f" Accuracy: on {next(iter(measured.values())).inputs}." if measured else ""
    caption += " Certified drop: the accuracy falls by at most this much; below 0, it rises." if has_drops else ""
    return PageTable(caption, ("network", *rows[0][1]), tuple((name, tuple(cells.values())) for name, cells in rows))


def _accuracy_cells(measured: Evaluation | None) -> dict[str, PageCell]:
    if measured is None or measured.accuracies is None:
        return {
            "accuracy": PageCell("not measured", "", "on these inputs"),
            "accuracy, dense": PageCell("not measured"),
        }
    dense, pruned = measured.accuracies
    title = f"{number(pruned - dense, 'points')} against the dense network"
    after = PageCell(number(pruned, "share"), tone_of(pruned - dense), title)
    return {"accuracy": after, "accuracy, dense": PageCell(number(dense, "share"))}


def _certified_cell(model: PrunedModel) -> PageCell:
    """The certified output error, marked if it is useless; without one, what is certified about tokens."""
    claim = model.certified_output
    if claim is None:
        return PageCell(", ".join(one.limit_words for one in model.known(Certificate) if one.claim) or "none")
    if claim.is_useless:
        return PageCell(f"{claim.limit_words}: useless", WORST, "an error about as large as the output itself")
    return PageCell(claim.limit_words)
