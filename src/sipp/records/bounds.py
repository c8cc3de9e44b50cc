"""What is promised about a pruned network: rows and layers, the measured constant, the network."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sipp.records.display import number_up, percent_up, sure
from sipp.records.html import text_html
from sipp.records.options import Mode
from sipp.records.ranking import DrawUnit

REFUTED_LEVEL = 1e-3  # T4's assumption is contradicted where what was seen has a smaller probability under it
WEIGHTS_ALONE = "this covers the weights only, not {}, which changed too"
LARGE_SHARE = 0.1  # of inputs that are left out: more than that, and a word says how to do better
ENOUGH_POINTS = 256  # a quarter of them is as many as are kept apart for T19


@dataclass(frozen=True)
class Coverage:
    """How far maxima over n points speak of new inputs (T18): for all but `share` of them, at this confidence."""

    share: float
    confidence: float
    n: int  # different points that the maxima were taken over
    q: int  # maxima that are used together

    def __str__(self) -> str:
        return f"for all but {percent_up(self.share)} of new inputs, {sure(self.confidence)} (from {self.n} inputs)"

    def _repr_html_(self) -> str:
        return text_html(str(self))


@dataclass(frozen=True)
class Guarantee:
    """Whether the conditions of the statements about rows and layers hold, and the numbers they rest on."""

    delta: float
    n: int  # different calibration draws
    n_needed: int  # by T4
    unit: DrawUnit
    c_constant: float
    k_constant: float
    reason: str  # why it is not met; empty when it is
    n_weights: int  # that are not zero
    n_never_above: int  # of them, those whose ratio never exceeded 1/C: each speaks against the assumption of T4
    layers: Coverage  # of Delta_l, for each layer by itself (T18)
    left_out: str = ""  # what changed beside the weights, such as biases: no sum of a row has it

    @property
    def met(self) -> bool:
        return not self.reason

    @property
    def contradicted(self) -> bool:
        """Whether the data refutes the assumption: were it true, such a weight had a chance of exp(-n/K) at most."""
        if self.n_never_above == 0:
            return False
        # of n_weights so many would be expected at most, and by Markov's inequality as many as there are is as unlikely
        return self.n_weights * math.exp(-self.n / self.k_constant) < REFUTED_LEVEL * self.n_never_above

    @property
    def verdict(self) -> str:
        """In a word or a few."""
        return "contradicted by the data" if self.contradicted else "met" if self.met else "not met"

    def __str__(self) -> str:
        constants = f"C={self.c_constant:g}, K={self.k_constant:g}, delta={self.delta:g}"
        if not self.contradicted:  # then more points would not help
            constants += f", n={self.n} {self.unit}, needs {self.n_needed}"
        found = f"met ({constants})" if self.met else f"{self.verdict}: {self.reason} ({constants})"
        return found + (f"; {WEIGHTS_ALONE.format(self.left_out)}" if self.met and self.left_out else "")

    def _repr_html_(self) -> str:
        return text_html(str(self))


@dataclass(frozen=True)
class Measured:
    """T19: the constant C measured on calibration points that were kept apart, and what it says, without assumption.

    Rows keep to their `eps_measured` for all but `share` of inputs at `confidence`; layers and the network rest on
    maxima over S as well, so that for them both shares, and both chances of error, add up.
    """

    c_constant: float | None  # None: not measured, the reason says why
    share: float
    confidence: float
    n: int  # points kept apart, different from all others: the constant is the largest of their ratios
    reason: str
    layers_share: float = 1.0
    epsilon: float | None = None  # of the network (T12), None: no statement, the next field says why
    network_share: float = 1.0
    network_reason: str = ""
    left_out: str = ""  # what changed beside the weights, such as biases: no sum of a row has it

    @property
    def joint_confidence(self) -> float:
        """Of what rests on two such statements at once."""
        return max(0.0, 2 * self.confidence - 1.0)

    def __str__(self) -> str:
        if self.c_constant is None:
            return f"not measured: {self.reason}"
        two = f"{sure(self.joint_confidence)} (two checks)"
        few = f"Few inputs: use {ENOUGH_POINTS} or more for a smaller share. " if self.share > LARGE_SHARE else ""
        text = (
            f"{few}C = {self.c_constant:.4g}, the largest seen on {self.n} held-back inputs. For all but "
            f"{percent_up(self.share)} of new inputs from the same source, every row stays within its measured eps, "
            f"{sure(self.confidence)}; for all but {percent_up(self.layers_share)}, a layer stays within its measured "
            f"bound, {two}"
        )
        if self.left_out:
            text += f"; {WEIGHTS_ALONE.format(self.left_out)}"
        if self.epsilon is None:
            return f"{text}. There is no bound for the network: {self.network_reason}."
        share, most = percent_up(self.network_share), number_up(self.epsilon, 4)
        return f"{text}; for all but {share}, the output moves by at most {most} times its norm, {two}."

    def _repr_html_(self) -> str:
        return text_html(str(self))


@dataclass(frozen=True)
class NetworkBound:
    """The network statement: ||f^(x) - f(x)|| <= epsilon ||f(x)|| for all but a share of inputs (`coverage`), if `met`.

    In mode "paper" it also rests on T4 (`guarantee`: an assumption, and a failure probability delta).
    """

    mode: Mode
    epsilon: float | None  # None: no bound can be computed, the reason says why
    delta: float | None  # of T4; None in mode "sound", which does not rest on it
    guarantee: Guarantee | None  # None with epsilon, and in mode "sound"
    reason: str  # why it is not met; empty when it is
    kappas: dict[str, float]  # layer condition numbers by weight name
    coverage: Coverage | None = None  # None with epsilon

    @property
    def met(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"no bound: {self.reason}"
        if not self.met:  # a number without share and confidence: it promises nothing
            return f"no bound: {self.reason} (the formula gives {self.epsilon:.4g})"
        found = f"epsilon = {number_up(self.epsilon, 4)} ({self.mode}) {self.coverage}"
        if self.guarantee is None:
            return f"{found}; met, assumes only independent inputs"
        return f"{found}; rests on an assumption: {self.guarantee}"

    def _repr_html_(self) -> str:
        return text_html(str(self))


def no_bound(reason: str, delta: float | None, *, mode: Mode = "paper") -> NetworkBound:
    """The absence of a network statement, and why."""
    return NetworkBound(mode=mode, epsilon=None, delta=delta, guarantee=None, reason=reason, kappas={})
