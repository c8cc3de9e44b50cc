"""The guarantees for a pruned network: rows and layers, the measured constant, the output (T4, T5-T12, T17-T19)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sipp.results import words
from sipp.results.binomial import upper_limit
from sipp.results.options import Mode
from sipp.results.sheet import shown

REFUTED_LEVEL = 1e-3  # T4's assumption is contradicted if the data has a smaller probability under it
WEIGHTS_ALONE = "this covers the weights only, not {}, which changed too"
LARGE_SHARE = 0.1  # if a statement leaves out more inputs, the text says how to do better
ENOUGH_POINTS = 64  # recommended number of points of a holdout (T19)


@dataclass(frozen=True)
@shown
class Coverage:
    """The `share` of new inputs that may exceed maxima over n inputs, at this confidence (T18)."""

    share: float
    confidence: float
    n: int  # distinct points under the maxima
    q: int  # number of maxima used together

    ALSO_IN_JSON = ("sentence",)
    MOST_SHARE = 0.5  # a statement that leaves out more than half of the inputs is not made

    @classmethod
    def of(cls, n: int, q: int, confidence: float) -> Coverage:
        """The share of new inputs that may exceed a maximum over n inputs (T18).

        It is the least d with BinCDF(q - 1; n, d) <= 1 - confidence; for q = 1, 1 - (1 - confidence)^(1/n)."""
        share = upper_limit(q - 1, n, 1.0 - confidence) if 0 < q <= n else 1.0
        return cls(share, confidence, n, q)

    @property
    def sentence(self) -> str:
        sure = words.how_sure(self.confidence)
        return f"for all but {words.percent_up(self.share)} of new inputs, {sure} (from {self.n} inputs)"


@dataclass(frozen=True)
@shown
class Guarantee:
    """Whether the conditions of the bounds on rows and layers hold, and the numbers behind them."""

    delta: float
    n: int  # distinct calibration draws
    n_needed: int  # by T4
    unit: Literal["inputs", "batches"]  # the independent draws: batches if a point's patches depend on its batch
    c_constant: float
    k_constant: float
    reason: str  # why it is not met; empty when it is
    n_weights: int  # non-zero weights
    n_never_above: int  # those whose ratio never exceeded 1/C: evidence against the assumption of T4
    layers: Coverage  # of Delta_l, for each layer separately (T18)
    left_out: str = ""  # other tensors that changed, such as biases, which the bounds do not cover

    ALSO_IN_JSON = ("met", "contradicted", "verdict", "sentence")

    @property
    def met(self) -> bool:
        return not self.reason

    @property
    def contradicted(self) -> bool:
        """Whether the data refutes the assumption, under which such a weight has probability at most exp(-n/K)."""
        if self.n_never_above == 0:
            return False
        # Markov's inequality for the number of such weights, whose expectation is at most n_weights exp(-n/K)
        return self.n_weights * math.exp(-self.n / self.k_constant) < REFUTED_LEVEL * self.n_never_above

    @property
    def verdict(self) -> str:
        """The outcome in a few words."""
        return "contradicted by the data" if self.contradicted else "met" if self.met else "not met"

    @property
    def sentence(self) -> str:
        constants = f"C={self.c_constant:g}, K={self.k_constant:g}, delta={self.delta:g}"
        if not self.contradicted:  # then more points would not help
            constants += f", n={self.n} {self.unit}, needs {self.n_needed}"
        statement = f"met ({constants})" if self.met else f"{self.verdict}: {self.reason} ({constants})"
        return statement + (f"; {WEIGHTS_ALONE.format(self.left_out)}" if self.met and self.left_out else "")


@dataclass(frozen=True)
@shown
class Measured:
    """The constant C measured on a holdout, and the bounds that follow (T19).

    Rows stay within their `eps_measured` for all but `share` of inputs, at `confidence`. Bounds for layers and the
    network also use maxima over S, so that both shares, and both error probabilities, add up.
    """

    c_constant: float | None  # None: not measured, the reason says why
    share: float
    confidence: float
    n: int  # points of the holdout, distinct from all others; C is the largest of their ratios
    reason: str
    layers_share: float = 1.0
    epsilon: float | None = None  # of the network (T12), None: no statement, the next field says why
    network_share: float = 1.0
    network_reason: str = ""
    left_out: str = ""  # other tensors that changed, such as biases, which the bounds do not cover

    ALSO_IN_JSON = ("joint_confidence", "sentence")

    @property
    def joint_confidence(self) -> float:
        """The confidence of a bound that needs two such statements at once."""
        return max(0.0, 2 * self.confidence - 1.0)

    @property
    def sentence(self) -> str:
        if self.c_constant is None:
            return f"not measured: {self.reason}"
        two = f"{words.how_sure(self.joint_confidence)} (two checks)"
        few = (
            f"Few inputs: give a holdout of {ENOUGH_POINTS} or more for a smaller share. "
            if self.share > LARGE_SHARE
            else ""
        )
        text = (
            f"{few}C = {self.c_constant:.4g}, the largest seen on {self.n} holdout inputs. For all but "
            f"{words.percent_up(self.share)} of new inputs from the same source, every row stays within its measured "
            f"eps, {words.how_sure(self.confidence)}; for all but {words.percent_up(self.layers_share)}, a layer stays "
            f"within its measured bound, {two}"
        )
        if self.left_out:
            text += f"; {WEIGHTS_ALONE.format(self.left_out)}"
        if self.epsilon is None:
            return f"{text}. There is no bound for the network: {self.network_reason}."
        share, most = words.percent_up(self.network_share), words.number_up(self.epsilon, 4)
        return f"{text}; for all but {share}, the output changes by at most {most} times its norm, {two}."


@dataclass(frozen=True)
@shown
class NetworkBound:
    """The bound on the output: ||f^(x) - f(x)|| <= epsilon ||f(x)|| for all but a share of inputs, if `met`.

    `coverage` gives the share. In mode "paper" the bound also needs T4 (`guarantee`: an assumption, and delta).
    """

    mode: Mode
    epsilon: float | None  # None: no bound can be computed, the reason says why
    delta: float | None  # of T4; None in mode "sound", which does not need it
    guarantee: Guarantee | None  # None with epsilon, and in mode "sound"
    reason: str  # why it is not met; empty when it is
    coverage: Coverage | None = None  # None with epsilon

    ALSO_IN_JSON = ("met", "sentence")

    @classmethod
    def none(cls, reason: str, delta: float | None, *, mode: Mode = "paper") -> NetworkBound:
        """A record without a bound, and the reason."""
        return cls(mode=mode, epsilon=None, delta=delta, guarantee=None, reason=reason)

    @property
    def met(self) -> bool:
        return not self.reason

    @property
    def sentence(self) -> str:
        if self.epsilon is None:
            return f"no bound: {self.reason}"
        if not self.met:  # a number without share and confidence: it promises nothing
            return f"no bound: {self.reason} (the formula gives {self.epsilon:.4g})"
        covered = self.coverage.sentence if self.coverage else ""
        statement = f"epsilon = {words.number_up(self.epsilon, 4)} ({self.mode}) {covered}"
        if self.guarantee is None:
            return f"{statement}; met, assumes only independent inputs"
        return f"{statement}; rests on an assumption: {self.guarantee.sentence}"
