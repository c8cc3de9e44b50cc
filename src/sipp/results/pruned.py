"""The result of `prune`: the pruned network, its layers, and the guarantees for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from sipp.results import hashing, words
from sipp.results.blend import BlendChoice
from sipp.results.bounds import Guarantee, Measured, NetworkBound
from sipp.results.jsonio import NOT_JSON
from sipp.results.options import GIVEN, Draws
from sipp.results.repair import Repair
from sipp.results.sheet import PERCENT, Entry, Sheet, Table, shown, without_empty

CHANGED = (
    "its weights or buffers changed after pruning, by training or by hand, so earlier bounds no longer apply; "
    "call sipp.assess(dense, pruned.model, data) and sipp.certify again"
)
REGROWN = (
    "{} is no longer zero where it was pruned (training without sipp.hold, or an edit), so the counts here are not "
    "those of the network; prune it again"
)
OF_LAYERS = ("measured", "rows and layers")  # statements about layers, too
BOUND_COLUMNS = ("eps assumed", "eps measured", "Delta", "layer bound")  # the last with the measured eps
END_LAYERS = 4  # of the first and of the last in a table of many
ROW_WORDS = "rows: outputs of a layer; fan-in: weights of a row before pruning"
STRATEGY_WORDS = "det, rand, whole: rows that keep their most sensitive weights, a sample, all that mattered"
BOUND_WORDS = (
    "eps: largest relative error of a row, with the assumed and the measured constant; Delta: how much positive and "
    "negative terms cancel; layer bound: eps measured x Delta"
)
_NO_MODEL: Any = None


@dataclass(frozen=True)
class SeenInputs:
    """The inputs that are known to have chosen something, by their hashes; `|` joins what two stages read.

    By default nobody said which inputs did.
    """

    hashes: frozenset[str] = frozenset()  # one SHA-256 an input
    is_all: bool = False  # whether no other inputs did

    def __or__(self, other: SeenInputs) -> SeenInputs:
        return SeenInputs(self.hashes | other.hashes, self.is_all and other.is_all)


@dataclass(frozen=True)
class PrunedLayer:
    """One prunable weight tensor after pruning."""

    name: str
    layer_type: str
    n_rows: int
    fan_in: int
    kept: int
    strategies: dict[str, int]  # how many rows each strategy took; empty unless sensitivities alone chose them
    dead_rows: int  # rows that had weights and have none now
    eps: float | None  # eps_l, the largest of them
    sign_complexity: float | None  # Delta_l
    kappa: float | None  # the layer condition number (T12)
    eps_measured: float | None = None  # eps_l with the measured constant (T19)
    eps_F: Tensor | None = field(default=None, metadata=NOT_JSON)  # the bound of each row (T5, T6, T9, T17)

    ALSO_IN_JSON = ("n_weights", "keep", "bound", "bound_measured")

    @property
    def bound(self) -> float | None:
        """The bound on the output of the layer: eps_l Delta_l (T11)."""
        return _product(self.eps, self.sign_complexity)

    @property
    def bound_measured(self) -> float | None:
        """The same bound with the measured constant (T11, T19)."""
        return _product(self.eps_measured, self.sign_complexity)

    @property
    def n_weights(self) -> int:
        return self.n_rows * self.fan_in

    @property
    def keep(self) -> float:
        return self.kept / self.n_weights


def _product(eps: float | None, sign_complexity: float | None) -> float | None:
    """Their product, or None if either is unknown."""
    if eps is None or sign_complexity is None:
        return None
    return 0.0 if eps == 0 else eps * sign_complexity  # NaN stays: the claim gets weaker, never stronger


@dataclass(frozen=True)
class OutputChange:
    """The measured change of the output: ||f^ - f|| / ||f|| over a few inputs together."""

    error: float  # infinite if an output is not finite
    n_inputs: int
    is_held_back: bool  # the points were held back; False: they were also scored, or validated a repair

    @property
    def inputs(self) -> str:
        """The inputs in words."""
        return words.counted(self.n_inputs, f"{'held-back ' if self.is_held_back else ''}calibration input")


@dataclass(frozen=True)
class Statement:
    """A bound of the theory as text, and whether it is useful: an output of zeros is within a useless one."""

    label: str
    sentence: str
    is_useful: bool


@dataclass(frozen=True, kw_only=True)
@shown
class Pruned:
    """A pruned copy of a model, its masks, its layers and its guarantees. `print` it.

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

    model: nn.Module = field(default=_NO_MODEL, metadata=NOT_JSON)  # None in a record that was read from a file
    masks: dict[str, Tensor] = field(default_factory=dict, metadata=NOT_JSON)
    layers: tuple[PrunedLayer, ...]
    guarantee: Guarantee | None  # for rows and layers (T5-T11, T17); None if nothing was scored
    bound: NetworkBound  # for the output of the network (T12, T13)
    method: str  # its name; GIVEN: the new weights were the caller's own
    budget: int  # asked for
    kept: int  # reached: fewer if sampling had fewer weights to draw from; random with draws="fixed"
    seed: int
    draws: Draws = "until"
    measured: Measured | None = None  # bounds without T4's assumption (T19); None without a holdout
    choice: BlendChoice | None = None  # which blend was taken, and what was tried (T20); None for other methods
    repair: Repair | None = None  # what `repair` did; None: the values are those of the pruning
    described_hash: str = ""  # hash of the weights that this record describes; empty: they changed since
    pattern: str | None = None  # n:m along every row that was pruned; None: no pattern
    moved: OutputChange | None = None  # measured on a few calibration points; None if there were none
    seen: SeenInputs = SeenInputs()  # inputs that chose the weights of `described_hash`

    ALSO_IN_JSON = ("n_weights", "keep", "dead_rows")

    @property
    def n_weights(self) -> int:
        return sum(layer.n_weights for layer in self.layers)

    @property
    def keep(self) -> float:
        """The share of prunable weights that was kept."""
        return self.kept / self.n_weights

    @property
    def dead_rows(self) -> int:
        """How many neurons and filters lost all their weights."""
        return sum(layer.dead_rows for layer in self.layers)

    @property
    def up_to_date(self) -> Pruned:
        """The record, without its bounds if weights or buffers changed since (training, an edit, BatchNorm)."""
        if self.model is None or hashing.of_model(self.model) == self.described_hash:
            return self
        return self.without_statements(REGROWN.format(self.regrown) if self.regrown else CHANGED)

    def without_statements(self, reason: str) -> Pruned:
        """The record without its bounds on the weights of `model`; masks and counts stay."""
        layers = tuple(replace(layer, eps_F=None, eps=None, kappa=None, eps_measured=None) for layer in self.layers)
        bound = replace(self.bound, epsilon=None, guarantee=None, reason=reason, coverage=None)
        return replace(
            self, layers=layers, bound=bound, guarantee=None, measured=None, repair=None, moved=None, described_hash="",
            seen=self.seen | SeenInputs(),
        )  # fmt: skip

    @property
    def for_a_file(self) -> Pruned:
        """The record as it is now, without the network, and without the inputs that chose it."""
        return replace(self.up_to_date, model=_NO_MODEL, masks={}, seen=SeenInputs())

    @property
    def regrown(self) -> str:
        """The name of a weight that is not zero off its mask; empty if there is none."""
        for name, mask in self.masks.items():
            weight = self.model.get_parameter(name).detach()
            if bool((weight[~mask.to(weight.device)] != 0).any()):
                return name
        return ""

    @property
    def headline(self) -> str:
        """One line: the method, and how many weights are kept."""
        pattern = "" if self.pattern is None else f", {self.pattern} along every row"
        return f"{self.method}: {self.kept:,} of {self.n_weights:,} prunable weights kept ({self.keep:.2%}){pattern}"

    @property
    def warning(self) -> str:
        """A warning if the output changed by more than half of its norm; empty if not, or if that is unknown."""
        moved = self.moved
        if moved is None or moved.error <= words.LARGE_ERROR:  # NaN is warned of
            return ""
        if not math.isfinite(moved.error):
            check = "check the outputs of the dense model"
            return f"an output is not finite, or the dense output is 0, on {moved.inputs}: {check}"
        return f"output error {words.percent_up(moved.error)} on {moved.inputs}: measure the accuracy before you use it"

    @property
    def cost(self) -> str:
        """The best bound on the output in plain words, or the change measured on calibration inputs."""
        is_dense = self.kept == self.n_weights and self.method != GIVEN  # given weights may have other values
        if is_dense and self.described_hash and self.repair is None:
            return "nothing was removed, so the output is the same."
        bound, measured, bounds = self.bound, self.measured, list[tuple[float, float, float]]()
        if bound.met and bound.epsilon is not None and bound.coverage is not None:
            bounds.append((bound.epsilon, bound.coverage.share, bound.coverage.confidence))
        if measured is not None and measured.epsilon is not None:
            bounds.append((measured.epsilon, measured.network_share, measured.joint_confidence))
        if bounds and min(bounds)[0] < 1:
            epsilon, share, confidence = min(bounds)
            return (
                f"the output changes by at most {words.percent_up(epsilon)} of its norm for all but "
                f"{words.percent_up(share)} of new inputs, {words.how_sure(confidence)}."
            )
        if self.moved is None or self.warning:
            return "not measured on new inputs yet."
        moved = f"{words.percent_up(self.moved.error)} of the output's norm on {self.moved.inputs}"
        return f"{moved}. No guarantee for new inputs yet."

    @property
    def statements(self) -> tuple[Statement, ...]:
        """The theory's bounds in words. Useful are those below 1 on the output, or on a layer that lost weights."""
        guarantee, measured, bound = self.guarantee, self.measured, self.bound
        lost = [layer for layer in self.layers if layer.kept < layer.n_weights]
        made = []
        if measured is not None:
            is_useful = _is_small(measured.epsilon, *(layer.bound_measured for layer in lost))
            made.append(Statement("measured", measured.sentence, is_useful))
        made.append(Statement("network", bound.sentence, bound.met and _is_small(bound.epsilon)))
        if guarantee is not None:
            delta = f"; Delta of each layer holds {guarantee.layers.sentence}" if guarantee.met else ""
            is_useful = guarantee.met and _is_small(*(layer.bound for layer in lost))
            made.append(Statement("rows and layers", guarantee.sentence + delta, is_useful))
        return tuple(made)

    def facts(self, *, in_full: bool = False, certified: str = "") -> list[tuple[str, str]]:
        """The printed facts, but for the layers and the next step; `certified` takes the place of the error.

        Unless `in_full`, only bounds that say something are shown, or why none does.
        """
        facts = [
            ("warning", self.warning),
            ("error", certified or self.cost),
            ("warning", _dead_words(self)),
            ("weights", _beside_budget(self)),
            ("chosen", _choice_words(self)),
            ("repair", "" if self.repair is None else self.repair.sentence),
        ]
        shown = [(one.label, one.sentence) for one in self.statements if in_full or one.is_useful]
        facts += shown or [("theory", _why_nothing_is_shown(self))]
        return [(label, text) for label, text in facts if text]

    def layers_table(self, *, in_full: bool = False, is_short: bool = False) -> Table:
        """One line per layer, without empty columns; if short, only the first and last of many layers."""
        has_bounds = in_full or any(one.is_useful for one in self.statements if one.label in OF_LAYERS)
        ways = sorted({way for layer in self.layers for way in layer.strategies}) if in_full else []
        columns = ("weight", "rows", "fan-in", "kept", "keep", *ways, "dead rows")
        columns += BOUND_COLUMNS if has_bounds else ()
        rows: list[tuple[Entry, ...]] = []
        for layer in self.layers:
            bounds = (layer.eps, layer.eps_measured, layer.sign_complexity, layer.bound_measured) if has_bounds else ()
            counts = (layer.n_rows, layer.fan_in, layer.kept, layer.keep)
            taken = (layer.strategies.get(way, 0) for way in ways)
            rows.append((layer.name, *counts, *taken, layer.dead_rows or None, *bounds))
        if is_short and len(rows) > 2 * END_LAYERS:
            between = (f"... {len(rows) - 2 * END_LAYERS} more", *[None] * (len(columns) - 1))
            rows = [*rows[:END_LAYERS], between, *rows[-END_LAYERS:]]
        forms = {"keep": PERCENT} | dict.fromkeys(BOUND_COLUMNS, words.number_up)
        table = without_empty(Table(columns, tuple(rows), bars=("keep",), forms=forms))
        text = [ROW_WORDS, *([STRATEGY_WORDS] if ways else ())]
        text += [BOUND_WORDS] if set(BOUND_COLUMNS) & set(table.columns) else []
        return replace(table, words="; ".join(text))

    @property
    def sheet(self) -> Sheet:
        n_hidden, now = len(self.layers) - 2 * END_LAYERS, self.up_to_date
        hidden = f" and the {n_hidden} layers left out here" if n_hidden > 0 else ""
        note = f"print(pruned.details) shows every bound in full{hidden}"
        facts = [*now.facts(), ("next", _next_step(now))]
        return Sheet(now.headline, tuple(facts), (now.layers_table(is_short=True),), note)

    @property
    def details(self) -> str:
        """The full text: every layer, and every bound, even a useless one."""
        now = self.up_to_date
        facts = [*now.facts(in_full=True), ("next", _next_step(now))]
        return str(Sheet(now.headline, tuple(facts), (now.layers_table(in_full=True),)))


