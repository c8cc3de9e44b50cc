"""What stands in the files of a run beside its networks: the manifest, and the rows of epochs.

Records of networks are in `network_schemas.py`, certificates in `sipp.records.certificate`. Training writes them, the
command line and the report read them. Each field has its type and range there and nowhere else. Keys that are not
listed are kept as they are, so that a record of a later version can be read as far as it is known. Needs no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sipp.errors import DataError
from sipp.records.checking import first_problem

Count = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """The rules of all records: whole or refused, and not changed once they are made."""

    # strict: "1" is text, not a number, and true is not 1
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Record)


def checked(model: type[Model], values: Any, where: object) -> Model:
    """The values as a record of this kind; DataError says `where` they stand and which key is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise DataError(f"{first_problem(error)}", where=where) from error


def plain(record: BaseModel) -> dict[str, Any]:
    """The record in JSON's types, with the keys it was made of and no others."""
    return record.model_dump(mode="json", exclude_unset=True)


# --- training -------------------------------------------------------------------------------------------------------


class Accuracy(Record):
    """How a network does on a split: exact counts, and the mean cross-entropy."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=True)

    n: Count
    n_top1: Count
    n_top5: Count
    loss: float

    @property
    def top1(self) -> float:
        return self.n_top1 / self.n

    @property
    def top5(self) -> float:
        return self.n_top5 / self.n


class EpochRow(Record):
    """One epoch of training: its number from 1, the rate it ended with, loss and top-1 in training, test accuracy."""

    model_config = ConfigDict(extra="forbid")

    epoch: Count
    rate: float
    train_loss: float
    train_top1: float
    test: Accuracy | None  # None in epochs without an evaluation


# --- manifests ------------------------------------------------------------------------------------------------------


class OriginRecord(Record):
    """What, beside the configuration, decides a run's numbers."""

    code: str  # version of this package and of torch, and a digest of the package's source
    data: str  # digest of the splits, which includes the content of the data
    device: str


class Manifest(Record):
    """What a run's manifest holds, checked as far as it can be without the run's data."""

    config: dict[str, Any]
    # More than one: it was resumed with other data, code or device.
    origins: Annotated[tuple[OriginRecord, ...], Field(strict=False, min_length=1)]


class _PlanPruning(Record):
    levels: int | None = None
    keeps: Annotated[tuple[float, ...], Field(strict=False)] | None = None  # runs of older versions have levels only
    methods: Annotated[tuple[str, ...], Field(strict=False)]

    @property
    def n_levels(self) -> int:
        return len(self.keeps) if self.keeps is not None else self.levels or 0

    @model_validator(mode="after")
    def _has_levels(self) -> _PlanPruning:
        if self.levels is None and self.keeps is None:
            raise ValueError("'levels' is missing")
        return self


class _PlanData(Record):
    name: str


class PlanConfig(Record):
    """Of a run's configuration, what its plan can be made of: what a reader needs who has no recipe."""

    name: str
    pipeline: str
    net: str
    repetitions: int
    seed: int
    prune: _PlanPruning
    data: _PlanData
