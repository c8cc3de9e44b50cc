"""`sparse(model, example)`: the pruned network as a callable that skips its zeros."""

from __future__ import annotations

import inspect
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sipp.errors import ModelError
from sipp.runtime import steps
from sipp.runtime.chunks import chunk_size, is_same_for_fewer
from sipp.runtime.examples import call_of, try_example
from sipp.runtime.formats import Strides, lay_out, other_strides, strides_of
from sipp.runtime.graph import reads_memory, trace
from sipp.runtime.plain import plain_copy
from sipp.runtime.plan import Plan, flat_inputs, make_plan, whole_plan
from sipp.runtime.shelf import Shelved, restore, shelve
from sipp.runtime.steps import Step
from sipp.runtime.table import sparse_table

MOST_PLANS = 8  # for inputs of different shapes
TRIALS = 2
NOT_FINITE = object()


@dataclass(frozen=True)
class Compiled:
    """How inputs of one kind are run: by a plan, or by torch as a whole where that is faster or the only way."""

    plan: Plan
    chunk: int | None  # points that the plan takes at a time; None: all
    is_dense: bool
    seconds: float  # of a call, on torch's threads
    dense_seconds: float
    strides: Strides  # of the model's weights, when torch runs it


def _run(plan: Plan, chunk: int | None, inputs: list[Any]) -> Any:
    """What the model gives; NOT_FINITE where a value on the way is not finite, and torch has to run it."""
    n, parts = len(inputs[0]) if chunk else 1, []
    for i in range(0, n, chunk or n):
        part = plan.run([x[i : i + chunk] for x in inputs] if chunk else inputs)
        if part is None:
            return NOT_FINITE
        parts.append(part)
    flat = [torch.cat(part) for part in zip(*parts)] if chunk else parts[0]
    return pytree.tree_unflatten(flat, plan.graph.out_spec)


