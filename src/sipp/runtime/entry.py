"""`sparse(model, example)`: the pruned network as a callable that skips its zeros."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sipp.errors import DataError, OptionError
from sipp.runtime.graph import trace
from sipp.runtime.plan import Plan, flat_inputs, make_plan


class Sparse:
    """A network compiled for the CPU: call it as you call the model. `print` shows what runs where, and how fast."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = copy.deepcopy(model).eval()
        self._plans: dict[Any, Plan] = {}
        self.seconds = 0.0
        self._compile(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = flat_inputs(args, kwargs)
        plan = self._plans.get(_signature(inputs))
        if plan is None:
            plan = self._compile(args, kwargs)
        return pytree.tree_unflatten(plan.run(inputs), plan.graph.out_spec)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        start = time.perf_counter()
        graph = trace(self._model, args, kwargs)
        inputs = flat_inputs(args, kwargs)
        plan = make_plan(graph, inputs)
        self._plans[_signature(inputs)] = plan
        self.seconds = time.perf_counter() - start
        return plan


def _signature(inputs: list[Any]) -> Any:
    return tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in inputs)


def sparse(model: nn.Module, example: Any) -> Sparse:
    args, kwargs = (), {}
    if isinstance(example, Tensor):
        args = (example,)
    elif isinstance(example, dict):
        kwargs = example
    else:
        args = tuple(example)
    return Sparse(model, args, kwargs)
