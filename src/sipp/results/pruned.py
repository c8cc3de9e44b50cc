"""The result of `prune`: what is known about a pruned network, layer by layer, and what is guaranteed about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from sipp.results import hashing, words
from sipp.results.blend import BlendChoice
from sipp.results.bounds import Guarantee, Measured, NetworkBound, layer_bound
from sipp.results.jsonio import NOT_JSON
from sipp.results.options import Draws
from sipp.results.repair import Repair
from sipp.results.sheet import Sheet, Table, sheet_text, shown, without_empty

CHANGED = (
    "its weights or buffers changed after pruning, by training or by hand, so earlier statements no longer apply; "
    "sipp.assess(dense, pruned.model, data) and sipp.certify say what holds for them"
)
REGROWN = (
    "{name} is no longer zero where it was pruned (training without sipp.hold, or an edit), so the counts here are not "
    "those of the network; prune it again"
)
BOUND_COLUMNS = ("eps assumed", "eps measured", "Delta", "layer bound")  # the last with the measured eps
END_LAYERS = 4  # of the first and of the last in a table of many
_ROW_WORDS = "rows: outputs of a layer; fan-in: weights of a row before pruning"
_STRATEGY_WORDS = "det, rand, whole: rows that keep their most sensitive weights, a sample, all that mattered"
_BOUND_WORDS = (
    "eps: largest relative error of a row, with the assumed and the measured constant",
    "Delta: how much positive and negative terms cancel",
    "layer bound: eps measured x Delta",
)


@dataclass(frozen=True)
class PrunedLayer:
    """One prunable weight after pruning."""

    name: str
    layer_type: str
    n_rows: int
    fan_in: int
    kept: int
    strategies: dict[str, int]  # how many rows each strategy took; empty for a baseline
    dead_rows: int  # rows that had weights and have none now
    eps: float | None  # eps_l, the largest of them
    sign_complexity: float | None  # Delta_l
    bound: float | None  # eps_l Delta_l (T11)
    kappa: float | None  # the layer condition number (T12)
    eps_measured: float | None = None  # eps_l with the measured constant (T19)
    eps_F: Tensor | None = field(default=None, metadata=NOT_JSON)  # the bound of each row (T5, T6, T9, T17)

    ALSO_IN_JSON = ("n_weights", "keep", "bound_measured")

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
    n_inputs: int
    is_held_back: bool  # the points were held back; False: they were also scored, or validated a repair


@dataclass(frozen=True, kw_only=True)
@shown
class PrunedFacts:
    """What is known about a pruned network, without the network: what files, runs and pages hold. `print` it."""

    layers: tuple[PrunedLayer, ...]
    guarantee: Guarantee | None  # for rows and layers (T5-T11, T17); None if nothing was scored
    bound: NetworkBound  # for the output of the network (T12, T13)
    method: str  # its name; "given": the new weights were the caller's own
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
    seen: frozenset[str] = frozenset()  # hashes of known points that chose the weights: `certify` refuses them
    seen_all: bool = False  # whether no other points chose the weights of `described_hash`

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
        """How many rows had weights and have none now."""
        return sum(layer.dead_rows for layer in self.layers)

    @property
    def sheet(self) -> Sheet:
        return pruned_sheet(self)


@dataclass(frozen=True, kw_only=True)
@shown
class Pruned(PrunedFacts):
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

    model: nn.Module = field(metadata=NOT_JSON)
    masks: dict[str, Tensor] = field(metadata=NOT_JSON)

    @property
    def details(self) -> str:
        """The full text: every layer, and every statement, even a useless one."""
        return sheet_text(pruned_sheet(self, in_full=True))


def up_to_date(pruned: Pruned) -> Pruned:
    """The record, without its statements if weights or buffers have changed since (training, an edit, BatchNorm).

    Masks and counts stay; if a pruned weight is no longer zero, the reason says so.
    """
    if hashing.of_tensors(pruned.model) == pruned.described_hash:
        return pruned
    name = regrown_weight(pruned.model, pruned.masks)
    reason = REGROWN.format(name=name) if name else CHANGED
    return replace(without_statements(pruned, reason), described_hash="", repair=None, moved=None, seen_all=False)


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

    @property
    def moved(self) -> OutputChange | None:
        """How far its output is from the dense one, on test points, or else on validation points."""
        record = self.record
        if record.output_after is not None:
            return OutputChange(record.output_after, record.n_test, is_held_back=True)
        if record.output_validation is not None:
            return OutputChange(record.output_validation, record.n_validation, is_held_back=False)
        return None


# --- what it shows ----------------------------------------------------------------------------------------------------


def pruned_sheet(pruned: PrunedFacts, *, in_full: bool = False, in_shell: bool = False, certified: str = "") -> Sheet:
    """The sheet of `print(pruned)`: weights kept, what that costs (or what is `certified`), next step, and the layers.

    It is of the network as it is now. Without `in_full` (`pruned.details`) it is about a screen long; `sipp prune`
    (`in_shell`) shows all layers.
    """
    pruned = up_to_date(pruned) if isinstance(pruned, Pruned) else pruned
    facts = _summary(pruned, certified, in_full=in_full)
    facts.append(("next", next_step(pruned, in_shell=in_shell, is_certified=bool(certified))))
    bounds = in_full or has_useful_layer_bounds(pruned)
    is_short = not (in_full or in_shell) and len(pruned.layers) > 2 * END_LAYERS
    hidden = f" and the {len(pruned.layers) - 2 * END_LAYERS} layers left out here" if is_short else ""
    note = "" if in_full else f"print(pruned.details) shows every statement in full{hidden}"
    if in_shell:
        note = "--json prints every bound and statement"
    return Sheet(headline(pruned), tuple(facts), (layers_table(pruned, bounds, is_short, in_full),), note)


def headline(pruned: PrunedFacts) -> str:
    """One line: the method, and how many weights are kept."""
    pattern = "" if pruned.pattern is None else f", {pruned.pattern} along every row"
    pattern += " that was pruned" if pattern and pruned.kept > pruned.budget else ""
    return (
        f"{pruned.method}: {pruned.kept:,} of {pruned.n_weights:,} prunable weights kept ({pruned.keep:.2%}){pattern}"
    )


def layers_table(pruned: PrunedFacts, has_bounds: bool, is_short: bool = False, has_strategies: bool = False) -> Table:
    """One line per layer, without empty columns; if short, only the first and last layers."""
    ways = sorted({way for layer in pruned.layers for way in layer.strategies}) if has_strategies else []
    columns = ("weight", "rows", "fan-in", "kept", "keep", *ways, "dead rows", *(BOUND_COLUMNS if has_bounds else ()))
    labels = words.short_names([layer.name for layer in pruned.layers])
    rows = [
        (
            label,
            f"{layer.n_rows:,}",
            f"{layer.fan_in:,}",
            f"{layer.kept:,}",
            f"{layer.keep:.2%}",
            *(str(layer.strategies.get(way, 0)) for way in ways),
            str(layer.dead_rows or ""),
            *(words.number_up(value) for value in (bounds_of(layer) if has_bounds else ())),
        )
        for label, layer in zip(labels, pruned.layers)
    ]
    if is_short:
        between = (f"... {len(rows) - 2 * END_LAYERS} more", *[""] * (len(columns) - 1))
        rows = [*rows[:END_LAYERS], between, *rows[-END_LAYERS:]]
    known = has_bounds and any(value is not None for layer in pruned.layers for value in bounds_of(layer))
    text = [_ROW_WORDS, *([_STRATEGY_WORDS] if has_strategies else ()), *(_BOUND_WORDS if known else ())]
    return without_empty(Table(columns, tuple(rows), bars=("keep",), words="; ".join(text)))


def bounds_of(layer: PrunedLayer) -> tuple[float | None, ...]:
    """The values of `BOUND_COLUMNS`: eps with the assumed and the measured C, Delta, and the layer bound (T11, T19)."""
    return layer.eps, layer.eps_measured, layer.sign_complexity, layer.bound_measured


def _summary(pruned: PrunedFacts, certified: str = "", *, in_full: bool = False) -> list[tuple[str, str]]:
    """The cost (or what was `certified`), warnings, the choice, the repair, the statements: labels and texts."""
    lines = [("what it costs", certified or cost_of(pruned))]
    if warning := moved_warning(pruned):
        lines.insert(0, ("warning", warning))
    dead = [layer for layer in pruned.layers if layer.dead_rows]
    if dead:
        n_rows, names = sum(layer.dead_rows for layer in dead), [layer.name for layer in dead]
        lines.append(
            ("warning", f"{n_rows:,} rows lost all their weights, in {words.listed(names, what='more layers')}")
        )
    if pruned.kept != pruned.budget:
        why = f"but only {pruned.kept:,} weights have a positive sensitivity"
        if pruned.draws == "fixed":
            why = "but with draws='fixed' the number kept is random, and at most that on average"
        lines.append(("weights", f"{pruned.budget:,} were asked for, {why}"))
    if pruned.choice is not None:
        when = "before repair, " if pruned.repair is not None else ""
        lines.append(("chosen", f"{when}{pruned.method} picked {pruned.choice.sentence}"))
    if pruned.repair is not None:
        lines.append(("repair", pruned.repair.sentence))
    return lines + _statements(pruned, in_full=in_full)


def _statements(pruned: PrunedFacts, *, in_full: bool) -> list[tuple[str, str]]:
    """The measured bounds (T19) and those of the paper's theory.

    Unless `in_full`, only those with a bound below 1 for the network or a layer, or one line if there is none.
    """
    if pruned.guarantee is None:
        return [("statements", f"none: {pruned.bound.reason}")]
    measured_layers, paper_layers = _useful_layer_bounds(pruned)
    delta = f"; Delta of each layer holds {pruned.guarantee.layers.sentence}" if pruned.guarantee.met else ""
    statements = [
        (pruned.bound.met and _is_small(pruned.bound.epsilon), "network", pruned.bound.sentence),
        (paper_layers, "paper's theory", f"rows and layers: {pruned.guarantee.sentence}{delta}"),
    ]
    if pruned.measured is not None:
        is_useful = _is_small(pruned.measured.epsilon) or measured_layers
        statements.insert(0, (is_useful, "measured", pruned.measured.sentence))
    shown = [(label, text) for is_useful, label, text in statements if in_full or is_useful]
    return shown or [
        ("theory", f"no useful bound for this network: {_why_no_useful_bound(pruned)}; make a certificate instead")
    ]


def has_useful_layer_bounds(pruned: PrunedFacts) -> bool:
    """Whether a layer that lost weights has a bound below 1: only then are the columns of bounds shown."""
    return pruned.guarantee is not None and any(_useful_layer_bounds(pruned))


def _useful_layer_bounds(pruned: PrunedFacts) -> tuple[bool, bool]:
    """Whether a layer that lost weights has a bound below 1: a measured one, and one of the paper's theory."""
    lost = [layer for layer in pruned.layers if layer.kept < layer.n_weights]
    is_met = pruned.guarantee is not None and pruned.guarantee.met
    measured = any(_is_small(layer.bound_measured) for layer in lost)
    return measured, is_met and any(_is_small(layer.bound) for layer in lost)


