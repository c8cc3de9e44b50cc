"""Which blend of sensitivity and magnitude was taken, and what was tried (T20)."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from sipp.records.html import table_html, view
from sipp.records.options import Reduce


@dataclass(frozen=True)
class BlendTrial:
    """One blend, and how far the network's output moves with its mask."""

    p: float
    reduce: Reduce
    error: float  # ||f^ - f|| / ||f|| over all points kept aside; infinite where an output is not finite
    is_shared: bool = False  # ranked by LAMP's shares of the blend, layer by layer
    by_rows: bool = False  # no blend: magnitude times the length of the input, compared within rows

    @property
    def name(self) -> str:
        if self.by_rows:
            return "magnitude times input length within rows"
        if self.p == 0:
            return "magnitude"
        blend = f"{self.reduce} sensitivity" if self.p == 1 else f"{self.reduce} sensitivity^{self.p:g}"
        return f"{blend} in shares of its layer" if self.is_shared else blend


@dataclass(frozen=True)
class BlendChoice:
    """The blend that was taken, and the whole curve it was chosen from."""

    taken: BlendTrial
    tried: tuple[BlendTrial, ...]
    n_points: int
    is_aside: bool = True  # those were not scored; False: too few to keep any aside

    def __str__(self) -> str:
        others = ("magnitude", "max sensitivity")
        known = {one.name: one.error for one in self.tried if one.name in others and one is not self.taken}
        beside = ", ".join(f"{name} {error:.3g}" for name, error in known.items())
        held = "held-back " if self.is_aside else ""
        inputs = f"1 {held}input" if self.n_points == 1 else f"{self.n_points} {held}inputs"
        where = "used to choose it" if self.is_aside else "that were also used for scoring"
        text = f"{self.taken.name}: output error {self.taken.error:.3g} on {inputs} {where}"
        return text + (f" ({beside})" if beside else "")

    def _repr_html_(self) -> str:
        table = Table()
        table.add_column("score")
        table.add_column("output error", justify="right")
        for one in sorted(self.tried, key=lambda one: one.error):
            table.add_row(one.name, f"{one.error:.3g}")
        return view(str(self), table_html(table, bars=("output error",)))
