"""Arms of an experiment: a method, optionally with its own reduction over patches (T3). Imports no torch.

The label of an arm is the same in recipes, records and on the page: "magnitude", "sipp-det", "sipp-det mean". So one
run can compare both reductions of a method on the same dense network.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_args

from sipp.errors import OptionError
from sipp.results.options import Reduce
from sipp.scoring.methods import method_of, refuse_fitted

SEPARATOR = " "


@dataclass(frozen=True)
class Arm:
    """A method, and the reduction over patches if the arm names one."""

    method: str
    reduce: Reduce | None = None

    @property
    def label(self) -> str:
        """Its name everywhere but in folder names."""
        return self.method if self.reduce is None else f"{self.method}{SEPARATOR}{self.reduce}"


def arm_of(label: Any, *, own: Collection[str] = ()) -> Arm:
    """The arm with this label; OptionError if the method is unknown or takes no reduction.

    `own` are names of the user's own methods, whose code need not be loaded.
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
    if not row.uses_sensitivities or row.is_blend:
        why = "it tries both" if row.is_blend else "it uses no sensitivities"
        raise OptionError(f"{row.name} takes no {words[1]} over patches: {why}", fix=f"write {row.name} alone")
    return Arm(row.name, "max" if words[1] == "max" else "mean")
