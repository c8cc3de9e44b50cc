"""Arms of an experiment: a method, optionally with its own reduction over patches (T3).

The label of an arm is the same in recipes, records and on the page: "magnitude", "sipp-det", "sipp-det mean". So one
run can compare both reductions of a method on the same dense network.
"""

from __future__ import annotations

from typing import Any, get_args

import sipp
from sipp.errors import OptionError
from sipp.results import Reduce, check


def label_of(text: str) -> str:
    """The label, checked, with single spaces."""
    arm_of(text)
    return " ".join(text.split())


def arm_of(label: Any) -> tuple[str, Reduce]:
    """The method and the reduction of an arm; OptionError if the method is unknown or takes no reduction."""
    method, *reduce = label.split() if isinstance(label, str) and label.split() else [str(label)]
    known, reductions = sipp.methods(), get_args(Reduce)
    if method not in known:
        raise OptionError(f"{method!r:.60} is not one of {', '.join(known)}{check.nearest(method, known)}")
    row = known[method]
    if row.fitting is not None:
        raise OptionError(f"{method!r} finds new values along with its mask, but a run trains them")
    if not reduce:
        return method, "max"
    if len(reduce) > 1 or reduce[0] not in reductions:
        fix = f"write a method alone, or with one of {', '.join(reductions)}"
        raise OptionError(f"{label!r:.60} is not a method", fix=fix)
    if not row.uses_sensitivities or row.is_blend:
        why = "it tries both" if row.is_blend else "it uses no sensitivities"
        raise OptionError(
            f"{method} cannot be combined with {reduce[0]}: {why}", fix=f"name the method {method!r} alone"
        )
    return method, "max" if reduce[0] == "max" else "mean"
