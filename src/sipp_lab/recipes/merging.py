"""Merges the values of a recipe into those of its base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Keys that exclude each other: one in a recipe removes those from its base. These names are unique among all sections.
ALTERNATIVES = {
    "keeps": ("alpha", "levels"),
    "alpha": ("keeps",),
    "levels": ("keeps",),
    "milestones": ("every",),
    "every": ("milestones",),
}


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges `above` into `below`, mapping by mapping; a key removes its `ALTERNATIVES`.

    If a section has other epochs and does not say when the rate decays, the milestones below keep their shares.
    """
    ended = {other for key in above for other in ALTERNATIVES.get(key, ())} - above.keys()
    values = {key: value for key, value in below.items() if key not in ended}
    for key, value in above.items():
        old = values.get(key)
        values[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    if "epochs" in above and "decay" not in above:
        _scale_schedule(values, below.get("epochs"), above["epochs"])
    return values


def _scale_schedule(section: dict[str, Any], before: Any, now: Any) -> None:
    """Scales the milestones of a section to another number of epochs, and shortens a warm-up beyond their end."""
    if not all(isinstance(n, int) and n > 0 for n in (before, now)):
        return  # the schema says what is wrong
    if (decay := section.get("decay")) and decay.get("milestones"):
        section["decay"] = {**decay, "milestones": scaled(decay["milestones"], now / before, now)}
    if isinstance(section.get("warmup_epochs"), int | float):
        section["warmup_epochs"] = min(section["warmup_epochs"], float(now))


def scaled(milestones: Sequence[int], ratio: float, n_epochs: int) -> list[int]:
    """The milestones in a schedule of another length, without those that coincide or are never reached."""
    return sorted({epoch for at in milestones if 0 < (epoch := round(at * ratio)) < n_epochs})
