"""What pruning gives back: what is promised about a network, and the record of it with its masks and layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from sipp.records.binomial import upper_limit
from sipp.records.display import number_up, percent_up, sure
from sipp.records.html import text_html
from sipp.records.network_hash import tensors_hash
from sipp.records.options import Draws, Mode
from sipp.records.plots import layer_bars
from sipp.records.ranking import BlendChoice, DrawUnit
from sipp.records.repair import Repair

REFUTED_LEVEL = 1e-3  # T4's assumption is contradicted where what was seen has a smaller probability under it
WEIGHTS_ALONE = "this covers the weights only, not {}, which changed too"
MOST_SHARE = 0.5  # a statement about less than half of the inputs is none
LARGE_SHARE = 0.1  # of inputs that are left out: more than that, and a word says how to do better
ENOUGH_POINTS = 256  # a quarter of them is as many as are kept apart for T19
CHANGED = (
    "its weights or buffers changed after pruning, by training or by hand, so earlier statements no longer apply; "
    "sipp.assess(dense, pruned.model, data) and sipp.certify say what holds for them"
)
REGROWN = (
    "{name} is no longer zero where it was pruned (training without sipp.hold, or an edit), so the counts here are not "
    "those of the network; prune it again"
)


# --- What is promised: rows and layers, the measured constant, the network -------------------------------------------


@dataclass(frozen=True)
class Coverage:
    """What maxima over n points say about new inputs (T18): they hold for all but `share`, at this confidence."""

    share: float
    confidence: float
    n: int  # different points that the maxima were taken over
    q: int  # maxima that are used together

    def __str__(self) -> str:
        return f"for all but {percent_up(self.share)} of new inputs, {sure(self.confidence)} (from {self.n} inputs)"

    def _repr_html_(self) -> str:
        return text_html(str(self))


def coverage(n: int, q: int, confidence: float) -> Coverage:
    """T18: the least d with BinCDF(q - 1; n, d) <= 1 - confidence, which for q = 1 is 1 - (1 - confidence)^(1/n)."""
    share = upper_limit(q - 1, n, 1.0 - confidence) if 0 < q <= n else 1.0
    return Coverage(share, confidence, n, q)


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
        statement = f"met ({constants})" if self.met else f"{self.verdict}: {self.reason} ({constants})"
        return statement + (f"; {WEIGHTS_ALONE.format(self.left_out)}" if self.met and self.left_out else "")

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
        statement = f"epsilon = {number_up(self.epsilon, 4)} ({self.mode}) {self.coverage}"
        if self.guarantee is None:
            return f"{statement}; met, assumes only independent inputs"
        return f"{statement}; rests on an assumption: {self.guarantee}"

    def _repr_html_(self) -> str:
        return text_html(str(self))


def no_bound(reason: str, delta: float | None, *, mode: Mode = "paper") -> NetworkBound:
    """No bound for the network, and why."""
    return NetworkBound(mode=mode, epsilon=None, delta=delta, guarantee=None, reason=reason, kappas={})


# --- The network ------------------------------------------------------------------------------------------------------


def layer_bound(eps: float | None, sign_complexity: float | None) -> float | None:
    """eps_l Delta_l of T11, or None where either is unknown."""
    if eps is None or sign_complexity is None:
        return None
    return 0.0 if eps == 0 else eps * sign_complexity  # NaN stays: the claim gets weaker, never stronger


@dataclass(frozen=True)
class PrunedLayer:
    """What became of one weight."""

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
    """How far the network's output moved, as it was measured: ||f^ - f|| / ||f|| over a few points together."""

    error: float  # infinite where an output is not finite
    n_points: int
    aside: bool  # the points were kept aside; False: they are among those that were scored, or that chose a repair


