"""Schemas of the records in files: networks of `sipp prune`, networks in runs, and runs themselves.

`serialising.py` writes networks; certificates are in `certificate.py`, the records of `sipp eval` and `sipp bench` in
`evaluation.py` and `bench.py`. Unknown keys are kept, so that records of later versions can be read.

Needs no torch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sipp.errors import DataError
from sipp.results.blend import BlendChoice
from sipp.results.certificate import AnyCertificate, Certificate, from_values
from sipp.results.checking import first_problem
from sipp.results.repair import Repair

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[float, Field(ge=0)]
# A number that may be infinite (which JSON cannot express) or unknown: both are read as None.
MaybeNumber = Annotated[float | None, BeforeValidator(lambda value: None if value == "inf" else value)]
MaybeText = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
OnlyTrue = Annotated[bool, BeforeValidator(lambda value: value is True)]  # anything but true is false


class Record(BaseModel):
    """The base of all records: strictly typed and frozen."""

    # strict: "1" is text, not a number, and true is not 1
    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Record)


def checked(model: type[Model], values: Any, where: object) -> Model:
    """The values as a record of this class; a DataError says `where` they come from and which key is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise DataError(first_problem(error), where=where) from error


def given_values(record: BaseModel) -> dict[str, Any]:
    """The values that a record was read from, without defaults."""
    return record.model_dump(mode="json", exclude_unset=True)


# --- every pruned network -------------------------------------------------------------------------------------------


class LayerRecord(Record):
    """One prunable weight after pruning."""

    name: str
    n_weights: Count
    kept: Count
    dead_rows: Count = 0
    eps: MaybeNumber = None  # None: no bound, or an infinite one


class BoundRecord(Record):
    """The theoretical bound on the output, before retraining."""

    epsilon: MaybeNumber = None
    delta: MaybeNumber = None
    met: OnlyTrue = False
    contradicted: bool = False  # the calibration data refute the assumption
    reason: MaybeText = ""
    words: MaybeText = ""  # the bound as a sentence, with the share of inputs it covers (T18)

    @property
    def holds(self) -> bool:
        """Whether it is met and gives a number: the only case in which it is a promise."""
        return self.met and self.epsilon is not None


class CertificateRecord(Record):
    """The values of a certificate of the network before retraining, or only a verdict why there is none."""

    verdict: str | None = None  # of T14
    mode: str | None = None  # of T16
    epsilon: float | Literal["inf"] | None = None
    drop_upper: float | None = None  # of T16
    measure: str | None = None  # of T22

    @cached_property
    def certificate(self) -> AnyCertificate | None:
        """The certificate; None if there is only a verdict."""
        is_refusal = self.model_fields_set == {"verdict"} and not (self.verdict or "").startswith("certified")
        return None if is_refusal else from_values(given_values(self))

    @model_validator(mode="after")
    def _can_be_read(self) -> CertificateRecord:
        _ = self.certificate  # which raises
        return self

    @property
    def is_refusal(self) -> bool:
        """Whether it only says why there is no certificate."""
        return self.certificate is None

    @property
    def limit(self) -> float | None:
        """The certified epsilon; None if no finite one was proved."""
        return None if self.epsilon == "inf" or self.verdict != "certified" else self.epsilon

    @property
    def output_limit(self) -> float | None:
        """The certified epsilon if it limits the error of the output, not of tokens (T22)."""
        return self.limit if self.measure == "output" else None

    @property
    def is_useless(self) -> bool:
        """Whether the certified epsilon is too large to mean anything."""
        return isinstance(self.certificate, Certificate) and self.certificate.is_useless

    @property
    def sentence(self) -> str:
        """The certificate as a sentence, computed again from its counts."""
        return self.verdict or "" if self.certificate is None else self.certificate.sentence


# --- a network of `sipp prune` --------------------------------------------------------------------------------------

PRUNED_KIND, PRUNED_FORMAT = "pruned", 2  # in its record


