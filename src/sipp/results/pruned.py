"""The result of `prune`: the record `Pruned`, its layers, and what is guaranteed about the network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from sipp.results.binomial import upper_limit
from sipp.results.blend import BlendChoice
from sipp.results.display import how_sure, number_up, percent_up
from sipp.results.html import text_html
from sipp.results.network_hash import tensors_hash
from sipp.results.options import Draws, Mode
from sipp.results.plots import layer_bars
from sipp.results.ranking import DrawUnit
from sipp.results.repair import Repair, Trial

REFUTED_LEVEL = 1e-3  # T4's assumption is contradicted if the data has a smaller probability under it
WEIGHTS_ALONE = "this covers the weights only, not {}, which changed too"
MOST_SHARE = 0.5  # a statement that leaves out more than half of the inputs is not made
LARGE_SHARE = 0.1  # if a statement leaves out more inputs, the text says how to do better
ENOUGH_POINTS = 256  # recommended number of points; a quarter of them is held back for T19
CHANGED = (
    "its weights or buffers changed after pruning, by training or by hand, so earlier statements no longer apply; "
    "sipp.assess(dense, pruned.model, data) and sipp.certify say what holds for them"
)
REGROWN = (
    "{name} is no longer zero where it was pruned (training without sipp.hold, or an edit), so the counts here are not "
    "those of the network; prune it again"
)


# --- What is guaranteed: rows and layers, the measured constant, the network -----------------------------------------


@dataclass(frozen=True)
class Coverage:
    """How far maxima over n points hold for new inputs (T18): for all but `share` of them, at this confidence."""

    share: float
    confidence: float
    n: int  # distinct points under the maxima
    q: int  # number of maxima used together

    def __str__(self) -> str:
        return f"for all but {percent_up(self.share)} of new inputs, {how_sure(self.confidence)} (from {self.n} inputs)"

    def _repr_html_(self) -> str:
        return text_html(str(self))


def coverage(n: int, q: int, confidence: float) -> Coverage:
    """T18: the least d with BinCDF(q - 1; n, d) <= 1 - confidence, which for q = 1 is 1 - (1 - confidence)^(1/n)."""
    share = upper_limit(q - 1, n, 1.0 - confidence) if 0 < q <= n else 1.0
    return Coverage(share, confidence, n, q)


@dataclass(frozen=True)
class Guarantee:
    """Whether the conditions of the bounds on rows and layers hold, and the numbers behind them."""

    delta: float
    n: int  # distinct calibration draws
    n_needed: int  # by T4
    unit: DrawUnit
    c_constant: float
    k_constant: float
    reason: str  # why it is not met; empty when it is
    n_weights: int  # non-zero weights
    n_never_above: int  # those whose ratio never exceeded 1/C: evidence against the assumption of T4
    layers: Coverage  # of Delta_l, for each layer separately (T18)
    left_out: str = ""  # other tensors that changed, such as biases, which the bounds do not cover

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

    def __str__(self) -> str:
        constants = f"C={self.c_constant:g}, K={self.k_constant:g}, delta={self.delta:g}"
        if not self.contradicted:  # then more points would not help
            constants += f", n={self.n} {self.unit}, needs {self.n_needed}"
        statement = f"met ({constants})" if self.met else f"{self.verdict}: {self.reason} ({constants})"
        return statement + (f"; {WEIGHTS_ALONE.format(self.left_out)}" if self.met and self.left_out else "")

    def _repr_html_(self) -> str:
        return text_html(str(self))


@dataclass(frozen=True)
class Measured:
    """T19: the constant C, measured on held-back calibration points, and bounds that need no assumption on C.

    Rows stay within their `eps_measured` for all but `share` of inputs, at `confidence`. Bounds for layers and the
    network also use maxima over S, so that both shares, and both error probabilities, add up.
    """

    c_constant: float | None  # None: not measured, the reason says why
    share: float
    confidence: float
    n: int  # held-back points, distinct from all others; C is the largest of their ratios
    reason: str
    layers_share: float = 1.0
    epsilon: float | None = None  # of the network (T12), None: no statement, the next field says why
    network_share: float = 1.0
    network_reason: str = ""
    left_out: str = ""  # other tensors that changed, such as biases, which the bounds do not cover

    @property
    def joint_confidence(self) -> float:
        """The confidence of a bound that needs two such statements at once."""
        return max(0.0, 2 * self.confidence - 1.0)

    def __str__(self) -> str:
        if self.c_constant is None:
            return f"not measured: {self.reason}"
        two = f"{how_sure(self.joint_confidence)} (two checks)"
        few = f"Few inputs: use {ENOUGH_POINTS} or more for a smaller share. " if self.share > LARGE_SHARE else ""
        text = (
            f"{few}C = {self.c_constant:.4g}, the largest seen on {self.n} held-back inputs. For all but "
            f"{percent_up(self.share)} of new inputs from the same source, every row stays within its measured eps, "
            f"{how_sure(self.confidence)}; for all but {percent_up(self.layers_share)}, a layer stays within its "
            f"measured bound, {two}"
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
    """The bound on the output: ||f^(x) - f(x)|| <= epsilon ||f(x)|| for all but a share of inputs, if `met`.

    `coverage` gives the share. In mode "paper" the bound also needs T4 (`guarantee`: an assumption, and delta).
    """

    mode: Mode
    epsilon: float | None  # None: no bound can be computed, the reason says why
    delta: float | None  # of T4; None in mode "sound", which does not need it
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
        statement = f"epsilon = {number_up(self.epsilon, 4)} ({self.mode}) {self.coverage}"
        if self.guarantee is None:
            return f"{statement}; met, assumes only independent inputs"
        return f"{statement}; rests on an assumption: {self.guarantee}"

    def _repr_html_(self) -> str:
        return text_html(str(self))


def no_bound(reason: str, delta: float | None, *, mode: Mode = "paper") -> NetworkBound:
    """A record without a bound, and the reason."""
    return NetworkBound(mode=mode, epsilon=None, delta=delta, guarantee=None, reason=reason, kappas={})


# --- The network ------------------------------------------------------------------------------------------------------


def layer_bound(eps: float | None, sign_complexity: float | None) -> float | None:
    """eps_l Delta_l of T11, or None if either is unknown."""
    if eps is None or sign_complexity is None:
        return None
    return 0.0 if eps == 0 else eps * sign_complexity  # NaN stays: the claim gets weaker, never stronger


@dataclass(frozen=True)
class PrunedLayer:
    """One prunable weight after pruning."""

    name: str
    layer_type: str
    n_rows: int
    fan_in: int
    kept: int
    strategies: dict[str, int]  # how many rows each strategy took; empty for a baseline
    dead_rows: tuple[int, ...]  # rows that had weights and have none now
    eps_F: Tensor | None  # the bound of each row (T5, T6, T9, T17)
    eps: float | None  # eps_l, the largest of them
    sign_complexity: float | None  # Delta_l
    bound: float | None  # eps_l Delta_l (T11)
    kappa: float | None  # the layer condition number (T12)
    eps_measured: float | None = None  # eps_l with the measured constant (T19)

    @property
    def bound_measured(self) -> float | None:
        """eps_l Delta_l of T11 with the measured constant."""
        return layer_bound(self.eps_measured, self.sign_complexity)

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.fan_in

    @property
    def keep(self) -> float:
        return self.kept / self.n_weights


@dataclass(frozen=True)
class OutputChange:
    """The measured change of the output: ||f^ - f|| / ||f|| over a few points together."""

    error: float  # infinite if an output is not finite
    n_points: int
    is_held_back: bool  # the points were held back; False: they were also scored, or validated a repair


@dataclass(frozen=True)
class Pruned:
    """A pruned copy of a model, its masks, and what is known about it. `print` it.

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, torch.rand(200, 8), keep=0.5)
        >>> [(layer.name, layer.n_rows, layer.fan_in) for layer in pruned.layers]
        [('0.weight', 16, 8), ('2.weight', 4, 16)]
        >>> all(bool((pruned.model.get_parameter(name)[~mask] == 0).all()) for name, mask in pruned.masks.items())
        True
    """

    model: nn.Module
    masks: dict[str, Tensor]
    layers: tuple[PrunedLayer, ...]
    guarantee: Guarantee | None  # for rows and layers (T5-T11, T17); None if nothing was scored
    bound: NetworkBound  # for the output of the network (T12, T13)
    method: str  # its name; "given": the new weights were the caller's own
    budget: int  # asked for
    kept: int  # reached: fewer if sampling had fewer weights to draw from; random with draws="fixed"
    seed: int
    draws: Draws = "until"
    measured: Measured | None = None  # bounds without T4's assumption (T19); None if nothing was scored
    choice: BlendChoice | None = None  # which blend was taken, and what was tried (T20); None for other methods
    repair: Repair | None = None  # what `repair` did; None: the values are those of the pruning
    described_hash: str = ""  # hash of the weights that this record describes; empty: they changed since
    pattern: str | None = None  # n:m along every row that was pruned; None: no pattern
    moved: OutputChange | None = None  # measured on a few calibration points; None if there were none
    seen: frozenset[str] = frozenset()  # hashes of known points that chose the weights: `certify` refuses them
    seen_all: bool = False  # whether no other points chose the weights of `described_hash`

    @property
    def n_weights(self) -> int:
        return sum(layer.n_weights for layer in self.layers)

    @property
    def keep(self) -> float:
        """The share of prunable weights that was kept."""
        return self.kept / self.n_weights

    @property
    def details(self) -> str:
        """The full text: every layer, and every statement, even a useless one."""
        from sipp.results.pruned_words import pruned_text  # which reads this record

        return pruned_text(up_to_date(self), in_full=True)

    def __str__(self) -> str:
        from sipp.results.pruned_words import pruned_text  # which reads this record

        return pruned_text(up_to_date(self))

    def __repr__(self) -> str:
        return (
            f"<Pruned {type(self.model).__name__} by {self.method}: {self.kept:,} of {self.n_weights:,} weights kept "
            f"({self.keep:.2%}), {len(self.layers)} layers; print() shows them>"
        )

    def _repr_html_(self) -> str:
        from sipp.results.pruned_words import pruned_html  # which reads this record

        return pruned_html(up_to_date(self))

    def plot(self, ax: Any = None) -> Any:
        """Draws the share of weights that each layer keeps, on `ax` or on new axes; returns the axes."""
        shares = {"kept": [100 * layer.keep for layer in self.layers]}
        return layer_bars(ax, [layer.name for layer in self.layers], shares, "weights kept (%)")


def up_to_date(pruned: Pruned) -> Pruned:
    """The record, without its statements if weights or buffers have changed since (training, an edit, BatchNorm).

    Masks and counts stay; if a pruned weight is no longer zero, the reason says so.
    """
    if tensors_hash(pruned.model) == pruned.described_hash:
        return pruned
    name = regrown_weight(pruned.model, pruned.masks)
    reason = REGROWN.format(name=name) if name else CHANGED
    return replace(without_statements(pruned, reason), described_hash="", repair=None, moved=None)


def regrown_weight(model: nn.Module, masks: Mapping[str, Tensor]) -> str:
    """The name of a weight that is not zero off its mask; empty if there is none."""
    for name, mask in masks.items():
        weight = model.get_parameter(name).detach()
        if bool((weight[~mask.to(weight.device)] != 0).any()):
            return name
    return ""


def without_statements(pruned: Pruned, reason: str) -> Pruned:
    """The record without its statements, which do not apply to the current values of `model`."""
    bound = replace(pruned.bound, epsilon=None, guarantee=None, reason=reason, kappas={}, coverage=None)
    layers = tuple(
        replace(layer, eps_F=None, eps=None, bound=None, kappa=None, eps_measured=None) for layer in pruned.layers
    )
    return replace(pruned, layers=layers, guarantee=None, bound=bound, measured=None)


@dataclass(frozen=True)
class Repaired:
    """A repaired copy of a network, the record of the repair, and the keys of the points it used."""

    model: nn.Module
    masks: dict[str, Tensor]
    record: Repair
    keys: frozenset[str]
    trials: tuple[Trial, ...]  # empty if there was nothing to choose

    @property
    def moved(self) -> OutputChange | None:
        """How far its output is from the dense one, on test points, or else on validation points."""
        record = self.record
        if record.output_after is not None:
            return OutputChange(record.output_after, record.n_test, is_held_back=True)
        if record.output_validation is not None:
            return OutputChange(record.output_validation, record.n_validation, is_held_back=False)
        return None
