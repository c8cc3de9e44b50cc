"""Results in, the tables that a page begins with out: method by keep with the best choice, or networks side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sipp.records.display import percent_up
from sipp.records.schemas import CertificateRecord, EvalRecord
from sipp.report import series
from sipp.report.evaluations import accuracies_on, common_points
from sipp.report.read import PrunedModel, Run
from sipp.report.words import TOLERANCE, Finding, is_useless, number, reach

# Percentage points lost against the dense network, as shares: up to each, a tone from best to worst
TONES = ((TOLERANCE, "t0"), (0.01, "t1"), (0.03, "t2"), (0.1, "t3"))
WORST = "t4"


@dataclass(frozen=True)
class Cell:
    """One value of a table; `tone` is the class of its colour, `title` what it says when pointed at."""

    text: str
    tone: str = ""
    title: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under a head, each with its name."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


def tone_of(change: float) -> str:
    """The class of the colour of a change of accuracy."""
    return next((tone for limit, tone in TONES if change >= -limit), WORST)


def choice_of(run: Run) -> Finding | None:
    """Which method to use at which keep: the least keep within the tolerance, of several the most accurate there."""
    found = series.curves(run, "delta_top1")
    reached = {curve.method: kept for curve in found if (kept := reach(curve)) is not None}
    limit = f"{100 * TOLERANCE:g} points"
    if not found:
        return None
    if not reached:
        change, keep, method = max((p.mean, -p.keep, curve.method) for curve in found for p in curve.points)
        return Finding(
            f"No method stays within {limit} of the dense network",
            f"Nearest: {method} at keep {number(-keep, 'share')}, {number(change, 'points')} top-1.",
        )
    least = min(reached.values())
    near = [method for method, kept in reached.items() if kept <= least * (1 + 1e-3)]
    means = {curve.method: next(p.mean for p in curve.points if p.keep == reached[curve.method]) for curve in found
             if curve.method in near}  # fmt: skip
    best = max(means, key=lambda method: means[method])
    detail = f"The sparsest within {limit} of the dense network: {number(means[best], 'points')} top-1."
    others = [method for method in near if method != best]
    if others:
        detail += f" {', '.join(others)} {'reaches' if len(others) == 1 else 'reach'} the same keep."
    return Finding(f"Use {best} at keep {number(least, 'share')}", detail)


def method_table(run: Run) -> Table | None:
    """Top-1 accuracy of every method at every keep, retrained and just pruned, coloured by what was lost."""
    levels, methods = series.levels_of(run), series.methods_of(run)
    if not levels or not methods:
        return None
    after, changes = _by_level(run, "top1"), _by_level(run, "delta_top1")
    before = _by_level(run, "before_top1")
    rows = []
    for method in methods:
        cells = []
        for level in levels:
            value, change = after.get((method, level)), changes.get((method, level))
            if value is None:
                cells.append(Cell("", "", "not done"))
                continue
            pruned = before.get((method, level))
            title = f"just pruned: {number(pruned, 'share')}" if pruned is not None else ""
            change_words = "" if change is None else f"{number(change, 'points')} against the dense network"
            tone = "" if change is None else tone_of(change)
            cells.append(Cell(f"{100 * value:.1f}", tone, "; ".join(x for x in (change_words, title) if x)))
        rows.append((method, tuple(cells)))
    head = ("method / keep", *(number(keep, "share") for keep in levels.values()))
    near = f"green: within {100 * TOLERANCE:g} points of dense, orange and red: beyond."
    return Table(f"Top-1 accuracy after training in %, mean over seeds; {near}", head, tuple(rows))


def _by_level(run: Run, metric: str) -> dict[tuple[str, int], float]:
    """{(method, level): the mean over seeds}, where every seed knows it."""
    value, dense = series.METRICS[metric].value, series.dense_of(run)
    found = {}
    for method in series.methods_of(run):
        for level in series.levels_of(run):
            values = [value(record, dense.get(record.seed)) for record in series.records_at(run, method, level)]
            known = [one for one in values if one is not None]
            if known and len(known) == len(values):
                found[method, level] = sum(known) / len(known)
    return found


def networks_table(models: Sequence[PrunedModel]) -> Table | None:
    """Pruned networks side by side: what each keeps, and what is known of its cost; None where there is only one."""
    if len(models) < 2:
        return None
    points = common_points(models)
    columns = [*_WHICH, *(_ACCURACY if points else ()), *_COST]
    has_drops = any(one.drop_upper is not None for model in models for one in _certificates(model))
    columns += [("certified drop", _drop_cell)] if has_drops else []
    ordered = sorted(models, key=lambda one: -one.record.keep)
    rows = tuple((model.name, tuple(cell(model, points) for _, cell in columns)) for model in ordered)
    caption = "From most to least kept; of several certificates, the weakest."
    if points is not None:
        caption += f" Accuracy: on {points.data.what}."
    caption += " Certified drop: the accuracy falls by at most so much." if has_drops else ""
    return Table(caption, ("network", *(name for name, _ in columns)), rows)


def _certificates(model: PrunedModel) -> list[CertificateRecord]:
    return [one for one in (model.record.certificate, *model.certificates.values()) if one is not None]


def _accuracy_cell(model: PrunedModel, points: EvalRecord | None) -> Cell:
    found = accuracies_on(model, points)
    if found is None:
        return Cell("not measured", "", "on these points")
    change = found[1] - found[0]
    return Cell(number(found[1], "share"), tone_of(change), f"{number(change, 'points')} against the dense network")


def _dense_cell(model: PrunedModel, points: EvalRecord | None) -> Cell:
    found = accuracies_on(model, points)
    return Cell("not measured" if found is None else number(found[0], "share"))


def _moved_cell(model: PrunedModel, _: EvalRecord | None) -> Cell:
    error = None if model.record.moved is None else model.record.moved.error
    return Cell("unknown" if error is None else number(error, "share"))


def _certified_cell(model: PrunedModel, _: EvalRecord | None) -> Cell:
    limits = [one.limit for one in _certificates(model) if one.limit is not None]
    return certified_cell(max(limits)) if limits else Cell("none")  # the best of several is no claim


def _drop_cell(model: PrunedModel, _: EvalRecord | None) -> Cell:
    limits = [one.drop_upper for one in _certificates(model) if one.drop_upper is not None]
    return Cell(f"{percent_up(max(limits)).removesuffix(' %')} points") if limits else Cell("none")


# What each column says of a network; those of accuracy also on which points
Column = tuple[str, Callable[[PrunedModel, EvalRecord | None], Cell]]
_WHICH: tuple[Column, ...] = (
    ("method", lambda model, _: Cell(model.arm)),
    ("keep", lambda model, _: Cell(number(model.record.keep, "share"))),
)
_ACCURACY: tuple[Column, ...] = (("accuracy", _accuracy_cell), ("accuracy, dense", _dense_cell))
_COST: tuple[Column, ...] = (
    ("dead rows", lambda model, _: Cell(f"{model.record.dead_rows:,}")),
    ("output moved", _moved_cell),
    ("certified within", _certified_cell),
)


def certified_cell(limit: float) -> Cell:
    """A certified error, marked where it says nothing."""
    if is_useless(limit):
        return Cell(f"{percent_up(limit)}: useless", WORST, "an error about as large as the output itself")
    return Cell(percent_up(limit))