@dataclass(frozen=True)
class Pruned:
    """A pruned copy of a model, its masks, and what can be said about it. `print` it.

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
    guarantee: Guarantee | None  # the statement about rows and layers (T5-T11, T17); None where nothing was scored
    bound: NetworkBound  # the statement about the network (T12, T13)
    method: str  # its name; "given": the new weights were the caller's own
    budget: int  # asked for
    kept: int  # reached: less where sampling had fewer weights to draw from; random with draws="fixed"
    seed: int
    draws: Draws = "until"
    measured: Measured | None = None  # the same without T4's assumption (T19); None where nothing was scored
    choice: BlendChoice | None = None  # which blend was taken, and what was tried (T20); None for other methods
    repair: Repair | None = None  # what `repair` did; None: the values are those of the pruning
    described_hash: str = ""  # the hash of the weights that all of this is about; empty: they changed since
    pattern: str | None = None  # n:m, which every row obeys that was not spared; None: weights were chosen one by one
    moved: OutputChange | None = None  # the output on a few calibration points; None where there were none to run
    seen: frozenset[bytes] = frozenset()  # keys of points that chose it, as far as known: `certify` refuses them
    seen_all: bool = False  # whether these are all that chose the weights of `described_hash`

    @property
    def n_weights(self) -> int:
        return sum(layer.n_weights for layer in self.layers)

    @property
    def keep(self) -> float:
        """The share of prunable weights that was kept."""
        return self.kept / self.n_weights

    @property
    def details(self) -> str:
        """Everything that `print` leaves out: every layer, and every statement in full, even a useless one."""
        from sipp.records.pruned_words import pruned_details  # which reads this record

        return pruned_details(up_to_date(self))

    def __str__(self) -> str:
        from sipp.records.pruned_words import pruned_table  # which reads this record

        return pruned_table(up_to_date(self))

    def __repr__(self) -> str:
        return (
            f"<Pruned {type(self.model).__name__} by {self.method}: {self.kept:,} of {self.n_weights:,} weights kept "
            f"({self.keep:.2%}), {len(self.layers)} layers; print() shows them>"
        )

    def _repr_html_(self) -> str:
        from sipp.records.pruned_words import pruned_html  # which reads this record

        return pruned_html(up_to_date(self))

    def plot(self, ax: Any = None) -> Any:
        """Draws the share of its weights that each layer keeps, on `ax` or on new axes, and gives them."""
        shares = {"kept": [100 * layer.keep for layer in self.layers]}
        return layer_bars(ax, [layer.name for layer in self.layers], shares, "weights kept (%)")


def up_to_date(pruned: Pruned) -> Pruned:
    """The record, without its statements if the weights have changed since they were made.

    Training changes weights, an edit does, or a norm that sees batches in training mode. Masks and counts stay; if a
    pruned weight is no longer zero, the reason says so.
    """
    if tensors_hash(pruned.model) == pruned.described_hash:
        return pruned
    name = regrown_weight(pruned.model, pruned.masks)
    reason = REGROWN.format(name=name) if name else CHANGED
    return replace(without_statements(pruned, reason), described_hash="", repair=None, moved=None)


def regrown_weight(model: nn.Module, masks: Mapping[str, Tensor]) -> str:
    """The name of a weight that is not zero where its mask says so; empty if there is none."""
    for name, mask in masks.items():
        weight = model.get_parameter(name).detach()
        if bool((weight[~mask.to(weight.device)] != 0).any()):
            return name
    return ""


def without_statements(pruned: Pruned, reason: str) -> Pruned:
    """The record without its statements, which were about other values than those that `model` has."""
    bound = replace(pruned.bound, epsilon=None, guarantee=None, reason=reason, kappas={}, coverage=None)
    layers = tuple(
        replace(layer, eps_F=None, eps=None, bound=None, kappa=None, eps_measured=None) for layer in pruned.layers
    )
    return replace(pruned, layers=layers, guarantee=None, bound=bound, measured=None)


@dataclass(frozen=True)
class Repaired:
    """A repaired copy of a network, what was done, and the points it was done with."""

    model: nn.Module
    masks: dict[str, Tensor]
    record: Repair
    keys: frozenset[bytes]

    @property
    def moved(self) -> OutputChange | None:
        """How far its output is from the dense one: on points that only judge, or else on those that chose."""
        done = self.record
        if done.output_after is not None:
            return OutputChange(done.output_after, done.n_judged, aside=True)
        return None if done.output_chosen is None else OutputChange(done.output_chosen, done.n_aside, aside=False)
