"""Which blend `sipp-blend` chose, and what it tried (T20). Needs no torch, and is stored as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, with_config

from sipp.results.display import plain_table
from sipp.results.html import table_html, view
from sipp.results.options import Reduce

FROM_JSON = ConfigDict(strict=False)  # where a tuple is a list, and a record an object
# JSON cannot express an infinite error: it is written as null
Error = Annotated[float, BeforeValidator(lambda value: math.inf if value is None else value)]


@with_config(FROM_JSON)
@dataclass(frozen=True)
class BlendTrial:
    """One candidate of a blend, and how far its mask moves the output."""

    p: float
    reduce: Reduce
    error: Error  # ||f^ - f|| / ||f|| over the held-back points; infinite if an output is not finite
    is_shared: bool = False  # ranked by LAMP's shares of the blend, layer by layer
    by_rows: bool = False  # no blend: magnitude times the norm of the input, compared within rows

    @property
    def name(self) -> str:
        if self.by_rows:
            return "magnitude times input length within rows"
        if self.p == 0:
            return "magnitude"
        blend = f"{self.reduce} sensitivity" if self.p == 1 else f"{self.reduce} sensitivity^{self.p:g}"
        return f"{blend} in shares of its layer" if self.is_shared else blend


@with_config(FROM_JSON)
@dataclass(frozen=True)
class BlendChoice:
    """The blend that was chosen, and all candidates."""

    taken: BlendTrial
    tried: tuple[BlendTrial, ...]
    n_points: int  # 0: the output has no real numbers, so nothing was compared
    is_held_back: bool = True  # the points were held back from scoring; False: there were too few

    def __post_init__(self) -> None:
        if self.taken not in self.tried:
            raise ValueError("'taken' must be one of 'tried'")

    def __str__(self) -> str:
        if self.n_points == 0:
            return f"{self.taken.name}: nothing to compare, the output has no real numbers"
        others = ("magnitude", "max sensitivity")
        known = {trial.name: trial.error for trial in self.tried if trial.name in others and trial != self.taken}
        beside = ", ".join(f"{name} {error:.3g}" for name, error in known.items())
        held = "held-back " if self.is_held_back else ""
        inputs = f"1 {held}input" if self.n_points == 1 else f"{self.n_points:,} {held}inputs"
        where = "used to choose it" if self.is_held_back else "that were also used for scoring"
        text = f"{self.taken.name}: output error {self.taken.error:.3g}" + (f" ({beside})" if beside else "")
        return f"{text} on {inputs} {where}"

    def _repr_html_(self) -> str:
        table = plain_table("score", "output error")
        for trial in sorted(self.tried, key=lambda trial: trial.error):
            table.add_row(trial.name, f"{trial.error:.3g}")
        return view(str(self), table_html(table, bars=("output error",)))
