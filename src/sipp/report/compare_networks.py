"""The article that compares several pruned networks: curves over keep, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sipp.report import plots
from sipp.report.contents import Article, Cell, Finding, Plot, Section, Table
from sipp.report.networks import PrunedModel, shared_holdout
from sipp.report.numbers import WORST, number, tone_of
from sipp.report.one_network import pruned_article
from sipp.report.plots import Curve, Point
from sipp.results import Certificate, Evaluation, words

SAME_KEEP = 1e-3  # relative: the budgets of two methods may differ by a few weights
NOTE = (
    "Output moved: distance from the dense network's output, divided by its norm, on a few calibration inputs, some "
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
    """The article that shows the networks side by side; those of one dense network share their plots."""
    groups: dict[str, list[PrunedModel]] = {}
    for model in models:  # if the dense network is not recorded, those with the same layers
        layers = [(layer.name, layer.n_rows, layer.fan_in) for layer in model.pruned.layers]
        groups.setdefault(model.identity.dense_hash or repr(layers), []).append(model)
    compared = [(group, comparisons_of(group)) for group in groups.values() if len(group) > 1]
    rows = []
    for index, (group, found) in enumerate(compared):
        of = f", {_dense_name(group[0])}" if len(compared) > 1 else ""
        drawn = [_drawn(f"networks{index}-{one.key}", f"{one.title}{of}", one) for one in found]
        rows += [drawn] if drawn else []
    has_accuracy = common_points(models) is not None
    note = f"Accuracy: measured by sipp eval, and not a claim about other inputs. {NOTE}" if has_accuracy else NOTE
    finding = _finding([one for _, found in compared for one in found])
    return Article(
        ident="networks",
        topic="pruned models",
        title="Networks side by side",
        notes=[] if len(groups) == 1 else ["Not all networks were pruned from the same dense network."],
        sections=[Section("Comparison", finding, rows, networks_table(models), note=note)],
    )


def _dense_name(model: PrunedModel) -> str:
    """The name of the dense network, as given on the command line."""
    known = model.identity.dense_hash
    return model.identity.model if "asked" in model.rest else "a network" if known is None else known[:8]


# --- values to compare ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One value of networks, as curves over keep: a method each, repaired or not."""

    key: str  # accuracy, moved, or certified
    title: str
    label: str
    curves: tuple[Curve, ...]
    dense: float | None = None


def comparisons_of(group: Models) -> list[Comparison]:
    """The comparisons these networks have values for: accuracy, output change, certified error."""
    measured = accuracies_of(group)
    dense = next((accuracies[0] for accuracies in measured.values()), None)
    accuracy = _curves(group, lambda model: measured[id(model)][1] if id(model) in measured else None)
    moved, certified = _curves(group, lambda m: m.output_change), _curves(group, lambda m: m.certified_error)
    found = [
        Comparison("accuracy", "Accuracy", "accuracy, measured", accuracy, dense),
        Comparison("moved", "Output moved", "output moved on calibration inputs", moved),
        Comparison("certified", "Certified", "certified error of the output", certified),
    ]
    return [one for one in found if one.curves]


def _drawn(ident: str, title: str, one: Comparison) -> Plot:
    view = plots.curve_view(one.curves, one.label, "share", are_errors=one.key != "accuracy", dense=one.dense)
    return plots.lines(ident, title, view, of="network")


def _curves(models: Models, value: Value) -> tuple[Curve, ...]:
    """The value against keep; averages networks of equal method and keep."""
    arms: dict[str, dict[float, list[float]]] = {}
    for model in sorted(models, key=lambda network: -network.pruned.keep):
        if (known := value(model)) is not None:
            points = arms.setdefault(model.arm, {})
            keep = next((k for k in points if abs(k - model.pruned.keep) <= SAME_KEEP * k), model.pruned.keep)
            points.setdefault(keep, []).append(known)
    return tuple(Curve(arm, tuple(Point.of(*one) for one in points.items())) for arm, points in arms.items())


def common_points(models: Models) -> Evaluation | None:
    """An evaluation on the points that most of these networks share; accuracies on other points are not comparable."""
    evaluations = [one for model in models for one in _with_accuracy(model)]
    counts = Counter(one.data_hash for one in evaluations)
    return max(evaluations, key=lambda one: (counts[one.data_hash], one.n_inputs), default=None)


def accuracies_of(models: Models) -> dict[int, tuple[float, float]]:
    """{id of a network: accuracy of the dense and of the pruned one}, where they are known on the common points."""
    points, found = common_points(models), {}
    for model in models:
        for one in _with_accuracy(model):
            if points is not None and one.data_hash == points.data_hash and one.accuracies is not None:
                found[id(model)] = one.accuracies
    return found


def _with_accuracy(model: PrunedModel) -> list[Evaluation]:
    known = (measured for measured in model.evaluations.values() if isinstance(measured, Evaluation))
    return [measured for measured in known if measured.accuracies is not None]


def _finding(comparisons: Sequence[Comparison]) -> Finding:
    """The best method at the smallest keep that several methods reached, by accuracy or by output change."""
    phrases = {
        "accuracy": (max, min, "is most accurate", "Accuracy {}; {} has {}."),
        "moved": (min, max, "moves the output least", "By {} of its norm; {} by {}."),
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


def networks_table(models: Models) -> Table:
    """A table of the networks: what each keeps, and what that costs."""
    points, measured = common_points(models), accuracies_of(models)
    has_drops = any(model.certified_drop is not None for model in models)
    rows = []
    for model in sorted(models, key=lambda network: -network.pruned.keep):
        cells = {"method": Cell(model.arm), "keep": Cell(number(model.pruned.keep, "share"))}
        if points is not None and id(model) not in measured:
            cells["accuracy"] = Cell("not measured", "", "on these inputs")
            cells["accuracy, dense"] = Cell("not measured")
        elif points is not None:
            dense, pruned = measured[id(model)]
            title = f"{number(pruned - dense, 'points')} against the dense network"
            cells["accuracy"] = Cell(number(pruned, "share"), tone_of(pruned - dense), title)
            cells["accuracy, dense"] = Cell(number(dense, "share"))
        cells["dead rows"] = Cell(f"{model.pruned.dead_rows:,}")
        cells["output moved"] = Cell("unknown" if model.output_change is None else number(model.output_change, "share"))
        cells["certified within"] = _certified_cell(model)
        if has_drops:
            claim = model.certified_drop
            drop = "" if claim is None else words.percent_up(claim.drop_upper).removesuffix(" %")
            cells["certified drop"] = Cell(f"{drop} points" if drop else "none")
        rows.append((model.name, cells))
    caption = f"From most to least kept; of several certificates, the weakest. {shared_holdout(models)}"
    caption += f" Accuracy: on {points.inputs}." if points is not None else ""
    caption += " Certified drop: the accuracy falls by at most this much; below 0, it rises." if has_drops else ""
    return Table(caption, ("network", *rows[0][1]), tuple((name, tuple(cells.values())) for name, cells in rows))


def _certified_cell(model: PrunedModel) -> Cell:
    """The certified output error, marked if it is useless; without one, what is certified about tokens."""
    limit = model.certified_error
    if limit is None:
        claims = [claim for claim in model.all_certificates if isinstance(claim, Certificate)]
        limits = [claim.limit_words for claim in claims if claim.limit is not None]
        return Cell(", ".join(limits) or "none")
    if limit >= Certificate.USELESS:
        return Cell(f"{words.percent_up(limit)}: useless", WORST, "an error about as large as the output itself")
    return Cell(words.percent_up(limit))
