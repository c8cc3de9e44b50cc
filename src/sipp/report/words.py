"""Numbers and findings in words: what headings say, with units, never more than what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from sipp.records.display import percent_up
from sipp.report.read import Run
from sipp.report.series import (
    Curve,
    Unit,
    certified_curves,
    compiling_of,
    curves,
    layers_of,
    seconds_of,
    seeds_of,
    times,
)

TOLERANCE = 0.005  # of a share: the loss of accuracy that the paper calls commensurate
USELESS = 0.9  # a certified error from here on, near the output's own length: a network of zeros has 1
MINUTE, HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Finding:
    """A heading that says what was found, and a sentence that says how far it goes."""

    heading: str
    detail: str


def number(value: float | None, unit: Unit = "number") -> str:
    """The value with its unit, as a person reads it."""
    if value is None or not math.isfinite(value):
        return "none"
    if unit == "share":
        return f"{_percent(100 * value)} %"
    if unit == "points":
        return f"{100 * value:+.2f} points"
    if unit == "seconds":
        return seconds(value)
    if unit == "count":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    return _plain(value)


def is_useless(limit: float) -> bool:
    """Whether a certified error is near the output's own length, or above: then it says nothing."""
    return limit >= USELESS


def _percent(value: float) -> str:
    """No decimal from 100 on, else one, or two digits below one: 191, 6.4, 0.25; the page's script does the same."""
    if value == 0 or abs(value) >= 1:
        return f"{value:,.{0 if abs(value) >= 100 else 1}f}".removesuffix(".0")
    return _plain(value, digits=2)


def up(value: float) -> str:
    """A proved limit in four digits, rounded up."""
    return number(float(Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(value))))


def _plain(value: float, *, digits: int = 4) -> str:
    """So many digits, and no exponent where a person would not write one."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.{digits}g}"
    return f"{value:.2e}"


def seconds(value: float) -> str:
    """A time in the unit that fits it."""
    if value < MINUTE:
        return f"{value:.3g} s"
    if value < HOUR:
        return f"{int(value // MINUTE)} min {int(value % MINUTE)} s"
    return f"{int(value // HOUR)} h {int(value % HOUR // MINUTE)} min"


def joined(names: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def reach(curve: Curve) -> float | None:
    """The least keep of a curve of accuracy changes up to which no level has lost more than `TOLERANCE`."""
    kept = None
    for point in curve.points:
        if point.mean < -TOLERANCE:
            break
        kept = point.keep
    return kept


def spread_words(run: Run) -> str:
    """How far the methods are apart at the end, and what lines and bands are; empty where nothing is pruned yet."""
    found = curves(run, "delta_top1")
    return _spread(found) + _seeds_note(run) if found else ""


def _spread(found: tuple[Curve, ...]) -> str:
    """What the methods have at the sparsest level that all of them reached."""
    n_common = min(len(curve.points) for curve in found)
    last = {curve.method: curve.points[n_common - 1] for curve in found}
    best, worst = (max(last, key=lambda m: last[m].mean), min(last, key=lambda m: last[m].mean))
    keep = number(last[best].keep, "share")
    text = f"At {keep} keep, {best} changes top-1 accuracy by {number(last[best].mean, 'points')}"
    if best != worst:
        text += f" (mean), {worst} by {number(last[worst].mean, 'points')}"
        if last[best].n > 1 and last[worst].high >= last[best].low:
            text += "; their bands overlap"
    return text + ". "


def _seeds_note(run: Run) -> str:
    n = len(seeds_of(run))
    if n == 1:
        return "One seed: there is no band, and small differences may be chance."
    return f"Lines are means over {n} seeds, bands reach from the least to the largest."


def certificate_finding(run: Run) -> Finding:
    """What the holdout certifies at the least and at the most pruning."""
    found = certified_curves(run)
    n_tried = sum(record.certificate is not None for record in run.records)
    if not found:
        if n_tried:
            return Finding("No network got a certificate", "Each refusal is given below in its own words.")
        return Finding(
            "No certificate: the run set no holdout aside",
            "Set data.n_holdout in the recipe to have every pruned network certified before it is retrained.",
        )
    # All methods, not the best of them: the confidence of a certificate does not hold for the best of several.
    first = {curve.method: curve.points[0] for curve in found}
    best, worst = min(first, key=lambda m: first[m].high), max(first, key=lambda m: first[m].high)
    heading = (
        f"At {number(first[best].keep, 'share')} keep, outputs are certified within {percent_up(first[best].high)}"
    )
    if is_useless(first[best].high):
        heading = f"No certificate says anything: all allow an error of {percent_up(first[best].high)} or more"
    elif first[best].high < first[worst].high:
        heading += f" ({best}) to {percent_up(first[worst].high)} ({worst})"
        heading += ", which is useless" if is_useless(first[worst].high) else ""
    elif len(first) > 1:
        heading += " for every method"
    of = "the network it was pruned from" if run.pipeline is None else run.pipeline.compared_with
    detail = (
        f"Epsilon is the relative change of the outputs against {of}; it speaks of the moment before retraining, "
        f"never of what training made of it. {n_tried} networks were certified on the same points: each claim holds at "
        "its own confidence, the best of several does not. Heading: the largest over seeds."
    )
    return Finding(heading, detail)


def layers_finding(run: Run) -> Finding:
    """Where rows died, if any did."""
    n_layers = len(layers_of(run))
    dead = {curve.method: curve.points[-1] for curve in curves(run, "dead_rows")}
    with_dead = {method: point for method, point in dead.items() if point.mean > 0}
    if not dead:
        return Finding("Layers", "No pruned network is finished yet.")
    if not with_dead:
        return Finding(f"No row died in any of {n_layers} layers", "Every row kept at least one weight at every level.")
    most, least = max(dead, key=lambda m: dead[m].mean), min(dead, key=lambda m: dead[m].mean)
    heading = f"At its sparsest level {most} leaves {number(dead[most].mean, 'count')} dead rows"
    heading += f", {least} {number(dead[least].mean, 'count')}" if most != least else ""
    return Finding(
        heading,
        "A dead row has lost all of its weights: its output is only a bias. Means over seeds; a layer's "
        "epsilon is the largest over its rows and over seeds.",
    )


def time_finding(run: Run) -> Finding:
    """How much of the time went into pruning rather than training."""
    sums = times(run)
    whole, training = seconds_of(run), math.fsum(parts["train"] for parts in sums.values())
    if not whole or not training:
        return Finding(f"All networks took {seconds(whole)}", "This run did not record the parts of a stage.")
    spent = math.fsum(parts[part] for parts in sums.values() for part in ("score", "prune", "certify"))
    heading = f"Scoring, pruning and certifying took {100 * spent / whole:.2g} % of {seconds(whole)}"
    detail = "Sums over all levels and seeds, by the clock of the machine that ran them; the rest is training."
    compiling = compiling_of(run)
    if compiling is not None:
        detail += f" Compilation, once after an install, is not counted: {seconds(compiling)}."
    note = "" if run.pipeline is None else run.pipeline.note_on_time
    return Finding(heading, f"{detail} {note}".rstrip())
