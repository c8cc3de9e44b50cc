"""What `sipp eval` measured of a dense and a pruned network, and the record it writes. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from sipp.results.display import labelled_line
from sipp.results.schemas import Count, Positive, Record, Share, Size

EVAL_KIND, EVAL_FORMAT = "evaluation", 1


class EvalData(Record):
    """The points it was measured on."""

    what: str  # in words
    hash: str  # of the set of points, as in certificates


class EvalMeasures(Record):
    """Measurements of a dense and a pruned network. None: no classes, no labels, or not finite."""

    n_points: Positive
    dense_accuracy: Share | None = None
    pruned_accuracy: Share | None = None
    dense_loss: Size | None = None  # mean cross-entropy
    pruned_loss: Size | None = None
    same_class: Share | None = None  # share of points with the same predicted class
    error_mean: Size | None = None  # of ||f^ - f|| / ||f||
    error_median: Size | None = None
    error_max: Size | None = None
    n_not_finite: Count = 0  # points with an output that is not finite, or a dense output of 0 that changed
    why_no_accuracy: str = ""  # why labels could not be used; empty if they could or there are none

    @model_validator(mode="after")
    def _both_or_neither(self) -> EvalMeasures:
        if (self.dense_accuracy is None) != (self.pruned_accuracy is None):
            raise ValueError("'dense_accuracy' and 'pruned_accuracy' belong together")
        return self

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """Accuracy of the dense and of the pruned network; None without labels or classes."""
        if self.dense_accuracy is None or self.pruned_accuracy is None:
            return None
        return self.dense_accuracy, self.pruned_accuracy

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What was measured, as labels and texts."""
        rows = []
        if self.accuracies is not None:
            dense, pruned = self.accuracies
            change = f"{100 * (pruned - dense):+.2f} percentage points"
            rows.append(("accuracy", f"{pruned:.2%} pruned, {dense:.2%} dense ({change})"))
        if self.why_no_accuracy:
            rows.append(("accuracy", f"not measured: {self.why_no_accuracy}"))
        if self.dense_loss is not None and self.pruned_loss is not None:
            rows.append(("loss", f"{self.pruned_loss:.4g} pruned, {self.dense_loss:.4g} dense (cross-entropy)"))
        if self.same_class is not None:
            rows.append(("same class", f"{self.same_class:.2%} of inputs"))
        if self.n_not_finite:
            rows.append(("epsilon", f"not finite on {self.n_not_finite:,} of {self.n_points:,} inputs"))
        if self.error_mean is not None and self.error_median is not None and self.error_max is not None:
            errors = f"{self.error_mean:.4g} mean, {self.error_median:.4g} median, {self.error_max:.4g} largest"
            rows.append(("epsilon", f"{errors} (how far the output moved, relative to its norm)"))
        return rows

    def __str__(self) -> str:
        lines = [("inputs", f"{self.n_points:,}"), *self.rows]
        return "\n".join(labelled_line(label, text) for label, text in lines)


class EvalRecord(EvalMeasures):
    """What `sipp eval` measured of two networks, as it is written."""

    kind: Literal["evaluation"]
    format: Literal[1]
    sipp: str
    dense_hash: str
    pruned_hash: str
    data: EvalData
