"""Traces models into graphs of the same operations, and checks them on a batch.

`torch.fx` is tried first and `torch.export` where it fails. A graph counts only if it repeats what the model itself
computes on the batch: what a tracer loses (an `x += y` where x has a second name, a branch) must not be bounded.
"""

import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from sipp.bounds.sound.known_operations import NoBound, hidden_behaviour
from sipp.errors import DataError, ModelError
from sipp.inputs.restore import ONE_AT_A_TIME

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]

# How closely a graph must repeat what the model itself computes, relative to the largest output.
SAME_OUTPUT = 1e-9


@dataclass(frozen=True)
class TracedNetworks:
    """Networks as graphs of the same operations, the arguments they are run on and the networks' own outputs."""

    graphs: list[fx.GraphModule]
    outputs: list[Tensor]
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    n_samples: int


def trace(models: Sequence[nn.Module], inputs: Inputs) -> TracedNetworks:
    """The graphs of float64 copies, in eval mode, of a dense network (and of the pruned one).

    Raises NoBound where no graph repeats its model.
    """
    sides = dict(zip(("dense", "pruned"), models))
    for side, model in sides.items():
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"the {side} network is a {type(model).__name__}, not an nn.Module", fix="give an instance"
            )
    device = next((p.device for model in models for p in model.parameters()), torch.device("cpu"))
    args, kwargs, n_samples = _arguments(inputs, device)
    for side, model in sides.items():
        _check_model(side, model)
    with ONE_AT_A_TIME:  # tracers replace functions of torch and of Python while they work
        try:
            # Copies: the models given keep their mode, their precision and their buffers.
            copies = [copy.deepcopy(model).eval().to(torch.float64) for model in models]
            outputs = [_single(model(*_fresh(args), **_fresh(kwargs))) for model in copies]
        except NoBound:
            raise
        except Exception as failure:
            raise NoBound(f"the models do not run on this batch in float64: {_first_line(failure)}") from failure
        for model in copies:
            for name, module in model.named_modules():
                if module.training:  # it overrides train(), or its forward sets the mode
                    raise NoBound(f"module {name or 'the model itself'} ({type(module).__name__}) stays in train mode")
        return TracedNetworks(_graphs(copies, args, kwargs, outputs), outputs, args, kwargs, n_samples)


