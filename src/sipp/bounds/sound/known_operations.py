"""Recognises the operation of a graph node, however the model spelled it, and names its arguments.

`nn.ReLU()`, `F.relu(x)`, `torch.relu(x)`, `x.relu_()` and `aten.relu` all become the op "relu" of "input". Modules are
recognised by type and functions by identity, never by name. PyTorch's own functions are trusted. An operation or an
argument that is not listed here has no bound.
"""

import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from sipp.bounds.sound.operator_norms import SLOPES


class NoBound(Exception):
    """Why an operation has no bound, without its name and place."""


@dataclass(frozen=True)
class ConstantPair:
    """A tensor that does not depend on the input, in the dense and in the pruned network."""

    dense: Tensor
    pruned: Tensor


@dataclass(frozen=True)
class ValueAndError:
    """A value of the dense network (samples along axis 0), and a bound on the distance of the pruned network's value.

    `affine` is set on the output of a linear map whose error is left to the BatchNorm that follows; its own error is
    then infinite, so that nothing else can use it by mistake.
    """

    value: Tensor
    error_B: Tensor
    affine: "Call | None" = None


@dataclass(frozen=True)
class Call:
    """One operation: its name, arguments by name, result, and how to run it on another input."""

    op: str
    options: dict[str, Any]
    value: Any
    rerun: Callable[[Tensor], Any]

    @property
    def input(self) -> ValueAndError:
        """The network value the operation acts on."""
        tracked = self.options.get("input")
        if not isinstance(tracked, ValueAndError):
            raise NoBound("its first argument is not a network value")
        return tracked


# Operations that only move, copy or leave out values, or fill in constants; their arguments need no names.
MOVEMENTS = frozenset(
    (
        *("flatten", "unflatten", "reshape", "view", "permute", "transpose", "swapaxes", "movedim", "squeeze"),
        *("unsqueeze", "contiguous", "clone", "alias", "detach", "getitem", "select", "slice", "narrow", "chunk"),
        *("split", "expand", "repeat", "flip", "pad", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    )
)
# What may be asked of a network value that is the same in both networks.
METADATA = frozenset(("size", "dim", "ndim", "numel", "shape", "dtype", "device"))
_AUGMENTED = {operator.iadd: "add", operator.isub: "sub", operator.imul: "mul", operator.itruediv: "div"}
# The functions whose name is trusted, as they were when this file was read: no function of a user called "relu" is one.
_FUNCTIONS = {
    function: name
    for space in (F, torch, operator, builtins, math)
    for name, function in vars(space).items()
    if callable(function) and getattr(function, "__name__", "") == name
}
_ALIASES = {
    "concat": "cat",
    "concatenate": "cat",
    "truediv": "div",
    "divide": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "clip": "clamp",
}
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_MAX_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG_POOL = (
    *("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
    "divisor_override",  # not in one dimension
)
_ADAPTIVE = ("input", "output_size", "return_indices")
_DROPOUT = ("input", "p", "training", "inplace")
_REDUCE = ("input", "dim", "keepdim", "dtype")
# All arguments that are understood, in PyTorch's order.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SLOPES, ("input", "inplace")),
    "linear": ("input", "weight", "bias"),
    **{f"conv{rank}d": _CONV for rank in (1, 2, 3)},
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "prelu": ("input", "weight"),
    **{f"max_pool{rank}d": _MAX_POOL for rank in (1, 2, 3)},
    "avg_pool1d": _AVG_POOL[:-1],
    "avg_pool2d": _AVG_POOL,
    "avg_pool3d": _AVG_POOL,
    **{f"adaptive_{kind}_pool{rank}d": _ADAPTIVE for kind in ("avg", "max") for rank in (1, 2, 3)},
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _DROPOUT),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _DROPOUT),
    **dict.fromkeys(("mean", "sum"), _REDUCE),
    **dict.fromkeys(("softmax", "log_softmax"), ("input", "dim", "dtype")),
    **dict.fromkeys(("add", "sub"), ("input", "other", "alpha")),
    "mul": ("input", "other"),
    "div": ("input", "other", "rounding_mode"),
    **dict.fromkeys(("cat", "stack"), ("tensors", "dim")),
    "clamp": ("input", "min", "max"),
    "hardtanh": ("input", "min_val", "max_val", "inplace"),
    "leaky_relu": ("input", "negative_slope", "inplace"),
    **dict.fromkeys(("elu", "celu"), ("input", "alpha", "inplace")),
    "gelu": ("input", "approximate"),
}
_WITHOUT_EFFECT = frozenset(("_stacklevel", "momentum", "cudnn_enabled"))  # on any value, in eval mode
_SCHEMA_NAMES = {"self": "input", "train": "training"}

