"""What stands in the record of a network: of one in a run, and of one that `sipp prune` wrote. Needs no torch."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from sipp.records.certificate import from_values
from sipp.storage.run_schemas import Count, Record, plain

Numbers = Annotated[tuple[Count, ...], Field(strict=False)]  # a JSON list
# Of what may be infinite or unknown: JSON has no word for the former, and neither is a promise.
MaybeNumber = Annotated[float | None, BeforeValidator(lambda value: None if value == "inf" else value)]
MaybeText = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class AccuracyShares(Record):
    """Shares of n test points, in [0, 1]; the loss is null where it is not finite."""

    n: Count
    top1: float
    top5: float
    loss: float | None = None


class ScoreCounts(Record):
    """How many of a layer's scores, and of those it keeps, lie in each bin; `zero` counts scores that are 0."""

    zero: Count
    counts: Numbers
    kept: Numbers

    @model_validator(mode="after")
    def _equally_long(self) -> ScoreCounts:
        if len(self.counts) != len(self.kept):
            raise ValueError("'counts' and 'kept' must be equally long")
        return self


class ScoreBins(Record):
    """Where the bins of the scores lie: log10 of the first edge, their width and number."""

    low: float
    width: float
    n: Count


class LayerRecord(Record):
    """One prunable weight after pruning."""

    name: str
    n_weights: Count
    kept: Count
    dead_rows: Count = 0
    eps: MaybeNumber = None  # None: no bound, or an infinite one
    scores: ScoreCounts | None = None


class BoundRecord(Record):
    """The theory's statement about the network, before retraining."""

    epsilon: MaybeNumber = None
    delta: MaybeNumber = None
    # Met only where the record says so in so many words.
    met: Annotated[bool, BeforeValidator(lambda value: value is True)] = False
    contradicted: bool = False  # the calibration data refute the assumption; records of older runs do not say
    reason: MaybeText = ""
    words: MaybeText = ""  # the statement as a sentence, with the share of inputs it speaks of (T18)

    @property
    def holds(self) -> bool:
        """Whether it is met and gives a number: the only case in which it is a promise."""
        return self.met and self.epsilon is not None


class CertificateRecord(Record):
    """What the holdout says of the network before retraining; its numbers are computed again from its counts."""

    verdict: str | None = None  # of T14
    mode: str | None = None  # of T16
    epsilon: float | Literal["inf"] | None = None
    drop_upper: float | None = None  # of T16

    @model_validator(mode="after")
    def _follows_from_its_counts(self) -> CertificateRecord:
        if not self.is_refusal:
            from_values(plain(self))
        return self

    @property
    def is_refusal(self) -> bool:
        """Whether it only says why there is no certificate, as that of a run which could not certify."""
        return self.model_fields_set == {"verdict"} and not (self.verdict or "").startswith("certified")

    @property
    def limit(self) -> float | None:
        """The certified epsilon, None where no finite one was proved."""
        return None if self.epsilon == "inf" else self.epsilon

    @cached_property
    def sentence(self) -> str:
        """The certificate in words, which are those of its counts, whatever the file says."""
        return self.verdict or "" if self.is_refusal else from_values(plain(self)).sentence


class TriedRecord(Record):
    """One blend that was tried, and how far it moves the output, over its length; None where that is not finite."""

    name: str
    error: MaybeNumber = None
    is_taken: bool


class ChoiceRecord(Record):
    """Which blend was taken on how many points, and all that were tried (T20)."""

    words: str
    n_points: Count
    is_aside: bool  # the points were not scored
    tried: Annotated[tuple[TriedRecord, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _one_was_taken(self) -> ChoiceRecord:
        if sum(one.is_taken for one in self.tried) != 1:
            raise ValueError("'is_taken' must hold for one of 'tried'")
        return self

    @property
    def taken(self) -> TriedRecord:
        """The blend that ranked the weights."""
        return next(one for one in self.tried if one.is_taken)


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
    choice: ChoiceRecord | None = None  # of a blend; older runs do not say
    part_seconds: dict[str, float] = Field(default_factory=dict)  # by part of the stage; empty in older runs
    score_bins: ScoreBins | None = None

    @model_validator(mode="after")
    def _fits(self) -> NetworkRecord:
        if self.method is not None and "keep" not in self.model_fields_set:
            raise ValueError("'keep' is missing")
        n_bins = 0 if self.score_bins is None else self.score_bins.n
        for layer in self.layers:
            if layer.scores is not None and len(layer.scores.counts) != n_bins:
                raise ValueError(f"the scores of {layer.name!r} do not have the bins that 'score_bins' says")
        return self


# --- the record of `sipp prune` --------------------------------------------------------------------------------------


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
    """How the conditions of the theory stand; `contradicted`: the calibration data refute the assumption."""

    contradicted: bool = False


class MovedRecord(Record):
    """How far the output moved on a few calibration points, over its length; None where it is not finite."""

    error: MaybeNumber = None


class RepairedLayerRecord(Record):
    """What a repair did to one weight: the error of its layer's output before and after, on points that chose."""

    name: str
    error_before: MaybeNumber = None
    error_after: MaybeNumber = None
    left_alone: str = ""  # why it was not refitted; empty where it was


class RepairedRecord(Record):
    """What `--repair` did to the kept weights; errors are shares of the output's length.

    Those of the output are on points that chose nothing; in records of older versions, without `n_judged`, on others.
    """

    layers: Annotated[tuple[RepairedLayerRecord, ...], Field(strict=False)] = ()
    n_points: Count = 0
    n_aside: Count = 0
    n_judged: Count = 0
    output_before: MaybeNumber = None
    output_after: MaybeNumber = None
    undone: str = ""  # why all weights are as they were; empty where they are not
    words: str = ""


class PrunedRecord(Record):
    """What `sipp prune` says of the network beside it; everything else in it (versions, seeds) is kept as it is."""

    method: str
    keep: float
    kept: Count
    n_weights: Count
    dead_rows: Count
    dense_hash: str | None = None  # None: what it was pruned from is not known
    pruned_hash: str
    buffers_hash: str | None = None  # of buffers that its state_dict leaves out; None: it has none
    layers: Annotated[tuple[PrunedLayerRecord, ...], Field(strict=False, min_length=1)]
    bound: BoundRecord | None = None
    guarantee: str | None = None
    conditions: ConditionsRecord | None = None
    measured: MeasuredRecord | None = None
    moved: MovedRecord | None = None
    choice: ChoiceRecord | None = None  # of a blend; older records do not say
    repair: Annotated[bool, BeforeValidator(lambda value: value is True)] = False  # whether it was asked for
    repaired: RepairedRecord | None = None  # None: not repaired, or by a version that did not say how
    certificate: CertificateRecord | None = None