# --- its words --------------------------------------------------------------------------------------------------------


def _dead_words(pruned: Pruned) -> str:
    names = [layer.name for layer in pruned.layers if layer.dead_rows]
    where = words.listed(names, what="more layers")
    return f"{pruned.dead_rows:,} neurons or filters lost all their weights, in {where}" if names else ""


def _beside_budget(pruned: Pruned) -> str:
    """Why fewer weights are kept than were asked for."""
    if pruned.kept == pruned.budget:
        return ""
    why = f"but only {pruned.kept:,} weights have a positive sensitivity"
    if pruned.draws == "fixed":
        why = "but with draws='fixed' the number kept is random, and at most that on average"
    return f"{pruned.budget:,} were asked for, {why}"


def _choice_words(pruned: Pruned) -> str:
    when = "before repair, " if pruned.repair is not None else ""
    return "" if pruned.choice is None else f"{when}{pruned.method} picked {pruned.choice.sentence}"


def _is_small(*bounds: float | None) -> bool:
    """Whether one of these error bounds is below 1: an output of zeros is within any other. NaN is not."""
    return any(bound is not None and bound < 1 for bound in bounds)


def _why_nothing_is_shown(pruned: Pruned) -> str:
    """The reason why there is no useful bound."""
    if pruned.guarantee is None:
        return f"no statements: {pruned.bound.reason}"
    why = _why_no_useful_bound(pruned, pruned.guarantee)
    return f"no useful bound for this network: {why}; make a certificate instead"


