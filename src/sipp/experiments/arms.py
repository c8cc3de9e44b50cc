"""Arms of an experiment: a method, alone or with its own reduction over patches (T3). Needs no torch.

An arm is written as it stands in recipes, records and on the page: "wt", "sipp-det", "sipp-det mean". Both forms of a
method can so stand in one run, and share its dense network.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args

from sipp.errors import OptionError
from sipp.records.options import Reduce
from sipp.scoring.methods import method_of, refuse_fitted

SEPARATOR = " "


@dataclass(frozen=True)
class Arm:
    """A method and, where the arm names one, the reduction over patches that it uses."""

    method: str
    reduce: Reduce | None = None

    @property
    def label(self) -> str:
        """Its name, except in names of folders."""
        return self.method if self.reduce is None else f"{self.method}{SEPARATOR}{self.reduce}"


def arm_of(label: Any, *, own: Collection[str] = ()) -> Arm:
    """The arm of this label; OptionError if there is no such method, or it has no reduction over patches.

    `own` are names of the user's own methods, whose code need not be here.
    """
    if label in own:
        return Arm(label)
    words = label.split() if isinstance(label, str) else []
    if len(words) < 2:
        method = method_of(words[0] if words else label)
        refuse_fitted(method.name, "a run trains them")
        return Arm(method.name)
    row = method_of(words[0])
    if len(words) > 2 or words[1] not in get_args(Reduce):
        raise OptionError(
            f"{label!r:.60} is not a method", fix=f"write a method alone, or with one of {', '.join(get_args(Reduce))}"
        )
    if not row.is_scored or row.is_blend:
        why = "it tries both" if row.is_blend else "it uses no sensitivities"
        raise OptionError(f"{row.name} takes no {words[1]} over patches: {why}", fix=f"write {row.name} alone")
    return Arm(row.name, "max" if words[1] == "max" else "mean")