_NORM_ATTRIBUTES = ("running_mean", "running_var", "weight", "bias", "eps")
# A module as the function it applies: the op, and the attributes that are its arguments.
_MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Linear: ("linear", ("weight", "bias")),
    **{
        kind: (f"conv{rank}d", (*_CONV[1:], "padding_mode"))
        for rank, kind in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d))
    },
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), ("batch_norm", _NORM_ATTRIBUTES)),
    nn.PReLU: ("prelu", ("weight",)),
    **{
        kind: (f"max_pool{rank}d", _MAX_POOL[1:])
        for rank, kind in ((1, nn.MaxPool1d), (2, nn.MaxPool2d), (3, nn.MaxPool3d))
    },
    nn.AvgPool1d: ("avg_pool1d", _AVG_POOL[1:-1]),
    nn.AvgPool2d: ("avg_pool2d", _AVG_POOL[1:]),
    nn.AvgPool3d: ("avg_pool3d", _AVG_POOL[1:]),
    **{
        getattr(nn, f"Adaptive{kind.capitalize()}Pool{rank}d"): (f"adaptive_{kind}_pool{rank}d", ("output_size",))
        for kind in ("avg", "max")
        for rank in (1, 2, 3)
    },
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), ("identity", ())),
    **dict.fromkeys((nn.AlphaDropout, nn.FeatureAlphaDropout), ("identity", ())),
    nn.Flatten: ("flatten", ()),
    nn.Unflatten: ("unflatten", ()),
    **{
        getattr(nn, f"{kind}Pad{rank}d"): ("pad", ())
        for kind in ("Zero", "Constant", "Reflection", "Replication", "Circular")
        for rank in (1, 2, 3)
    },
    nn.PixelShuffle: ("pixel_shuffle", ()),
    nn.PixelUnshuffle: ("pixel_unshuffle", ()),
    nn.ChannelShuffle: ("channel_shuffle", ()),
    **{
        kind: (kind.__name__.lower(), ())
        for kind in (nn.ReLU, nn.ReLU6, nn.Tanh, nn.Softsign, nn.LogSigmoid, nn.Sigmoid, nn.SiLU)
    },
    **{kind: (kind.__name__.lower(), ()) for kind in (nn.Mish, nn.SELU, nn.Hardsigmoid, nn.Hardswish)},
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val")),
    nn.GELU: ("gelu", ("approximate",)),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.ELU: ("elu", ("alpha",)),
    nn.CELU: ("celu", ("alpha",)),
    nn.Softmax: ("softmax", ("dim",)),
    nn.LogSoftmax: ("log_softmax", ("dim",)),
}


# The forward of these classes when this file was imported: a class that was patched since is not recognised.
_OWN_FORWARD: dict[type[nn.Module], Any] = {kind: kind.forward for kind in _MODULES}


