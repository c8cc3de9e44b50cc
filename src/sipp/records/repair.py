"""What a repair did: layer by layer, and to the output of the network. `print` it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from sipp.records.display import number, plain_table, text_of
from sipp.records.html import table_html, view
from sipp.records.options import Fitting
from sipp.records.plots import layer_bars

Intercept = Literal["bias", "norm", "none"]  # where the intercept of a row went: a bias, a running mean, nowhere


@dataclass(frozen=True)
class LayerRepair:
    """What became of one weight. Errors are the gap to what the layer aims at (with an error feedback of 1 the dense
    layer's output), relative to the norm of the dense output, on the points that chose: what they say of the refit is
    too good, the more so the fewer they are."""

    name: str
    error_before: float | None  # of the mask that the fit began with; None where the layer could not be compared
    error_after: float | None  # the same as before where it was left alone
    ridge: float | None  # None where it was left alone
    intercept: Intercept
    left_alone: str  # why the weights are as they were; empty where they were refitted
    n_moved: int = 0  # weights that are kept and were not in the mask before


@dataclass(frozen=True)
class Polish:
    """What the steps of gradient descent did."""

    asked: int
    taken: int  # until it stopped, in both rounds where there was a second one
    best: int  # the step of its round whose weights were kept; 0: the refit's own
    rate: float  # the largest learning rate of a step of that round
    mixes: bool = False  # it is the second round, on mixtures of two inputs each


@dataclass(frozen=True)
class Repair:
    """What a repair did. The output errors are shares of the output's norm, on points that chose nothing.

    With too few points to keep such aside there is no estimate, and they are None.
    """

    layers: tuple[LayerRepair, ...]  # in the order of execution
    n_points: int  # that the weights were fitted on
    n_aside: int  # that chose the ridges, left layers alone and stopped the polish
    n_judged: int  # that did nothing but judge; 0: too few points
    output_before: float | None  # None also where the output holds no real numbers
    output_refit: float | None
    output_after: float | None
    output_chosen: float | None  # at the end, on the points that chose: no estimate for others
    polish: Polish | None
    undone: str  # why all weights are as they were; empty where they are not
    way: Literal["refit", "joint"] | Fitting = "refit"  # "joint": masks and weights were found together (T21)
    error_feedback: float | None = None  # how much of what earlier layers lost each layer makes up for
    budgets: str = ""  # whose share of weights the layers keep; "given": that of the masks before
    n_judged_fit: int | None = None  # points fitted by the network that was judged; a last fit may have all

    def _table(self) -> Table:
        """One line a layer."""
        columns = ("weight", "error before", "after", "ridge", "moved", "intercept", "left alone")
        table = plain_table(*columns, texts=("intercept", "left alone"), tight=True)
        for layer in self.layers:
            errors = number(layer.error_before), number(layer.error_after)
            moved = f"{layer.n_moved:,}"
            table.add_row(layer.name, *errors, number(layer.ridge), moved, layer.intercept, layer.left_alone)
        return table

    def __str__(self) -> str:
        return "\n".join([self.sentence, text_of(self._table())])

    def __repr__(self) -> str:
        return f"<Repair: {self.sentence.split(';')[0]}; print() shows the layers>"

    def _repr_html_(self) -> str:
        return view(self.sentence, table_html(self._table(), bars=("error before", "after")))

    def plot(self, ax: Any = None) -> Any:
        """Draws the error of each layer before and after, on `ax` or on new axes, and gives them."""
        known = [layer for layer in self.layers if layer.error_before is not None and layer.error_after is not None]
        errors = {
            "after": [layer.error_after or 0.0 for layer in known],
            "before": [layer.error_before or 0.0 for layer in known],
        }
        names = [layer.name for layer in known]
        return layer_bars(ax, names, errors, "error of the layer's output, relative to its norm")

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        n_refitted = sum(not layer.left_alone for layer in self.layers)
        text = f"{n_refitted} of {len(self.layers)} layers refitted on {self.n_points:,} inputs"
        if self.way != "refit":
            by = "together" if self.way == "joint" else f"by {self.way}"
            n_moved = sum(layer.n_moved for layer in self.layers)
            text = (
                f"mask and weights found {by} on {self.n_points:,} inputs ({n_moved:,} weights differ from the "
                "masks before)"
            )
        if self.polish is not None:
            text += f", then polished for {self.polish.taken} steps"
            text += " (the second round, on mixtures of two inputs each, came closer)" * self.polish.mixes
        if self.output_before is not None:
            before = "before repair" if self.way in ("refit", "joint") else "with the first mask"
            text += (
                f"; output error on {self.n_judged:,} held-back inputs: {number(self.output_before)} {before}, "
                f"{number(self.output_after)} after"
            )
            if self.n_judged_fit is not None and self.n_judged_fit < self.n_points:
                text += f" (fitted to {self.n_judged_fit:,} other inputs)"
        elif self.n_judged == 0:
            text += "; too few distinct inputs to test it on, so the error on new inputs is unknown"
        return f"{text}; undone: {self.undone}" if self.undone else text
