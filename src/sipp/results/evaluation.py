"""What `evaluate` measures of a dense and a pruned network on the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

from sipp.results import words
from sipp.results.accuracy import Accuracy
from sipp.results.sheet import Sheet, shown
from sipp.results.text_scores import TextScores

EVALUATION_KIND = "evaluation"


@dataclass(frozen=True)
@shown
class Evaluation:
    """Accuracy of a dense and a pruned network on the same inputs, and how far their outputs differ. `print` it."""

    n_inputs: int
    dense: Accuracy | None  # None: no classes, or no labels
    pruned: Accuracy | None
    same_class: float | None  # share of inputs with the same predicted class
    error_mean: float  # of ||f^ - f|| / ||f||; infinite if an output is not finite
    error_median: float
    error_max: float
    n_not_finite: int = 0  # inputs with an output that is not finite, or a dense output of 0 that changed
    why_no_accuracy: str = ""  # why labels could not be used; empty if they could or there are none
    data_hash: str = ""  # of the set of inputs, as in certificates
    dense_hash: str = ""
    pruned_hash: str = ""
    inputs: str = ""  # what they are, in words

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """Accuracy of the dense and of the pruned network; None without labels or classes."""
        return None if self.dense is None or self.pruned is None else (self.dense.top1, self.pruned.top1)

    @property
    def error(self) -> float | None:
        """The mean relative error of the output; None if an output is not finite."""
        return None if self.n_not_finite else self.error_mean

    @property
    def sheet(self) -> Sheet:
        if self.accuracies is not None:
            dense, pruned = self.accuracies
            title = f"accuracy {pruned:.2%} after pruning, {dense:.2%} before"
        elif self.n_not_finite:
            title = f"an output is not finite on {words.counted(self.n_not_finite, 'input')}"
        else:
            title = f"the output moved by {words.percent_up(self.error_mean)} of its norm on average"
        return Sheet(title, tuple(_facts(self)))


def _facts(measured: Evaluation) -> list[tuple[str, str]]:
    facts = [("inputs", f"{measured.n_inputs:,}")]
    if measured.dense is not None and measured.pruned is not None:
        dense, pruned = measured.dense, measured.pruned
        change = f"{100 * (pruned.top1 - dense.top1):+.2f} percentage points"
        facts.append(("accuracy", f"{pruned.top1:.2%} pruned, {dense.top1:.2%} dense ({change})"))
        facts.append(("loss", f"{pruned.loss:.4g} pruned, {dense.loss:.4g} dense (cross-entropy)"))
    if measured.why_no_accuracy:
        facts.append(("accuracy", f"not measured: {measured.why_no_accuracy}"))
    if measured.same_class is not None:
        facts.append(("same class", f"{measured.same_class:.2%} of inputs"))
    if measured.n_not_finite:
        facts.append(("epsilon", f"not finite on {measured.n_not_finite:,} of {measured.n_inputs:,} inputs"))
    else:
        errors = (("mean", measured.error_mean), ("median", measured.error_median), ("largest", measured.error_max))
        words = ", ".join(f"{error:.4g} {name}" for name, error in errors)
        facts.append(("epsilon", f"{words} (how far the output moved, relative to its norm)"))
    return facts


AnyEvaluation = Evaluation | TextScores  # what `sipp eval` writes