def _is_small(bound: float | None) -> bool:
    """Whether an error bound is below 1: an output of zeros is within any other. NaN is not."""
    return bound is not None and bound < 1


def _why_no_useful_bound(pruned: PrunedFacts) -> str:
    """Why there is no bound below 1 on the output, in a few words."""
    candidates = [pruned.bound.epsilon] if pruned.bound.met else []
    candidates += [] if pruned.measured is None else [pruned.measured.epsilon]
    epsilons = [epsilon for epsilon in candidates if epsilon is not None]
    if epsilons:
        return f"it allows an error of {words.number(min(epsilons))} times the output"
    if pruned.guarantee is not None and not pruned.guarantee.met:
        if pruned.guarantee.contradicted:
            return "the data contradicts the theory's assumption"
        return pruned.guarantee.reason
    measured = "" if pruned.measured is None else pruned.measured.reason or pruned.measured.network_reason
    return measured or pruned.bound.reason


def moved_warning(pruned: PrunedFacts) -> str:
    """A warning if the output moved by more than half of its norm; empty if it did not, or if that is not known."""
    moved = pruned.moved
    if moved is None or moved.error <= words.LARGE_ERROR:  # NaN is warned of
        return ""
    inputs = _inputs_of(moved)
    if not math.isfinite(moved.error):
        return f"an output is not finite, or the dense output is 0, on {inputs}: check the outputs of the dense model"
    return (
        f"the output moved by {words.percent_up(moved.error)} of its norm on {inputs}: measure what that costs before "
        "you use it"
    )


