"""The results of `evaluate` and `perplexity`: a dense and a pruned network on the same inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sipp.results import words
from sipp.results.sheet import Sheet, shown


@dataclass(frozen=True)
@shown
class Evaluation:
    """Accuracy of a dense and a pruned network on the same inputs, and how far their outputs differ. `print` it."""

    n_inputs: int
    accuracies: tuple[float, float] | None  # dense and pruned; None: no classes, or no labels
    losses: tuple[float, float] | None  # cross-entropy, dense and pruned
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
            title = f"the output error is {words.percent_up(self.error_mean)} on average"
        return Sheet(title, tuple(_facts(self)))


def _facts(measured: Evaluation) -> list[tuple[str, str]]:
    facts = [("inputs", measured.inputs or f"{measured.n_inputs:,}")]
    if measured.accuracies is not None and measured.losses is not None:
        dense, pruned = measured.accuracies
        change = f"{100 * (pruned - dense):+.2f} percentage points"
        facts.append(("accuracy", f"{pruned:.2%} pruned, {dense:.2%} dense ({change})"))
        dense, pruned = measured.losses
        facts.append(("loss", f"{pruned:.4g} pruned, {dense:.4g} dense (cross-entropy)"))
    if measured.why_no_accuracy:
        facts.append(("accuracy", f"not measured: {measured.why_no_accuracy}"))
    if measured.same_class is not None:
        facts.append(("same class", f"{measured.same_class:.2%} of inputs"))
    if measured.n_not_finite:
        facts.append(("epsilon", f"not finite on {measured.n_not_finite:,} of {measured.n_inputs:,} inputs"))
    else:
        errors = (("mean", measured.error_mean), ("median", measured.error_median), ("largest", measured.error_max))
        words = ", ".join(f"{error:.4g} {name}" for name, error in errors)
        facts.append(("epsilon", f"{words} (change of the output, relative to its norm)"))
    return facts


@dataclass(frozen=True)
@shown
class TextScores:
    """Perplexity on a text, and the distance of a pruned network from the dense one. `print` it.

    Measured on this text; for a claim about other texts, use `certify`.
    """

    n_windows: int
    window: int  # tokens of the longest; windows do not overlap, so the stride is as long
    n_tokens: int  # that were predicted: all but the first of each window
    loss: float  # mean -log p(token), in nats
    dense_loss: float | None  # of the dense network, as the two below; None: none was given
    kl: float | None  # mean KL(dense || this) of the next token's distribution, in nats a token
    same_token: float | None  # the share of positions at which both choose the same next token
    data_hash: str = ""  # of the set of windows
    dense_hash: str = ""  # empty: none was given
    pruned_hash: str = ""
    inputs: str = ""  # what the windows are, in words

    ALSO_IN_JSON = ("perplexity", "dense_perplexity")

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def dense_perplexity(self) -> float | None:
        return None if self.dense_loss is None else _exp(self.dense_loss)

    @property
    def sheet(self) -> Sheet:
        beside = "" if self.dense_perplexity is None else f", dense {self.dense_perplexity:.2f}"
        windows = f"{self.n_windows:,} windows of {self.window:,} tokens that do not overlap"
        facts = [("inputs", self.inputs)] if self.inputs else []
        facts.append(("over", f"{windows}, {self.n_tokens:,} tokens predicted"))
        if self.kl is not None and self.same_token is not None:
            facts.append(("KL", f"{self.kl:.4g} nats per token from the dense network"))
            facts.append(("same next token", f"{self.same_token:.2%} of positions"))
        return Sheet(f"perplexity {self.perplexity:.2f}{beside}", tuple(facts))


def _exp(loss: float) -> float:
    """The perplexity exp(loss), or infinity if that overflows or the loss is not finite."""
    return math.exp(loss) if loss < math.log(2.0) * 1023 else math.inf
