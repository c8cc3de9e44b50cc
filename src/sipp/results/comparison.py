"""The result of `compare`: every method at every keep, and which method to use."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from functools import partial

from sipp.results import words
from sipp.results.jsonio import NOT_JSON
from sipp.results.sheet import Sheet, Table, shown

STANDARD_ERRORS = 2.0  # a mean difference below this many standard errors counts as chance
BEST = "*"
KEEPS_A_TABLE = 3  # as many as fit the width


@dataclass(frozen=True)
class Compared:
    """One method at one keep, measured on inputs that did not choose its weights."""

    method: str
    keep: float  # as asked
    is_repaired: bool
    kept: int
    dead_rows: int
    error: float  # ||f^ - f|| / ||f|| over all points together; infinite if an output is not finite
    same: float | None  # share of points with the same predicted class; None if outputs are not n x classes
    accuracy: float | None  # None without labels
    moved: tuple[float, ...] = field(
        default=(), repr=False, compare=False, metadata=NOT_JSON
    )  # ||f^ - f||^2 of every point, over the mean ||f||^2

    @property
    def name(self) -> str:
        return f"{self.method} + repair" if self.is_repaired else self.method


@dataclass(frozen=True)
@shown
class Comparison:
    """All methods at all values of keep, on the same inputs. `print` it."""

    rows: tuple[Compared, ...]
    n_weights: int
    n_calibration: int  # points that chose weights, and repaired them
    n_test: int  # distinct test points, which chose nothing
    is_held_back: bool  # they were held back from the data; False: a holdout was given
    dense_accuracy: float | None

    ALSO_IN_JSON = ("keeps", "sentence")

    @property
    def keeps(self) -> tuple[float, ...]:
        """The values of keep, from dense to sparse."""
        return tuple(sorted({row.keep for row in self.rows}, reverse=True))

    def best(self, keep: float) -> Compared:
        """The method with the smallest error at this keep; the first of equal ones."""
        return min((row for row in self.rows if row.keep == keep), key=lambda row: row.error)

    def level_with(self, best: Compared) -> tuple[Compared, ...]:
        """The other methods at this keep whose difference from `best` may be chance."""
        others = (row for row in self.rows if row.keep == best.keep and row is not best)
        return tuple(row for row in others if is_level(best.moved, row.moved, self.n_test))

    @property
    def sentence(self) -> str:
        """Which method to use, at the smallest keep that leaves most of the output."""
        usable = [row for row in map(self.best, self.keeps) if row.error <= words.LARGE_ERROR]
        inputs = f"{self.n_test:,} {'held-back inputs' if self.is_held_back else 'holdout inputs'}"
        if not usable:
            best = self.best(self.keeps[0])
            return (
                f"None of these is usable as it is: at keep {best.keep:g} even the best, {best.name}, has an "
                f"output error of {words.percent_up(best.error)} on {inputs}. Try a larger keep"
                f"{'' if any(row.is_repaired for row in self.rows) else ', repair'} or training."
            )
        chosen = usable[-1]
        text = f"Use {chosen.name} at keep {chosen.keep:g}: on {inputs} {self._found(chosen)}."
        if level := self.level_with(chosen):
            text += f" On these inputs, {', '.join(row.name for row in level)} cannot be told apart from it."
        if smaller := [keep for keep in self.keeps if keep < chosen.keep]:
            text += (
                f" At keep {smaller[0]:g} even the best has {words.percent_up(self.best(smaller[0]).error)}"
                f"{'' if any(row.is_repaired for row in self.rows) else '; repair=True usually lowers it'}."
            )
        return text + " It was chosen on these inputs: certify it on others."

    def _found(self, row: Compared) -> str:
        """The measurements of one method in words."""
        measured = [f"the output error is {words.percent_up(row.error)}"]
        if row.same is not None:
            measured.append(f"the largest output stayed the same for {_down(row.same)}")
        if row.accuracy is not None and self.dense_accuracy is not None:
            measured.append(f"the accuracy is {_down(row.accuracy)} (dense: {words.percent_up(self.dense_accuracy)})")
        return ", ".join(measured)

    @property
    def sheet(self) -> Sheet:
        inputs = "held-back inputs" if self.is_held_back else "holdout inputs"
        title = f"{self.n_weights:,} prunable weights; pruned with {self.n_calibration:,} inputs, "
        title += f"tested on {self.n_test:,} {inputs}"
        words = "error: change of the output, relative to its norm; same: inputs with the same largest output"
        if self.dense_accuracy is not None:
            title += f"; the dense network is right on {self.dense_accuracy:.1%}"
            words += "; right: inputs classified correctly"
        parts = [self.keeps[i : i + KEEPS_A_TABLE] for i in range(0, len(self.keeps), KEEPS_A_TABLE)]
        tables = tuple(_table(self, keeps, f"{words}; {BEST}: best" if keeps is parts[-1] else "") for keeps in parts)
        return Sheet(title, tables=tables, note=self.sentence)


def _table(comparison: Comparison, keeps: tuple[float, ...], words: str) -> Table:
    """The errors as a table, methods x keeps."""
    rows = comparison.rows
    known = (("error", "error"), ("same", "same"), ("accuracy", "right"))
    shown_values = [(name, word) for name, word in known if any(getattr(row, name) is not None for row in rows)]
    columns, forms = ["keep"], {}
    for keep in keeps:
        columns += [f"{keep:g}: {word}" if name == "error" else word for name, word in shown_values]
        forms[f"{keep:g}: error"] = partial(_error, comparison.best(keep).error)
    lines = []
    for label in dict.fromkeys(row.name for row in rows):
        by_keep = {row.keep: row for row in rows if row.name == label}
        cells = (
            by_keep[keep].error if name == "error" else _share(comparison, by_keep[keep], name)
            for keep in keeps
            for name, _ in shown_values
        )
        lines.append((label, *cells))
    return Table(tuple(columns), tuple(lines), bars=tuple(forms), words=words, forms=forms)


def _error(best: float, error: float) -> str:
    return f"{error:.3g}" + (BEST if error == best else " ")


def _share(comparison: Comparison, row: Compared, name: str) -> str:
    value: float | None = getattr(row, name)
    column = [getattr(other, name) for other in comparison.rows if other.keep == row.keep]
    is_best = value == max((other for other in column if other is not None), default=None)
    return "" if value is None else f"{value:.1%}" + (BEST if is_best else " ")


def is_level(best: tuple[float, ...], other: tuple[float, ...], n_points: int | None = None) -> bool:
    """Whether the mean difference of two networks' errors on the same inputs may be chance; a heuristic.

    One point, or non-finite errors on both sides, decide nothing. `n_points` is the number of distinct points.
    """
    gaps = [other_error - best_error for best_error, other_error in zip(best, other)]
    n_points = len(gaps) if n_points is None else n_points
    if n_points < 2:
        return True
    if not all(map(math.isfinite, gaps)):
        return not all(map(math.isfinite, best))
    return statistics.fmean(gaps) <= STANDARD_ERRORS * statistics.stdev(gaps) / math.sqrt(n_points)


def _down(share: float) -> str:
    """A measured share as a percentage, rounded down: the words never claim more than the record."""
    return f"{math.floor(share * 1000) / 10:g} %"