def next_step(pruned: PrunedFacts, *, in_shell: bool = False, is_certified: bool = False) -> str:
    """What to do next, depending on how far the output moved."""
    if not pruned.described_hash:
        return "the weights changed: certify them with sipp.certify(model, pruned.model, new_inputs), or prune again"
    if not moved_warning(pruned):
        if is_certified:
            return "sipp eval measures accuracy, sipp report makes a page"
        if in_shell:
            return "sipp eval measures accuracy, --holdout bounds the error on new inputs, sipp report makes a page"
        return (
            "sipp.certify(model, pruned, new_inputs) bounds the error on new inputs; "
            "sipp.save(pruned, file) stores it in a small file; sipp.sparse(pruned, example) runs it faster"
        )
    if pruned.repair is not None:
        repair = "more data for the repair" if in_shell else "sipp.repair with steps= and more data"
    else:
        repair = "--repair" if in_shell else "repair=True"
    compare, keep = ("sipp compare", "--keep") if in_shell else ("sipp.compare", "keep")
    measure = "sipp.certify_accuracy(model, pruned, labelled_inputs)"
    if in_shell:
        measure = "sipp eval" if is_certified else "sipp eval and --holdout"
    costly = f"try {repair}, another method ({compare} tells you which), a larger {keep}, or training"
    return f"{measure} on new inputs; if it costs too much, {costly}"


