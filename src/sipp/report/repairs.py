"""What `sipp prune --repair` did to a network -> the section "Repair" of its page."""

from __future__ import annotations

from sipp.records.schemas import RepairedRecord
from sipp.report.plots import Plot
from sipp.report.read import PrunedModel
from sipp.report.words import Finding, number

REPAIR = "repair"  # its plot
MOST_NAMED = 4
ERRORS = {"just pruned": "error_before", "repaired": "error_after"}


def repair_finding(repaired: RepairedRecord) -> Finding:
    """How far the output was off before the kept weights were refitted, and how far it is now."""
    before, after = repaired.output_before, repaired.output_after
    if repaired.undone:
        heading = "The repair was undone: the kept weights are those of the pruning"
    elif before is None or after is None or not repaired.n_judged:
        heading = "The kept weights were refitted"
    else:
        heading = f"Refitting the kept weights took the output's error from {number(before, 'share')}"
        heading += f" to {number(after, 'share')}"
    return Finding(
        heading,
        f"{_judges(repaired)} {repaired.n_points:,} points were fitted, without labels; {repaired.n_aside:,} chose "
        "and gave the errors of layers. A certificate speaks of the repaired network."
        + (f" Undone: {repaired.undone}." if repaired.undone else ""),
    )


def _judges(repaired: RepairedRecord) -> str:
    """On which points the output's error was measured."""
    if repaired.n_judged:
        return f"The error is a share of the output's length, on {repaired.n_judged:,} points that chose nothing."
    return "How far the output is off on points that chose nothing was not measured."


def repair_note(repaired: RepairedRecord) -> str:
    """What was done in one sentence, and the first layers that were left alone with the reason."""
    alone = [f"{layer.name} ({layer.left_alone})" for layer in repaired.layers if layer.left_alone]
    more = f" and {len(alone) - MOST_NAMED} more" if len(alone) > MOST_NAMED else ""
    return f"{repaired.words}." + (f" Left alone: {', '.join(alone[:MOST_NAMED])}{more}." if alone else "")


def repair_plots(pruned: PrunedModel, ident: str) -> dict[str, Plot]:
    """The error of each layer's output before and after; none where nothing was repaired or compared."""
    repaired = pruned.record.repaired
    if repaired is None or not any(layer.error_before is not None for layer in repaired.layers):
        return {}
    shown = [{"name": name, "values": [getattr(one, key) for one in repaired.layers]} for name, key in ERRORS.items()]
    return {
        REPAIR: {
            "id": f"{ident}-{REPAIR}",
            "kind": "bars",
            "title": "Repair of each layer",
            "label": "layer",
            "names": [layer.name for layer in repaired.layers],
            "choices": [],
            "views": {"y": {"label": "error of the layer's output", "unit": "share", "log": False}, "series": shown},
        }
    }
