"""Checks whether a model is the chain of fully-connected layers that the paper's formula covers (T12).

The model is run on given points, and every operation must follow from the one before it alone. Whatever is not known to
belong to a chain is an obstacle.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sipp.bounds.operations import (
    THE_MODEL,
    VALUELESS,
    NoBound,
    Operation,
    device_in,
    float64_copy,
    hidden_in,
    in_precision,
    run_watched,
    same_output,
)
from sipp.errors import DataError
from sipp.inputs.data import points_at
from sipp.results.batches import Batch

# Operations that keep ||difference|| from growing, coordinate by coordinate or by moving it around.
_ONE_LIPSCHITZ = frozenset(
    (
        *("relu", "tanh", "sigmoid", "hardtanh", "hardsigmoid", "_softmax"),
        *("view", "_unsafe_view", "clone", "detach", "alias"),
    )
)
_SLOPED = {"leaky_relu": "negative_slope", "elu": "alpha"}


def chain_obstacle(model: nn.Module, weights: set[str], batch: Batch) -> str:
    """Why the model is no such chain, or cannot be shown to be one on these points; empty if it is one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return f"||kernel||_F does not bound a convolution ({name})"
        if not isinstance(module, nn.Linear) and any(True for _ in module.parameters(recurse=False)):
            return f"layer {name or THE_MODEL} ({type(module).__name__})"
    if hidden := hidden_in(model):
        return hidden
    try:
        with torch.no_grad():
            together = _run(model, weights, batch)
            alone = [_run(model, weights, points_at(batch, slice(i, i + 1))) for i in range(batch.n_points)]
    except (NoBound, DataError) as why:
        return f"it covers plain chains of fully-connected layers only: {why}"
    is_same = same_output(torch.cat(alone), together)
    return "" if is_same else "the output for one input depends on the others in its batch"


def _run(model: nn.Module, weights: set[str], batch: Batch) -> Tensor:
    """The output for a batch; raises NoBound at the first operation that does not belong to a chain."""
    copied = float64_copy(model)
    ready = in_precision(batch, device_in(copied), torch.float64)
    inputs = [*ready.args, *ready.kwargs.values()]
    if not all(isinstance(value, Tensor) for value in inputs):
        raise NoBound("its inputs are not plain tensors")
    chain = _Chain(copied, weights, inputs)
    before = _memory_and_versions(copied)
    output = run_watched(copied, ready, chain)
    if output is not chain.last:
        raise NoBound("the output does not follow from the last layer alone")
    if _memory_and_versions(copied) != before:
        raise NoBound("a forward pass writes to a parameter")
    if not torch.equal(output.nan_to_num(), chain.repeated[output].nan_to_num()):
        raise NoBound("values are changed by other code than torch's operations")
    return output


def _memory_and_versions(model: nn.Module) -> list[tuple[int, int]]:
    """Where each parameter lies in memory, and how often torch wrote to it."""
    return [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]


class _Chain:
    """Checks that each operation on values that depend on the input follows from the one before it.

    Every operation is repeated on copies that only we have, which shows whether the model changes values in other ways.
    """

    def __init__(self, model: nn.Module, weights: set[str], inputs: list[Tensor]) -> None:
        self.repeated = WeakTensorKeyDictionary({tensor: tensor.clone() for tensor in inputs})
        self.last = inputs[0] if len(inputs) == 1 else None
        self.weights, self.used = weights, set[str]()
        self.parameters = list(model.named_parameters(remove_duplicate=False))
        self.constants = [tensor for _, tensor in self.parameters] + list(model.buffers())

    def __call__(self, operation: Operation) -> Tensor:
        sources = [tensor for tensor in operation.tensors if tensor in self.repeated]
        if not sources or operation.name in VALUELESS:
            return operation.run()
        if len(sources) != 1 or sources[0] is not self.last:
            raise NoBound("it does not follow from the layer before it alone")
        self._check(operation)
        repeated = operation.run(lambda tensor: self.repeated.get(tensor, tensor))
        result: Tensor = operation.run()
        if result.dtype != sources[0].dtype:
            raise NoBound("it changes the data type")
        self.repeated[result] = repeated
        self.last = result
        return result

    def _check(self, operation: Operation) -> None:
        options = operation.options
        if operation.name in ("addmm", "mm") and options["mat2"] not in self.repeated:
            names = [name for name, parameter in self.parameters if options["mat2"].mT.is_set_to(parameter)]
            if not self.weights.intersection(names):
                raise NoBound("it is fully connected, but its weight was not scored")
            if not self.used.isdisjoint(names):
                raise NoBound(f"{names[0]} is used twice")
            if options.get("beta", 1) != 1 or options.get("alpha", 1) != 1:
                raise NoBound("its factors are not 1")
            if operation.name == "addmm" and not any(options["self"].is_set_to(own) for own in self.constants):
                raise NoBound("its bias is not a parameter")
            self.used.update(names)
        elif operation.name in _SLOPED:
            slope = options[_SLOPED[operation.name]] * options.get("input_scale", 1)
            if not 0 <= slope <= 1 or options.get("scale", 1) != 1 or options.get("input_scale", 1) <= 0:
                raise NoBound("its slope is outside [0, 1]")
        elif operation.name not in _ONE_LIPSCHITZ or len(operation.tensors) > 1:
            raise NoBound("")
