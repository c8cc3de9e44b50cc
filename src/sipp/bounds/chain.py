"""Checks whether a model is the chain of fully-connected layers that the paper's formula covers (T12).

As for T13, the graph must repeat the model's own output on given points, and its operations must be exactly what they
seem (`sound/tracing.py`, `sound/known_operations.py`). Whatever is not known to belong to a chain is an obstacle.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from sipp.bounds.sound.known_operations import NoBound, hidden_behaviour, named_options, op_name
from sipp.bounds.sound.tracing import Inputs, fx_graph, same_output, trace
from sipp.errors import DataError, ModelError
from sipp.inputs.capture import scoring_mode

# Operations that keep ||difference|| from growing, coordinate by coordinate or by moving it around.
_ONE_LIPSCHITZ = frozenset(
    (
        *("relu", "relu6", "tanh", "sigmoid", "hardtanh", "hardsigmoid", "softmax", "softsign"),
        *("flatten", "unflatten", "identity", "view", "reshape", "contiguous", "detach"),
    )
)
_SLOPED = {"leaky_relu": ("negative_slope", 0.01), "elu": ("alpha", 1.0), "celu": ("alpha", 1.0)}
_SHAPES = {"size", "shape", "dim"}


def chain_obstacle(model: nn.Module, weights: set[str], inputs: Inputs) -> str:
    """Why the model is no such chain, or cannot be shown to be one on these inputs; empty if it is one."""
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    if convolutions:
        return f"||kernel||_F does not bound a convolution ({convolutions[0]})"
    if type(model) is nn.Linear:  # a tracer takes a single layer apart
        model, weights = nn.Sequential(model), {f"0.{name}" for name in weights}
    for name, module in model.named_modules():
        if hidden := hidden_behaviour(module):
            return f"{hidden} in {name or 'the model itself'}"
    try:
        with scoring_mode(model, "running"):
            root = fx_graph(model)
    except Exception as error:  # tracing runs the user's forward on proxies: anything may come back
        return (
            "the paper's formula covers plain chains of fully-connected layers only; this model is not one that can be "
            f"read ({type(error).__name__})"
        )
    return _obstacle_in_graph(root, weights) or _obstacle_when_run(model, inputs)


def _obstacle_in_graph(root: fx.GraphModule, weights: set[str]) -> str:
    """The first operation of a graph that does not belong to a chain."""
    previous: fx.Node | None = None
    seen: set[str] = set()
    for node in root.graph.nodes:
        if _is_shape(node):
            continue
        sources = [source for source in node.all_input_nodes if not _is_shape(source)]
        if node.op == "placeholder" and previous is None:
            previous = node
            continue
        if sources != [previous]:
            return _not_next(node)
        if node.op != "output" and (obstacle := _obstacle_at(root, node, weights, seen)):
            return obstacle
        previous = node
    return ""


def _not_next(node: fx.Node) -> str:
    """The obstacle at a node that reads anything but the output of the node before it."""
    if node.op == "get_attr":
        owner = str(node.target).rpartition(".")[0] or "the model itself"
        return f"module {owner} has a forward of its own, which reads {node.target}: it is not a known layer"
    where = str(node.target) if node.op == "call_module" else node.name
    return f"{where} does not follow from the layer before it alone"


def _tied_to(root: fx.GraphModule, layer: str, weights: set[str]) -> str:
    """The name of the scored weight that is tied to the weight of this layer; empty if there is none."""
    own = root.get_submodule(layer).weight
    shared = dict(root.named_parameters(remove_duplicate=False))
    return next((name for name in sorted(weights) if shared.get(name) is own), "")


def _obstacle_when_run(model: nn.Module, inputs: Inputs) -> str:
    """Why the graph does not repeat the model, on the whole batch or point by point; empty if it does."""
    try:
        with torch.no_grad():
            traced = trace([model], inputs)
            root, points = traced.graphs[0], next(iter((*traced.args, *traced.kwargs.values())))
            together, alone = root(points), torch.cat([root(point) for point in points.split(1)])
    except (NoBound, ModelError, DataError) as why:
        return f"the graph of the model could not be checked: {why}"
    except Exception as error:  # the model may refuse a single point, or need a second input
        return f"the model could not be run input by input ({type(error).__name__})"
    return "" if same_output(alone, together) else "the output for one input depends on the others in its batch"


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target in _SHAPES:
        return True
    is_getattr = node.op == "call_function" and node.target is getattr and node.args[1] in _SHAPES
    is_item = node.op == "call_function" and node.target is operator.getitem
    return is_getattr or (is_item and all(_is_shape(source) for source in node.all_input_nodes))


def _obstacle_at(root: fx.GraphModule, node: fx.Node, weights: set[str], seen: set[str]) -> str:
    op = op_name(node, root)
    if node.op == "call_module" and op == "linear":
        name = f"{node.target}.weight"
        if name not in weights:
            tied = _tied_to(root, str(node.target), weights)
            if tied:
                return f"{node.target}.weight is tied to {tied}: one weight in two places of the chain"
            return f"{node.target} is fully connected but was not scored"
        if name in seen:
            return f"{node.target} is used twice"
        seen.add(name)
        return ""
    if op in ("Softplus", "softplus"):  # it is the identity above its threshold, and was log(1 + e^-t) / beta more
        return "operation softplus (it jumps down at its threshold, so that 1 does not bound its slope)"
    if node.op.startswith("call") and op in (*_ONE_LIPSCHITZ, *_SLOPED, "dropout"):
        try:
            options = named_options(node, root, root, node.args, node.kwargs)
        except NoBound as why:
            return f"operation {op} ({why})"
        slope = options.get(*_SLOPED[op]) if op in _SLOPED else 1.0
        if not isinstance(slope, int | float) or not 0 <= slope <= 1:
            return f"operation {op} with a slope outside [0, 1]"
        if op == "dropout" and options.get("training", True) is not False:
            return "operation dropout, in train mode"
        return "" if options.get("dtype") is None else f"operation {op} in another data type"
    if node.op == "call_module":
        return f"layer {node.target} ({type(root.get_submodule(str(node.target))).__name__})"
    return f"operation {op if node.op.startswith('call') else f'{node.op} {node.target}'}"