class Sparse:
    """A network compiled for the CPU: call it as you call the model. `print` shows what runs where, and how fast.

    It is compiled for the shapes of the example; a call with other shapes compiles once more. One call runs at a time.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._model = plain_copy(model)
        self._given = strides_of(self._model)
        self._shelf: dict[str, Shelved] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._lock = threading.RLock()
        self.n_dense_bytes = sum(t.nbytes for t in (*self._model.parameters(), *self._model.buffers()))
        self.seconds = 0.0  # of compilation
        self._compile(args, self._in_order(kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = self._in_order(kwargs)
        with self._lock:  # what runs may be compiled anew meanwhile, for other inputs
            compiled = self._compiled.get(_signature(args, kwargs)) or self._compile(args, kwargs)
        if not compiled.is_dense:
            found = _run(compiled.plan, compiled.chunk, flat_inputs(args, kwargs))
            if found is not NOT_FINITE:
                return found
        return self._by_torch(compiled, args, kwargs)

    def _by_torch(self, compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model itself gives, which comes from its shelf for the call."""
        with self._lock:
            was_shelved = bool(self._shelf)
            with torch.inference_mode(False):  # weights outlive the call
                restore(self._model, self._shelf)
                lay_out(self._model, compiled.strides)
            try:
                with torch.no_grad():
                    return self._model(*args, **kwargs)
            finally:
                if was_shelved:
                    with torch.inference_mode(False):
                        self._shelf = shelve(self._model)

    def _in_order(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The named arguments as the forward pass lists them: a call may name them in any order."""
        if len(kwargs) < 2:
            return kwargs
        listed = list(inspect.signature(self._model.forward).parameters)
        known = {name: kwargs[name] for name in listed if name in kwargs}
        return known | {name: kwargs[name] for name in sorted(kwargs.keys() - known.keys())}

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """The way to run inputs like these, now known."""
        with self._lock:
            start = time.perf_counter()
            restore(self._model, self._shelf)
            lay_out(self._model, self._given)
            plan, chunk = self._planned(args, kwargs)
            strides, seconds, dense_seconds = self._race(plan, chunk, args, kwargs)
            is_dense = reads_memory(plan.graph) or seconds > steps.LEAST_GAIN * dense_seconds
            compiled = Compiled(plan, chunk, is_dense, seconds, dense_seconds, strides)
            if len(self._compiled) == MOST_PLANS:
                del self._compiled[next(iter(self._compiled))]
            self._compiled[_signature(args, kwargs)] = compiled
            if not any(each.is_dense for each in self._compiled.values()):
                self._shelf = shelve(self._model)
            self.seconds = time.perf_counter() - start
            return compiled

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, int | None]:
        """The plan for these inputs, and how many points it takes at a time."""
        graph, inputs = trace(self._model, args, kwargs), flat_inputs(args, kwargs)
        if reads_memory(graph):
            return whole_plan(graph), None
        chunk = chunk_size(graph, inputs)
        if chunk is not None:
            args, kwargs = pytree.tree_map(lambda x: x[:chunk], (args, kwargs))
            try:
                part = trace(self._model, args, kwargs)
            except ModelError:  # it takes no fewer points
                chunk = None
            else:
                chunk = chunk if is_same_for_fewer(graph, part, len(inputs[0]), chunk) else None
            if chunk is not None:
                graph, inputs = part, flat_inputs(args, kwargs)
        return make_plan(graph, inputs), chunk

    def _race(
        self, plan: Plan, chunk: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Strides, float, float]:
        """The memory format in which the dense network is faster, and the times of the plan and of this network."""
        inputs, is_whole = flat_inputs(args, kwargs), reads_memory(plan.graph)

        def dense() -> Any:
            with torch.inference_mode():
                return self._model(*args, **kwargs)

        times = {0: steps.dense_time(dense, TRIALS)}
        choices = [self._given] if is_whole else [self._given, *other_strides(self._model, self._given)]
        for i, strides in enumerate(choices[1:], 1):
            lay_out(self._model, strides)
            with suppress(RuntimeError):  # a forward pass may view weights or images in a way that only one format has
                dense()
                times[i] = steps.dense_time(dense, TRIALS)
        best = choices[min(times, key=times.__getitem__)]
        lay_out(self._model, best)
        return best, *steps.race(dense if is_whole else lambda: _run(plan, chunk, inputs), dense)

    @property
    def steps(self) -> list[Step]:
        """What is run, in order, for inputs of the latest shapes compiled."""
        return list(self.latest.plan.steps)

    @property
    def latest(self) -> Compiled:
        return next(reversed(self._compiled.values()))

    @property
    def n_bytes(self) -> int:
        """What the weights take: packed ones of the latest plan, and those kept for other shapes of input."""
        if self.latest.is_dense:
            return self.n_dense_bytes
        plan = self.latest.plan
        whole = (*plan.constants.values(), *self._model.parameters(), *self._model.buffers())
        once = {t.untyped_storage().data_ptr(): t.nbytes for t in whole if isinstance(t, Tensor)}
        packed = sum(step.n_bytes for step in plan.steps) + sum(kept.n_bytes for kept in self._shelf.values())
        return packed + sum(once.values())

    def __repr__(self) -> str:
        ran, dense = self.latest.seconds, self.latest.dense_seconds
        ratio = "torch runs all of it" if self.latest.is_dense else f"{dense / ran:.2f} x dense when it was compiled"
        return f"<Sparse {type(self._model).__name__}: {ratio}; print() shows what runs where>"

    def __str__(self) -> str:
        return sparse_table(self.latest.plan, self.latest, self.n_bytes, self.n_dense_bytes, self.seconds)


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a plan is made for: which arguments there are, the shapes and dtypes of tensors, the values of the rest."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return args[0].shape, args[0].dtype
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return repr(spec), *((x.shape, x.dtype) if isinstance(x, Tensor) else (type(x), x) for x in leaves)


def sparse(model: nn.Module, example: Any) -> Sparse:
    """The model as a callable that skips its zeros, on the CPU: same call, same outputs to 1e-4 of their size.

    `example` is an input like those to come: a tensor, a tuple of arguments, or a dict of keyword arguments. The model
    is left as it was; later changes of its weights are not seen. Masks that `hold` or torch.nn.utils.prune keep on it
    are zeros here. Padded tokens of an nn.TransformerEncoder, for which torch has two answers, are what it gives where
    gradients are recorded: no nested tensors, so not 0.

    Example:
        >>> import torch, sipp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> pruned = sipp.prune(model, None, keep=0.05, method="wt")
        >>> fast = sipp.sparse(pruned.model, torch.zeros(32, 64))
        >>> fast(torch.randn(32, 64)).shape
        torch.Size([32, 10])
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}, not an nn.Module", fix="give an instance")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise ModelError(
                f"is on {tensor.device}, and the runtime is for the CPU", where=name, fix="give model.cpu()"
            )
    args, kwargs = call_of(example)
    try_example(model, args, kwargs)
    return Sparse(model, args, kwargs)