def _why_no_useful_bound(pruned: Pruned, guarantee: Guarantee) -> str:
    """Why there is no bound below 1 on the output, in a few words."""
    measured = pruned.measured
    found = [pruned.bound.epsilon if pruned.bound.met else None, None if measured is None else measured.epsilon]
    if epsilons := [epsilon for epsilon in found if epsilon is not None]:
        return f"it allows an error of {words.number(min(epsilons))} times the output"
    if not guarantee.met:
        return "the data contradicts the theory's assumption" if guarantee.contradicted else guarantee.reason
    return (measured.reason or measured.network_reason if measured is not None else "") or pruned.bound.reason


def _next_step(pruned: Pruned) -> str:
    """The next step to take, depending on the change of the output."""
    if not pruned.described_hash:
        return "the weights changed: certify them with sipp.certify(model, pruned.model, new_inputs), or prune again"
    if not pruned.warning:
        return (
            "sipp.certify(model, pruned, new_inputs) bounds the error on new inputs; "
            "sipp.save(pruned, file) stores it in a small file; sipp.sparse(pruned, example) runs it faster"
        )
    return (
        "sipp.certify_accuracy(model, pruned, labelled_inputs) on new inputs; "
        f"if too much is lost, {ways_to_lose_less(pruned)}"
    )


def ways_to_lose_less(pruned: Pruned, *, in_shell: bool = False) -> str:
    """What to try if too much is lost, in Python or in the shell."""
    repair, compare, keep = "repair=True", "sipp.compare", "keep"
    if in_shell:
        repair, compare, keep = "--repair", "sipp compare", "--keep"
    if pruned.repair is not None:
        repair = "more data for the repair"
    return f"try {repair}, another method ({compare} tells you which), a larger {keep}, or training"
