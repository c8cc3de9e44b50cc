"""A pruned network on the CPU: compiled into a plan that skips its zeros, or run by torch where that is faster."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import ModelError, warn_caller
from sipp.native import processor, pytree
from sipp.results import Speed
from sipp.runtime import timing
from sipp.runtime.chunks import chunk_size, same_but_for_batch_size
from sipp.runtime.examples import (
    cloned,
    numeric_difference,
    try_example,
)
from sipp.runtime.graph import Graph, Untraceable, trace
from sipp.runtime.packed_weights import PackedParameter, pack_parameters, unpack_parameters
from sipp.runtime.plan import CpuPlan, flat_inputs, make_plan
from sipp.runtime.steps import Compiled, left_to_torch

TRIALS = 2
SLOWER_TOGETHER = 1.1  # all threads took this many times as long as one: a warning,
LEAST_WARNED = 1e-3  # of calls that take at least this many seconds
NOT_FINITE = object()


class CpuNetwork:
    """The model, whose weights are packed while plans run all inputs, and how it is compiled."""

    kind, processor = "cpu", "CPU"
    timed = "steps were timed on one thread, the whole network on all threads"

    def __init__(self, model: nn.Module, *, always: bool) -> None:
        self.model, self._always = model, always
        self._packed: dict[str, PackedParameter] = {}
        self._compiled: list[Compiled] = []

    @property
    def tensors(self) -> list[Tensor]:
        """The model's own weights, packed or not."""
        packed = [part for kept in self._packed.values() for part in (kept.values, kept.bits)]
        return [*self.model.parameters(), *self.model.buffers(), *packed]

    def run_dense(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model with torch; results are the caller's own. Its weights stay unpacked."""
        if self._packed:
            with torch.inference_mode(False):
                unpack_parameters(self.model, self._packed)
        return run_model(self.model, args, kwargs)

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Compiled:
        """The faster of a plan and torch for inputs like these; `where` names them in errors."""
        unpack_parameters(self.model, self._packed)
        try:
            self._compiled.append(self._choose(args, kwargs, where))
            return self._compiled[-1]
        finally:  # also if the model rejects the input
            self._pack()

    def _pack(self) -> None:
        """Packs the weights, if plans run all inputs."""
        if self._compiled and not any(each.is_dense for each in self._compiled):
            held = {t.untyped_storage().data_ptr() for each in self._compiled for t in each.tensors}
            pack_parameters(self.model, held, self._packed)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Compiled:
        try_example(self.model, args, kwargs, where=where)
        dense = partial(self.run_dense, args, kwargs)
        if not processor.HAS_VECTOR_CODE:
            why = f"no vector code for {processor.PROCESSOR} processors, or NUMBA_DISABLE_JIT is set"
            return left_to_torch(self.run_dense, f"torch runs all of it: {why}", timing.dense_time(dense, TRIALS))
        try:
            graph = trace(self.model, args, kwargs)
        except Untraceable as error:
            seconds = timing.dense_time(dense, TRIALS)
            return left_to_torch(self.run_dense, f"torch runs all of it: {error.what}", seconds)
        plan, chunk = self._plan(graph, args, kwargs)
        run = partial(_run, plan, chunk, flat_inputs(args, kwargs))
        why = _why_not(run(), dense())
        faster = self._in_faster_format(args, kwargs)
        dense = partial(run_model, faster, args, kwargs)
        if why:
            return self._leave_to(faster, plan, why, timing.dense_time(dense, TRIALS))
        times = timing.race(run, dense)
        if not self._always and not timing.is_enough_faster(min(times[0]), min(times[1])):
            return self._leave_to(faster, plan, ", which is faster here", median(times[1]))
        return Compiled(
            plan.plan.steps,
            partial(self._run_plan, plan, chunk),
            is_dense=False,
            how="as above" if chunk is None else f"as above, {chunk} inputs at a time",
            seconds=median(times[0]),
            dense_seconds=median(times[1]),
            speed=Speed.of(*times, runs_dense=False).words,
            one_thread_seconds=_one_thread_seconds(run, min(times[0])),
            chunk=chunk,
            tensors=plan.tensors,
        )

    def _leave_to(self, faster: nn.Module, plan: CpuPlan, why: str, seconds: float) -> Compiled:
        """Lets torch run the network, as this module, and says why."""
        self.model = faster
        return left_to_torch(self.run_dense, f"torch runs all of it{why}", seconds, plan.plan.steps)

    def _plan(self, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CpuPlan, int | None]:
        """The plan for these inputs, and how many it runs at a time."""
        inputs = flat_inputs(args, kwargs)
        chunk = chunk_size(graph, inputs)
        if chunk is not None:
            own_args, own_kwargs = pytree.tree_map(lambda x: x[:chunk], (args, kwargs))
            with suppress(ModelError):  # it does not run on fewer points
                part = trace(self.model, own_args, own_kwargs)
                if same_but_for_batch_size(graph, part, len(inputs[0]), chunk):
                    return make_plan(part, flat_inputs(own_args, own_kwargs)), chunk
        return make_plan(graph, inputs), None

    def _in_faster_format(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
        """The model, or a copy of it in torch's other memory format, if it has convolutions that are faster there."""
        if all(parameter.ndim != 4 for parameter in self.model.parameters()):
            return self.model
        last = copy.deepcopy(self.model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with suppress(RuntimeError), torch.no_grad():  # some views work in one memory format only
            seconds = timing.dense_time(lambda: last(*args, **kwargs), TRIALS)
            if seconds < timing.dense_time(lambda: self.model(*args, **kwargs), TRIALS):
                return last
        return self.model

    def _run_plan(self, plan: CpuPlan, chunk: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = _run(plan, chunk, flat_inputs(args, kwargs))
        return self.run_dense(args, kwargs) if output is NOT_FINITE else output


@torch.no_grad()
def run_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a model with torch; results are the caller's own."""
    return cloned(model(*args, **kwargs))


def _run(plan: CpuPlan, chunk: int | None, inputs: list[Any]) -> Any:
    """The outputs of the model; NOT_FINITE if an intermediate value is not finite, so torch must run it."""
    n = len(inputs[0]) if chunk else 1
    parts = []
    for i in range(0, n, chunk or n):
        part = plan.run([x[i : i + chunk] for x in inputs] if chunk else inputs)
        if part is None:
            return NOT_FINITE
        parts.append(part)
    flat = [torch.cat(part) for part in zip(*parts)] if chunk else parts[0]
    return pytree.tree_unflatten(flat, plan.plan.graph.out_spec)


def _why_not(output: Any, expected: Any) -> str:
    """Why a plan with this output on the example cannot replace the network; empty if it can."""
    if output is NOT_FINITE:
        return ": a value inside was not finite, which only the model itself passes on"
    is_same = numeric_difference(output, expected)[1]
    return "" if is_same else ": the steps gave other outputs on the example, or the model is random"


def _one_thread_seconds(run: Callable[[], Any], together: float) -> float | None:
    """The time of a call on one thread, with a warning if more of them were slower; None if there is only one."""
    if torch.get_num_threads() == 1:
        return None
    alone = timing.best_time(run, TRIALS)
    if together > max(SLOWER_TOGETHER * alone, LEAST_WARNED):
        warn_caller(
            f"{torch.get_num_threads()} threads took {together * timing.MS:.3g} ms and one took "
            f"{alone * timing.MS:.3g}: other programs are busy, or the work is too small to share; its timings are not "
            "to be trusted. torch.set_num_threads(1) helps",
        )
    return alone