class _Tracer(fx.Tracer):
    """A torch.fx tracer that is safe with other threads.

    torch.fx patches nn.Module for the whole process; calls from other threads pass through unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_ours = threading.get_ident() == self._thread
        return super().call_module(m, forward, args, kwargs) if is_ours else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        is_ours = threading.get_ident() == self._thread
        return super().getattr(attr, attr_val, parameter_proxy_cache) if is_ours else attr_val


def fx_graph(model: nn.Module) -> fx.GraphModule:
    """The model as torch.fx reads it; one thread at a time."""
    tracer = _Tracer()
    graph = tracer.trace(model)
    return fx.GraphModule(tracer.root, graph, type(model).__name__)


def _graphs(models: Sequence[nn.Module], args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> list[fx.GraphModule]:
    """The graphs of the first tracer whose graphs repeat these outputs."""
    reasons = []
    tracers: dict[str, Callable[..., fx.GraphModule]] = {"fx": lambda model, *_: fx_graph(model), "export": _export}
    for name, tracer in tracers.items():
        try:
            graphs = [tracer(model, args, kwargs) for model in models]
        except Exception as failure:  # a tracer can fail in any way: the next one, or the reason, takes over
            reasons.append(f"{name}: {_first_line(failure)}")
            continue
        _check_same_operations(graphs[0], graphs[-1])
        if all(_repeats(graph, args, kwargs, output) for graph, output in zip(graphs, outputs)):
            return graphs
        reasons.append(f"{name}: the graph does not repeat the model's output")
    raise NoBound(f"could not trace: {'; '.join(reasons)}")


def same_output(value: Tensor, output: Tensor, share: float = SAME_OUTPUT) -> bool:
    """Whether two float64 outputs agree up to a share of the largest value (NaN and infinities in the same places)."""
    if value.shape != output.shape:
        return False
    finite = output[torch.isfinite(output)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(value, output, rtol=0.0, atol=share * largest, equal_nan=True)


def _arguments(inputs: Inputs, device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, Tensor], int]:
    """The model's arguments in float64 and the number of samples."""
    if isinstance(inputs, Mapping):
        named = {str(name): value for name, value in inputs.items()}
    elif isinstance(inputs, Tensor | list | tuple):
        named = {str(i): value for i, value in enumerate([inputs] if isinstance(inputs, Tensor) else inputs)}
    else:
        raise DataError(f"inputs is a {type(inputs).__name__}, not a batch: a tensor, or a list or dict of tensors")
    for name, value in named.items():
        if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_meta or value.is_complex()):
            raise DataError(
                f"input {name} is sparse, complex or without values", fix="give a dense tensor of real numbers"
            )
    sizes = {value.shape[0] if isinstance(value, Tensor) and value.dim() else 0 for value in named.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise DataError("inputs must be tensors with the same, non-zero number of samples along the first axis")
    for name, value in named.items():
        bad = (~torch.isfinite(value)).reshape(value.shape[0], -1).any(dim=1).nonzero().flatten().tolist()
        if bad:
            raise DataError(
                f"input {name} holds NaN or infinity in sample {bad[0]}", fix="clean or leave out that sample"
            )
    ready = {
        name: value.detach().to(device, torch.float64 if value.is_floating_point() else value.dtype)
        for name, value in named.items()
    }
    if isinstance(inputs, Mapping):
        return (), ready, sizes.pop()
    return tuple(ready.values()), {}, sizes.pop()


def _check_model(side: str, model: nn.Module) -> None:
    """Raises for weights that are NaN or infinite, and for modules with hooks or patches, which no graph shows."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"parameter {name} of the {side} model holds NaN or infinity", fix="repair or reload it")
    for name, module in model.named_modules():
        if hidden := hidden_behaviour(module):
            raise NoBound(f"{hidden} in module {name or 'the model itself'} of the {side} model")


def _export(model: nn.Module, args: Any, kwargs: Any) -> fx.GraphModule:
    program = torch.export.export(model, _fresh(args), _fresh(kwargs))
    # The graph is compared with the model on the batch, so the guards that newer versions of torch add are not needed.
    known = inspect.signature(torch.export.ExportedProgram.module).parameters
    return program.module(**({"check_guards": False} if "check_guards" in known else {}))


def _repeats(graph: fx.GraphModule, args: Any, kwargs: Any, output: Tensor) -> bool:
    """Whether a graph gives the model's own output on the batch; a graph that cannot be run does not."""
    try:
        return same_output(_single(graph(*_fresh(args), **_fresh(kwargs))), output)
    except Exception:
        return False


def _check_same_operations(dense: fx.GraphModule, pruned: fx.GraphModule) -> None:
    """Raises a ModelError if the two networks differ in more than their weights."""
    nodes = [list(graph.graph.nodes) for graph in (dense, pruned)]
    if len(nodes[0]) != len(nodes[1]):
        raise ModelError(f"the models differ in more than weights: {len(nodes[0])} and {len(nodes[1])} operations")
    for pair in zip(*nodes):
        spelled: list[tuple[Any, ...]] = [
            (node.op, str(node.target), str(node.args), str(node.kwargs)) for node in pair
        ]
        if pair[0].op == "call_module" and spelled[0] == spelled[1]:
            modules = [graph.get_submodule(str(pair[0].target)) for graph in (dense, pruned)]
            spelled = [(type(m), m.extra_repr()) for m in modules]
        if spelled[0] != spelled[1]:
            raise ModelError(
                f"the models differ in more than weights: {spelled[0]} and {spelled[1]} at {pair[0].name}",
                fix="compare a model with a pruned copy of itself",
            )


def _single(output: Any) -> Tensor:
    """The one tensor a model returns."""
    if isinstance(output, (tuple, list)) and len(output) == 1:
        output = output[0]
    if not isinstance(output, Tensor):
        raise NoBound(f"the model returns a {type(output).__name__}, not one tensor")
    return output


def _fresh(arguments: Any) -> Any:
    """Copies of the arguments: a model may write into its input."""
    if isinstance(arguments, Mapping):
        return {name: value.clone() for name, value in arguments.items()}
    return tuple(value.clone() for value in arguments)


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else ''}"