def _inputs_of(moved: OutputChange) -> str:
    held = "held-back " if moved.is_held_back else ""
    return f"{moved.n_inputs:,} {held}calibration input{'' if moved.n_inputs == 1 else 's'}"


def cost_of(pruned: PrunedFacts) -> str:
    """The best bound on the output in plain words, or the change measured on calibration points."""
    is_dense = pruned.kept == pruned.n_weights and pruned.method != "given"  # given weights may have other values
    if is_dense and pruned.described_hash and pruned.repair is None:
        return "nothing was removed, so the output is the same."
    bounds = []
    if pruned.bound.met and pruned.bound.epsilon is not None and pruned.bound.coverage is not None:
        bounds.append((pruned.bound.epsilon, pruned.bound.coverage.share, pruned.bound.coverage.confidence))
    if pruned.measured is not None and pruned.measured.epsilon is not None:
        bounds.append((pruned.measured.epsilon, pruned.measured.network_share, pruned.measured.joint_confidence))
    if not bounds or not min(bounds)[0] < 1:
        if pruned.moved is None or moved_warning(pruned):
            return "not measured on new inputs yet."
        moved = f"{words.percent_up(pruned.moved.error)} of its norm on {_inputs_of(pruned.moved)}"
        return f"the output moved by {moved}. Nothing is guaranteed for new inputs yet."
    epsilon, share, confidence = min(bounds)
    return (
        f"the output moves by at most {words.percent_up(epsilon)} of its norm for all but {words.percent_up(share)} of "
        f"new inputs, {words.how_sure(confidence)}."
    )
