"""Runs a network in float64 and shows every operation that PyTorch executes for it.

What runs is what is seen, whatever the model's code looks like: modules, functions, methods and operators all end in
the same few operations of `torch.ops.aten`, and go by their names there ("addmm" is a linear layer with a bias).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sipp.errors import DataError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.results.batches import Batch

THE_MODEL = "the model itself"
SAME_OUTPUT = 1e-9  # how far two outputs in float64 may differ by rounding, as a share of the largest value
# Operations that take a shape, a dtype or a device from their argument, and no values.
VALUELESS = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full"),
    )
)


class NoBound(Exception):
    """Why there is no bound."""


@dataclass(frozen=True)
class Operation:
    """One operation that a network executes, and the path of the module that runs it."""

    function: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str

    @property
    def name(self) -> str:
        """The name of the operation, without the _ of the form that overwrites its first argument."""
        name: str = self.function.overloadpacket.__name__
        return name[:-1] if self.is_in_place and name.endswith("_") else name

    @property
    def is_in_place(self) -> bool:
        """Whether it writes into one of its arguments."""
        return bool(self.function._schema.is_mutable)

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.function.tags

    @property
    def options(self) -> dict[str, Any]:
        """All arguments by name, with their defaults."""
        parameters = self.function._schema.arguments
        values = {parameter.name: parameter.default_value for parameter in parameters}
        return values | dict(zip((parameter.name for parameter in parameters), self.args)) | self.kwargs

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def run(self, instead: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
        """The result of the operation, with other tensors in the place of its own."""
        args, kwargs = tree_map(
            lambda leaf: instead(leaf) if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs)
        )
        return self.function(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """A mode that hands every operation to a function, which returns its result."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False; otherwise torch would import its compiler, which takes a second, to exclude the method below."""
        return False

    def __init__(self, on_operation: Callable[[Operation], Any], model: nn.Module) -> None:
        super().__init__()
        self.on_operation, self.refusals = on_operation, list[Exception]()
        self.running = [(THE_MODEL, type(model).__name__)]  # the modules that run, the innermost last
        for name, module in model.named_modules():
            entered = name or THE_MODEL, type(module).__name__
            module.register_forward_pre_hook(lambda _, __, entered=entered: self.running.append(entered))
            module.register_forward_hook(lambda _, __, ___: self.running.pop() and None, always_call=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module, kind = self.running[-1]
        operation = Operation(func, args, kwargs or {}, module)
        try:
            if operation.is_random:
                raise NoBound("it is random, also in eval mode")
            return self.on_operation(operation)
        except NoBound as why:
            reason = f": {why}" if str(why) else ""
            self.refusals.append(NoBound(f"op {operation.name} in module {module} ({kind}){reason}"))
            raise self.refusals[-1] from None


def run_watched(model: nn.Module, batch: Batch, on_operation: Callable[[Operation], Any]) -> Tensor:
    """The one tensor that a model of float64 returns for a batch, run in eval mode operation by operation.

    `on_operation` returns the result of each operation, or raises NoBound. Hooks are added to the model: give a copy.
    """
    watch = _Watch(on_operation, model)
    try:
        with scoring_mode(model, "running"), watch:
            output = run_batch(model, batch, watch.refusals)
            trains = next((name for name, module in model.named_modules() if module.training), None)
    except DataError as error:
        raise NoBound(f"the model does not run in float64: {error}") from error
    if watch.refusals:  # the model caught it
        raise watch.refusals[0]
    if trains is not None:
        kind = type(model.get_submodule(trains)).__name__
        raise NoBound(f"module {trains or THE_MODEL} ({kind}) stays in train mode")
    return one_tensor(output)


def one_tensor(output: Any) -> Tensor:
    """The one tensor that a model returns."""
    if isinstance(output, tuple | list) and len(output) == 1:
        output = output[0]
    if not isinstance(output, Tensor):
        raise NoBound(f"the model returns a {type(output).__name__}, not one tensor")
    return output


def float64_copy(model: nn.Module) -> nn.Module:
    """A copy in float64."""
    try:
        return copy.deepcopy(model).to(torch.float64)
    except Exception as error:  # a network's own code may raise anything
        raise NoBound(f"the model cannot be copied to float64 ({type(error).__name__}: {error})") from error


def device_in(model: nn.Module) -> torch.device:
    """The device of a model's first tensor; the CPU for a model without any."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def in_precision(batch: Batch, device: torch.device, dtype: torch.dtype | None) -> Batch:
    """A copy of the batch on this device, its real numbers in this dtype (None: as they are)."""

    def ready(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=ready(value.data))
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else value.dtype, copy=True)

    args, kwargs = tuple(map(ready, batch.args)), {name: ready(value) for name, value in batch.kwargs.items()}
    return replace(batch, args=args, kwargs=kwargs)


def same_output(value: Tensor, output: Tensor, share: float = SAME_OUTPUT) -> bool:
    """Whether two float64 outputs agree up to a share of the largest value (NaN and infinities in the same places)."""
    if value.shape != output.shape:
        return False
    finite = output[torch.isfinite(output)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(value, output, rtol=0.0, atol=share * largest, equal_nan=True)


def hidden_in(model: nn.Module) -> str:
    """The first module of a network with `hidden_behaviour`, and which; empty if there is none."""
    found = ((name, hidden_behaviour(module)) for name, module in model.named_modules())
    return next((f"{hidden} in module {name or THE_MODEL}" for name, hidden in found if hidden), "")


def hidden_behaviour(module: nn.Module) -> str:
    """Why a module may do something else the next time (hooks, a replaced forward); empty if nothing shows that."""
    own, all_modules = vars(module), torch.nn.modules.module  # not by getattr: a model's own may raise anything
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return "forward hook"
    if all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks:
        return "forward hook for all modules"
    if own.keys() & {"forward", "_call_impl", "_conv_forward"}:
        return "forward that was put in the place of its own"
    if isinstance(own["_modules"].get("parametrizations"), nn.ModuleDict):
        return "parametrised weight"
    return ""