class PrunedLayerRecord(LayerRecord):
    """One prunable weight of a network of `sipp prune`."""

    n_rows: Count
    fan_in: Count
    keep: float


class MeasuredRecord(Record):
    """The statement with the measured constant (T19), or why there is none."""

    words: str | None = None
    c_constant: float | None = None


class ConditionsRecord(Record):
    """The conditions of the theory; `contradicted`: the calibration data refutes the assumption."""

    contradicted: bool = False


class MovedRecord(Record):
    """The relative change of the output on a few calibration points; None if it is not finite."""

    error: MaybeNumber = None


class PrunedRecord(Record):
    """The record that `sipp prune` writes beside a network; other keys (versions, seeds) are kept unread."""

    method: str
    keep: float
    kept: Count
    n_weights: Count
    dead_rows: Count
    dense_hash: str | None = None  # None: unknown
    pruned_hash: str
    buffers_hash: str | None = None  # of buffers that its state_dict leaves out; None: it has none
    layers: Annotated[tuple[PrunedLayerRecord, ...], Field(strict=False, min_length=1)]
    bound: BoundRecord | None = None
    guarantee: str | None = None
    conditions: ConditionsRecord | None = None
    measured: MeasuredRecord | None = None
    moved: MovedRecord | None = None
    choice: BlendChoice | None = None  # of a blend
    repair: OnlyTrue = False
    repaired: Repair | None = None
    seen: Annotated[tuple[str, ...], Field(strict=False)] = ()  # hashes of the points that chose it,
    seen_all: bool = False  # whether no others did
    certificate: CertificateRecord | None = None


# --- runs -----------------------------------------------------------------------------------------------------------


class Accuracy(Record):
    """The accuracy of a network on a split: exact counts, and the mean cross-entropy."""

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


class AccuracyShares(Record):
    """Shares of n test points, in [0, 1]; the loss is null where it is not finite."""

    n: Count
    top1: float
    top5: float
    loss: float | None = None


class EpochRow(Record):
    """One epoch of training: its number from 1, the rate it ended with, loss and top-1 in training, test accuracy."""

    model_config = ConfigDict(extra="forbid")

    epoch: Count
    rate: float
    train_loss: float
    train_top1: float
    test: Accuracy | None  # None in epochs without an evaluation


class NetworkRecord(Record):
    """One network of a run; level 0 is the dense one, which has no method."""

    seed: Count
    method: str | None
    level: Count
    after: AccuracyShares
    seconds: float
    keep: float = 1.0
    n_weights: Count | None = None
    multiply_adds: Count | None = None  # of one input with the weights that are left; None: not counted
    before: AccuracyShares | None = None
    dead_rows: Count = 0
    layers: Annotated[tuple[LayerRecord, ...], Field(strict=False)] = ()
    bound: BoundRecord | None = None
    guarantee: str | None = None
    certificate: CertificateRecord | None = None
    choice: BlendChoice | None = None  # of a blend
    part_seconds: dict[str, float] = Field(default_factory=dict)  # by part of the stage

    @model_validator(mode="after")
    def _fits(self) -> NetworkRecord:
        if self.method is not None and "keep" not in self.model_fields_set:
            raise ValueError("'keep' is missing")
        return self


class OriginRecord(Record):
    """What decides a run's numbers beside its configuration."""

    code: str  # version of this package and of torch, and a digest of the package's source
    data: str  # digest of the splits, which includes the content of the data
    device: str


class Manifest(Record):
    """The manifest of a run."""

    config: dict[str, Any]
    # More than one: it was resumed with other data, code or device.
    origins: Annotated[tuple[OriginRecord, ...], Field(strict=False, min_length=1)]


class _PlanPruning(Record):
    levels: int | None = None
    keeps: Annotated[tuple[float, ...], Field(strict=False)] | None = None  # instead of levels
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
    """The part of a run's configuration that its plan needs, without the recipe."""

    name: str
    pipeline: str
    net: str
    repetitions: int
    seed: int
    prune: _PlanPruning
    data: _PlanData
