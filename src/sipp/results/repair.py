"""The record of a repair: its effect on each layer and on the output. `print` it."""

from __future__ import annotations

from dataclasses import dataclass

from sipp.results import words
from sipp.results.options import RepairMethod
from sipp.results.sheet import Sheet, Table, shown


@dataclass(frozen=True)
class FittedLayer:
    """The fit of one weight, and its errors before and after.

    Errors are distances to the layer's target (the dense layer's output, for an error feedback of 1), relative to the
    norm of the dense output, on validation points. These chose the fit, so the errors are optimistic.
    """

    name: str
    mask_origin: str  # of the mask that was taken: "searched", "first", or "unfitted": the first, weights unchanged
    kept: int
    n_moved: int = 0  # kept weights that were not in the first mask
    ridge: float | None = None  # a share of the mean square of the inputs; None if nothing was refitted with one
    error_before: float | None = None  # of the first mask, unfitted; None if it could not be compared
    error_after: float | None = None  # of what was taken
    corrects: bool = False  # the residual stream that its output is added to
    intercept: str = "none"  # of the rows: "bias", or "norm" (a running mean) if it went there
    left_alone: str = ""  # why it is unfitted; empty if it was fitted


@dataclass(frozen=True)
class Polish:
    """The outcome of the polish by gradient descent."""

    taken: int  # steps until it stopped, over both rounds if there was a second
    best: int  # the step (of its round) whose weights were kept; 0: the weights before the polish
    rate: float  # the largest learning rate of a step of that round
    mixes: bool = False  # the second round was kept, on mixtures of two inputs each


@dataclass(frozen=True)
@shown
class Repair:
    """The record of a repair, and the inputs it used: fit, validation and test.

    Output errors are relative to the output's norm, on test points; None if there are too few of them.
    """

    layers: tuple[FittedLayer, ...]  # in the order of execution; `n_moved` counts from the masks that were given
    n_fit: int  # points that the weights were fitted on
    n_validation: int  # points that left layers alone and stopped the polish
    n_test: int  # test points, which chose nothing; 0: there were too few
    output_before: float | None  # None also if the output holds no real numbers
    output_after: float | None
    output_validation: float | None  # at the end, on validation points: optimistic
    polish: Polish | None
    undone: str  # why the repair was undone; empty if it was not
    method: RepairMethod = "refit"

    ALSO_IN_JSON = ("sentence",)

    @property
    def sheet(self) -> Sheet:
        columns = {
            "weight": "name", "error before": "error_before", "after": "error_after", "ridge": "ridge",
            "moved": "n_moved", "intercept": "intercept",
        }  # fmt: skip
        text = (
            "error: of the layer's output, relative to its norm, on the validation inputs that chose the fit; "
            "moved: kept weights that were not in the first mask"
        )
        table = Table.of(self.layers, columns, texts=("intercept",), bars=("error before", "after"), words=text)
        alone = [f"{layer.name} ({layer.left_alone})" for layer in self.layers if layer.left_alone]
        return Sheet(self.sentence, (("left alone", words.listed(alone)),) if alone else (), (table,))

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        n_refitted = sum(not layer.left_alone for layer in self.layers)
        text = f"{n_refitted} of {len(self.layers)} layers refitted on {self.n_fit:,} inputs"
        if self.method != "refit":
            by = "together" if self.method == "joint" else f"by {self.method}"
            n_moved = sum(layer.n_moved for layer in self.layers)
            text = (
                f"mask and weights found {by} on {self.n_fit:,} inputs ({n_moved:,} weights differ from the "
                "masks before)"
            )
        if self.polish is not None:
            text += f", then trained for {self.polish.taken} steps"
            if self.polish.mixes:
                text += " (the second round, on mixtures of two inputs each, came closer)"
        if self.output_before is not None:
            before = "before repair" if self.method in ("refit", "joint") else "with the first mask"
            text += (
                f"; output error on {self.n_test:,} test inputs: {words.number(self.output_before)} {before}, "
                f"{words.number(self.output_after)} after"
            )
        elif self.n_test == 0:
            text += "; too few distinct inputs to estimate the error on new ones"
        return f"{text}; undone: {self.undone}" if self.undone else text