def hidden_behaviour(module: nn.Module) -> str:
    """Why a module may not compute what its type says (hooks, a replaced forward); empty if it does.

    A tracer would record the known operation, although other code runs.
    """
    own, all_modules = vars(module), torch.nn.modules.module  # not by getattr: a model's own may raise anything
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return "forward hook"
    if all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks:
        return "forward hook for all modules"
    if own.keys() & {"forward", "_call_impl", "_conv_forward"}:
        return "forward that was put in the place of its own"
    if isinstance(own["_modules"].get("parametrizations"), nn.ModuleDict):
        return "parametrised weight"
    kind = type(module)
    if kind.forward is not _OWN_FORWARD.get(kind, kind.forward):
        return f"forward of {kind.__name__} that was replaced"
    return ""


def op_name(node: Node, root: GraphModule) -> str:
    """The name of a node's operation: as in the tables if it is known, else as the model spells it."""
    if node.op == "call_module":
        kind = type(root.get_submodule(str(node.target)))
        return _MODULES[kind][0] if kind in _MODULES else kind.__name__
    if node.target in _AUGMENTED:
        return _AUGMENTED[node.target]
    name = _function_name(node.target)
    bare = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return _ALIASES.get(bare, bare)


def name_in_model(node: Node, root: GraphModule) -> str:
    """An operation's name as the model's author knows it."""
    return type(root.get_submodule(str(node.target))).__name__ if node.op == "call_module" else op_name(node, root)


def in_place(node: Node, root: GraphModule, options: Mapping[str, Any]) -> bool:
    """Whether a node overwrites its first argument."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return bool(getattr(module, "inplace", False)) and op_name(node, root) != "identity"
    name = _function_name(node.target)
    ends_in_place = name.endswith("_") and not name.endswith("__")
    return node.target in _AUGMENTED or ends_in_place or bool(options.get("inplace", False))


def named_options(
    node: Node, dense: GraphModule, pruned: GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A node's arguments by name, or NoBound; a parameter or buffer comes as a ConstantPair."""
    if node.op == "call_module":
        if len(args) + len(kwargs) != 1:
            raise NoBound("it is called with more than one argument")
        modules = (dense.get_submodule(str(node.target)), pruned.get_submodule(str(node.target)))
        return {"input": args[0] if args else next(iter(kwargs.values())), **_module_options(*modules)}
    op = op_name(node, dense)
    if op in MOVEMENTS:
        return {"input": args[0] if args else kwargs.get("input")}
    if op not in _PARAMETERS:
        raise NoBound("")
    names = _PARAMETERS[op]
    if isinstance(node.target, torch._ops.OpOverload):
        schema = [argument.name for argument in node.target._schema.arguments]
        names = tuple(_SCHEMA_NAMES.get(name, name) for name in schema)
    elif op == "batch_norm" and node.target is not F.batch_norm:
        raise NoBound("its arguments are not in the order of nn.functional.batch_norm")
    if len(args) > len(names):
        raise NoBound(f"it is called with {len(args)} arguments")
    options = dict(zip(names, args))
    options.update({_SCHEMA_NAMES.get(key, key): value for key, value in kwargs.items()})
    unknown = options.keys() - {*_PARAMETERS[op], *_WITHOUT_EFFECT}
    if unknown or len(options) != len(args) + len(kwargs):
        raise NoBound(f"its arguments are not understood: {', '.join(sorted(unknown or options))}")
    return options


def _module_options(dense: nn.Module, pruned: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are arguments of its operation."""
    options: dict[str, Any] = {}
    for name in _MODULES[type(dense)][1] if type(dense) in _MODULES else ():
        ours, theirs = getattr(dense, name), getattr(pruned, name)
        if not isinstance(ours, Tensor) and ours != theirs:
            raise NoBound(f"its {name} differs between the two networks")
        options[name] = ConstantPair(ours, theirs) if isinstance(ours, Tensor) else ours
    return options


def module_of(node: Node) -> str:
    """The path of the module a node belongs to, as in `model.named_modules()`."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return str(paths[-1]) if paths and paths[-1] else "the model itself"


def _function_name(target: Any) -> str:
    """The bare name of a function of PyTorch or Python, or of a tensor method; with its module for any other."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    if target in _FUNCTIONS:
        return _FUNCTIONS[target]
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__name__', target)}"
