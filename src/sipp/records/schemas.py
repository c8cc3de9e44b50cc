"""Schemas of all records in files: networks in runs, `sipp prune`, `eval` and `bench`, and runs themselves.

`serialising.py` writes them; certificates are in `certificate.py`. Unknown keys are kept, so that records of later
versions can be read.

Needs no torch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sipp.errors import DataError
from sipp.records.blend import BlendChoice
from sipp.records.certificate import AnyCertificate, Certificate, from_values
from sipp.records.checking import first_problem
from sipp.records.display import labelled_line, size_headline, why_larger
from sipp.records.repair import Repair
from sipp.records.speed import Speed, speed_headline, speed_words

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[float, Field(ge=0)]
Milliseconds = Annotated[float, Field(gt=0)]
Times = Annotated[float, Field(gt=0)]  # as much
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
        """The certificate, checked against its counts; None if there is only a verdict."""
        is_refusal = self.model_fields_set == {"verdict"} and not (self.verdict or "").startswith("certified")
        return None if is_refusal else from_values(given_values(self))

    @model_validator(mode="after")
    def _follows_from_its_counts(self) -> CertificateRecord:
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
    seen: Annotated[str, Field(pattern="^([0-9a-f]{16})*$")] = ""  # the points that chose it (`hashing.py`),
    seen_all: bool = False  # whether no others chose it
    sipp: str = ""  # whose keys are those of these versions
    torch: str = ""
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


# --- `sipp eval --out` ----------------------------------------------------------------------------------------------

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


# --- `sipp bench FILE` ----------------------------------------------------------------------------------------------

BENCH_KIND: Literal["file bench"] = "file bench"
BENCH_FORMAT: Literal[2] = 2


class BenchBytes(Record):
    """Bytes of the network: in its file, dense, by the entropy bound, and in memory while it runs."""

    file: Positive
    dense: Count
    bound: float
    memory: Count
    memory_dense: Count


class BenchRun(Record):
    """Timings of dense and sparse calls with `n_points` points: medians over alternating calls."""

    n_points: Positive
    dense_ms: Milliseconds
    sparse_ms: Milliseconds
    ratio: Times  # how many times faster, and where the middle of the pairs lies
    low: Times
    high: Times
    runs_dense: bool  # torch runs all of it on both sides
    off_by: float  # of the outputs, relative to the largest

    @property
    def speed(self) -> Speed:
        """How many times faster, with its spread."""
        return Speed(self.ratio, self.low, self.high)

    @property
    def headline(self) -> str:
        """The speed in three words."""
        return speed_headline(self.speed, runs_dense=self.runs_dense)

    @property
    def words(self) -> str:
        """The speed with its spread, or why there is none."""
        return speed_words(self.speed, runs_dense=self.runs_dense)


class BenchStep(Record):
    """One step of the network with its weights, on one thread."""

    name: str
    kernel: str
    keep: float | None = None
    n_bytes: Count = 0
    n_dense_bytes: Count = 0
    dense_ms: float | None = None
    sparse_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times faster; None if torch runs it, or if it was not timed."""
        if self.kernel == "torch" or not self.dense_ms or not self.sparse_ms:
            return None
        return self.dense_ms / self.sparse_ms


class BenchRecord(Record):
    """The result of `sipp bench` for one network."""

    kind: Literal["file bench"]
    format: Literal[2]
    sipp: str
    machine: str
    n_threads: Positive
    network: str
    pruned_hash: str
    bytes: BenchBytes
    runs: Annotated[tuple[BenchRun, ...], Field(strict=False, min_length=1)]  # the fewest points first
    steps: Annotated[tuple[BenchStep, ...], Field(strict=False)]  # of the last run
    step_points: Positive  # points per call in that run
    images: str | None = None  # how images were normalised, in words; None without images
    certified: str | None = None  # what is certified for the stored values, in a few words
    line: str  # smaller, faster, certified

    @property
    def size_headline(self) -> str:
        """How many times smaller the file is than the dense values, or larger."""
        return size_headline(self.bytes.file, self.bytes.dense)

    @property
    def why_larger(self) -> str:
        """The reason why the file grew; empty if it did not."""
        return why_larger(self.bytes.file, self.bytes.dense)
