"""Which blend of sensitivity and magnitude was taken, and what else was tried -> the section "Method" of its page."""

from __future__ import annotations

from sipp.report.plots import Plot
from sipp.report.read import PrunedModel
from sipp.report.words import Finding, number
from sipp.storage.network_schemas import ChoiceRecord

BLEND = "blend"  # its plot


def blend_finding(choice: ChoiceRecord) -> Finding:
    """What was taken and how far it moves the output; beside it, how that was found out."""
    taken = choice.taken
    error = "" if taken.error is None else f": just pruned, the output moved by {number(taken.error, 'share')}"
    where = "that were kept aside from scoring" if choice.is_aside else "that were scored too"
    points = "1 calibration point" if choice.n_points == 1 else f"{choice.n_points:,} calibration points"
    others = "No other was tried: the output of an untrained network tells nothing of what training makes of it (T20)."
    if len(choice.tried) > 1:
        others = f"{len(choice.tried)} rankings of weights were tried; a small lead counts as chance (T20)."
    return Finding(
        f"Ranked by {taken.name}{error}",
        f"Errors are shares of the output's length, just pruned, on {points} {where}. {others}",
    )


def blend_plots(pruned: PrunedModel, ident: str) -> dict[str, Plot]:
    """The error of the output with each blend; none where only one was possible, or another method pruned."""
    choice = pruned.record.choice
    if choice is None or len(choice.tried) < 2:
        return {}
    names = [f"{one.name} (taken)" if one.is_taken else one.name for one in choice.tried]
    values = [one.error for one in choice.tried]
    return {
        BLEND: {
            "id": f"{ident}-{BLEND}",
            "kind": "bars",
            "title": "Blends that were tried",
            "label": "blend",
            "names": names,
            "choices": [],
            "views": {
                "y": {"label": "error of the output", "unit": "share", "log": False},
                "series": [{"name": pruned.arm, "values": values}],
            },
        }
    }
