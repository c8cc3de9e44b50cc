"""What is promised for a pruned network: layers (T11), the network (T12), and whether the conditions are met (T4).

T11  ||Z^ - Z|| <= eps_l Delta_l ||Z||,    eps_l = max over the layer's rows of eps_i
T12  ||f^(x) - f(x)|| <= eps ||f(x)||,     eps = sum_l kappa_l Delta_l eps_l,
     kappa_l = max over S of (prod_{k > l} Lip_k) ||Z_l(x)|| / ||f(x)||
Mode "paper" takes Lip_k = ||W_k||_F as the source does. That bounds a chain of fully-connected layers with 1-Lipschitz
activations; it is not a bound for convolutions (errata 6), residual connections or norms (errata 7), and says so.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sipp.errors import OptionError
from sipp.numerics import BOUND_DTYPE
from sipp.records import LayerScores, Scores
from sipp.sample_size import NETWORK_FACTOR, PRUNE_FACTOR, points_needed

Mode = Literal["paper", "sound"]

# Modules and functions that keep ||difference|| from growing, coordinate by coordinate or by moving it around.
_ONE_LIPSCHITZ = (
    nn.ReLU,
    nn.ReLU6,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardtanh,
    nn.Hardsigmoid,
    nn.Softmax,
    nn.Softplus,
    nn.Softsign,
)
_MOVES = (nn.Flatten, nn.Identity, nn.Dropout, nn.Unflatten)
_FUNCTIONS = {torch.relu, F.relu, torch.tanh, F.tanh, torch.sigmoid, F.sigmoid, torch.flatten, F.dropout, torch.reshape}
_METHODS = {"relu", "tanh", "sigmoid", "flatten", "view", "reshape", "contiguous"}
_SHAPES = {"size", "shape", "dim"}


@dataclass(frozen=True)
class Guarantee:
    """Whether the conditions of a statement hold, and the numbers they rest on."""

    delta: float
    n: int  # calibration draws used
    n_needed: int  # by T4
    unit: Literal["points", "batches"]
    c_constant: float
    k_constant: float
    reason: str  # why it is not met; empty when it is

    @property
    def met(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        constants = f"delta={self.delta:g}, C={self.c_constant:g}, K={self.k_constant:g}"
        base = f"{constants}, n={self.n} {self.unit}, needs {self.n_needed}"
        return f"met ({base})" if self.met else f"not met: {self.reason} ({base})"


@dataclass(frozen=True)
class NetworkBound:
    """The network statement: ||f^(x) - f(x)|| <= epsilon ||f(x)|| with probability 1 - delta, if `guarantee` is met."""

    mode: Mode
    epsilon: float | None  # None: no bound can be computed, the reason says why
    delta: float
    guarantee: Guarantee | None  # None with epsilon
    reason: str  # why it is not met; empty when it is
    kappas: dict[str, float]  # layer condition numbers by weight name

    @property
    def met(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"none; {self.reason}"
        return f"epsilon = {self.epsilon:.4g} ({self.mode}); {self.guarantee}"


def no_bound(reason: str, delta: float, *, mode: Mode = "paper") -> NetworkBound:
    """The absence of a network statement, and why."""
    return NetworkBound(mode=mode, epsilon=None, delta=delta, guarantee=None, reason=reason, kappas={})


def row_guarantee(
    scores: Scores,
    *,
    delta: float,
    factor: int,
    c_constant: float,
    k_constant: float,
    reasons: Sequence[str] = (),
) -> Guarantee:
    """The conditions of T4 for these scores; `reasons` are further causes for which the statement is not met."""
    needed = points_needed(scores.n_outputs, scores.max_fan_in, delta, factor=factor, k_constant=k_constant)
    unit: Literal["points", "batches"] = "batches" if scores.batch_dependent else "points"
    causes = list(reasons)
    if scores.reduce != "max":
        causes.insert(
            0, "sensitivities were averaged over patches (reduce='mean'), the statements are proved for the maximum"
        )
    if scores.n_draws < needed:
        causes.append(f"too few calibration {unit} (n={scores.n_draws}, needs {needed})")
    return Guarantee(
        delta=delta,
        n=scores.n_draws,
        n_needed=needed,
        unit=unit,
        c_constant=c_constant,
        k_constant=k_constant,
        reason="; ".join(causes),
    )


def layer_bound(eps_F: Tensor, sign_complexity: float | None) -> float | None:
    """eps_l Delta_l of T11, or None where Delta_l is unknown."""
    if sign_complexity is None:
        return None
    eps = float(eps_F.max())
    return eps * sign_complexity if eps > 0 else 0.0


def network_epsilon(
    layers: Sequence[LayerScores], eps: Sequence[float], dense: Sequence[Tensor], pruned: Sequence[Tensor]
) -> tuple[float | None, dict[str, float]]:
    """epsilon of T12 and the kappas by weight name; None where a layer's norms are unknown.

    Lip_k is the larger of the dense and the pruned norm: sampled weights are re-weighted, so the pruned one can be
    the larger (errata 5).
    """
    in_order = sorted(range(len(layers)), key=lambda i: layers[i].order)
    lipschitz_after, kappas, total = 1.0, {}, 0.0
    for i in reversed(in_order):
        layer = layers[i]
        if layer.output_ratio is None or layer.sign_complexity is None:
            return None, {}
        kappas[layer.weight.name] = kappa = lipschitz_after * layer.output_ratio
        if eps[i] > 0:  # a layer that loses nothing adds nothing, also where kappa is infinite
            total += kappa * layer.sign_complexity * eps[i]
        lipschitz_after *= max(float(w.to(BOUND_DTYPE).norm()) for w in (dense[i], pruned[i]))
    return (total if not math.isnan(total) else math.inf), dict(reversed(kappas.items()))


def layer_weights(layers: Sequence[LayerScores], dense: Sequence[Tensor]) -> list[float]:
    """kappa_l Delta_l of every layer, the largest scaled to 1: what a row's error costs the network (T10, T12).

    kappa is that of the dense network: the pruned norms are not known before the budget is.
    """
    _, kappas = network_epsilon(layers, [0.0] * len(layers), dense, dense)
    weights = [kappas.get(layer.weight.name, math.nan) * (layer.sign_complexity or math.nan) for layer in layers]
    largest = max(weights)
    if not all(0 <= weight < math.inf for weight in weights) or largest == 0:
        raise OptionError(
            "allocation='network' needs kappa and Delta of every layer, finite: some are unknown or infinite here "
            "(an output of zero, or points that cannot be told apart); use allocation='rows'"
        )
    return [weight / largest for weight in weights]


def paper_bound(
    model: nn.Module,
    scores: Scores,
    eps: Sequence[float],
    dense: Sequence[Tensor],
    pruned: Sequence[Tensor],
    *,
    delta: float,
    is_sampled: bool,
    c_constant: float,
    k_constant: float,
    reasons: Sequence[str] = (),
) -> NetworkBound:
    """T12 in mode "paper", with every reason for which it does not bind this model."""
    epsilon, kappas = network_epsilon(scores.layers, eps, dense, pruned)
    causes = list(reasons)
    if epsilon is None:
        causes.append("the points of a batch cannot be told apart in every layer and in the output")
    obstacle = chain_obstacle(model, {layer.weight.name for layer in scores.layers})
    if obstacle:
        causes.append(f"the paper's formula is not a bound here: {obstacle}")
    conditions = row_guarantee(
        scores,
        delta=delta,
        # T4's factor for T12 leaves no share of delta to sampling: with sampled rows the one of T6 is needed.
        factor=PRUNE_FACTOR if is_sampled else NETWORK_FACTOR,
        c_constant=c_constant,
        k_constant=k_constant,
        reasons=causes,
    )
    if epsilon is None or scores.reduce != "max":
        return no_bound(conditions.reason, delta)
    return NetworkBound("paper", epsilon, delta, conditions, conditions.reason, kappas)


def chain_obstacle(model: nn.Module, weights: set[str]) -> str:
    """Why the model is not a chain of pruned fully-connected layers and 1-Lipschitz activations; empty if it is one."""
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    if convolutions:
        return f"||kernel||_F does not bound a convolution ({convolutions[0]})"
    if isinstance(model, nn.Linear):
        return ""
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:  # tracing runs the user's forward on proxies: anything may come back
        return f"the graph of {type(model).__name__} could not be read ({type(error).__name__})"
    previous: fx.Node | None = None
    seen: set[str] = set()
    for node in graph.nodes:
        if _is_shape(node):
            continue
        sources = [source for source in node.all_input_nodes if not _is_shape(source)]
        if node.op == "placeholder" and previous is None:
            previous = node
            continue
        if sources != [previous]:
            return f"{node.name} does not follow from the layer before it alone"
        problem = "" if node.op == "output" else _node_problem(model, node, weights, seen)
        if problem:
            return problem
        previous = node
    return ""


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target in _SHAPES:
        return True
    is_getattr = node.op == "call_function" and node.target is getattr and node.args[1] in _SHAPES
    is_item = node.op == "call_function" and node.target is operator.getitem
    return is_getattr or (is_item and all(_is_shape(source) for source in node.all_input_nodes))


def _node_problem(model: nn.Module, node: fx.Node, weights: set[str], seen: set[str]) -> str:
    if node.op == "call_function":
        return "" if node.target in _FUNCTIONS else f"operation {getattr(node.target, '__name__', node.target)}"
    if node.op == "call_method":
        return "" if node.target in _METHODS else f"operation {node.target}"
    if node.op != "call_module":
        return f"operation {node.op} {node.target}"
    module: Any = model.get_submodule(str(node.target))
    if isinstance(module, nn.Linear):
        name = f"{node.target}.weight"
        if name not in weights:
            return f"{node.target} is fully connected but was not scored"
        if name in seen:
            return f"{node.target} is used twice"
        seen.add(name)
        return ""
    slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else getattr(module, "alpha", None)
    bounded_slope = isinstance(module, nn.LeakyReLU | nn.ELU | nn.CELU) and slope is not None and 0 <= slope <= 1
    if isinstance(module, _ONE_LIPSCHITZ + _MOVES) or bounded_slope:
        return ""
    return f"layer {node.target} ({type(module).__name__})"
