"""What stands in the record of `sipp eval --out`: how good a pruned network is beside the dense one. Needs no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sipp.storage.run_schemas import Count, Record

Share = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[float, Field(ge=0)]


class EvalData(Record):
    """The points it was measured on."""

    what: str  # in words
    hash: str  # of the set of points, as in certificates


class EvalRecord(Record):
    """What `sipp eval` measured on points, and of which two networks. None: no classes, no labels, or not finite."""

    kind: Literal["evaluation"]
    format: Literal[1]
    sipp: str
    dense_hash: str
    pruned_hash: str
    data: EvalData
    n_points: Annotated[int, Field(gt=0)]
    dense_accuracy: Share | None
    pruned_accuracy: Share | None
    dense_loss: Size | None
    pruned_loss: Size | None
    same_class: Share | None
    error_mean: Size | None
    error_median: Size | None
    error_max: Size | None
    n_not_finite: Count

    @model_validator(mode="after")
    def _both_or_neither(self) -> EvalRecord:
        if (self.dense_accuracy is None) != (self.pruned_accuracy is None):
            raise ValueError("'dense_accuracy' and 'pruned_accuracy' belong together")
        return self

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """Of the dense and of the pruned network; None where the points have no labels, or the outputs no classes."""
        if self.dense_accuracy is None or self.pruned_accuracy is None:
            return None
        return self.dense_accuracy, self.pruned_accuracy
