"""A pruned network on the CPU: compiled into a plan that skips its zeros, or run by torch where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from sipp.errors import DataError, ModelError, warn_caller
from sipp.native import pytree
from sipp.results import speed_of
from sipp.runtime import steps
from sipp.runtime.chunks import chunk_size, same_but_for_batch_size
from sipp.runtime.cpu_plan import CpuPlan, flat_inputs, make_plan
from sipp.runtime.examples import (
    check_wrote_nothing,
    cloned_results,
    numeric_pairs,
    output_difference,
    rounding_tolerance,
    try_example,
)
from sipp.runtime.graph import Graph, Untraceable, depends_on_layout, trace
from sipp.runtime.model_weights import (
    PackedParameter,
    Strides,
    conv_strides,
    other_formats,
    pack_parameters,
    set_strides,
    unpack_parameters,
)
from sipp.runtime.plan_cache import Compiled, PlanCache, left_to_torch
from sipp.runtime.shrinking.constant_channels import has_same_numbers, without_constant_channels
from sipp.runtime.steps import Step, torch_step, without_weights

TRIALS = 2
SLOWER_TOGETHER = 1.1  # all threads took this many times as long as one: a warning,
LEAST_WARNED = 1e-3  # of calls that take at least this many seconds
NOT_FINITE = object()
Times = tuple[list[float], list[float]]  # seconds of each call: of what was tried, and of torch


@dataclass(frozen=True)
class Attempt:
    """A plan that may run the network in place of torch, and how it did on the example."""

    steps: list[Step]
    why_not: str  # why it cannot replace torch; empty if it can
    plan: CpuPlan | None = None  # None: its steps are torch's, only to be shown
    chunk: int | None = None  # points at a time; None: all
    is_smaller: bool = False  # whether constant channels were removed
    run: Callable[[], Any] | None = None  # on the example, if it can replace torch


def _run(plan: CpuPlan, chunk: int | None, inputs: list[Any]) -> Any:
    """The outputs of the model; NOT_FINITE if an intermediate value is not finite, so torch must run it."""
    n, parts = len(inputs[0]) if chunk else 1, []
    for i in range(0, n, chunk or n):
        part = plan.run([x[i : i + chunk] for x in inputs] if chunk else inputs)
        if part is None:
            return NOT_FINITE
        parts.append(part)
    flat = [torch.cat(part) for part in zip(*parts)] if chunk else parts[0]
    return pytree.tree_unflatten(flat, plan.plan.graph.out_spec)


class CpuNetwork:
    """The model, whose weights are packed while plans run all inputs, and how it is compiled (see `Device`)."""

    kind, processor = "cpu", "CPU"
    timed = "steps were timed on one thread, the whole network on all threads"

    def __init__(self, model: nn.Module, plans: PlanCache, *, always: bool) -> None:
        self._model, self._plans, self._always = model, plans, always
        self._original_strides = self._current_strides = conv_strides(model)
        self._packed: dict[str, PackedParameter] = {}
        self._was_finite = True  # in the previous call

    @property
    def n_packed_bytes(self) -> int:
        return sum(kept.n_bytes for kept in self._packed.values())

    def run_dense(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run_in(self._original_strides, args, kwargs)

    def _run_in(self, strides: Strides, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model with torch; the returned tensors are copies that the caller may keep."""
        with torch.no_grad():
            self._unpack(strides)
            return cloned_results(self._model(*args, **kwargs))

    def _run_plan(self, plan: CpuPlan, chunk: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = _run(plan, chunk, flat_inputs(args, kwargs))
        if output is NOT_FINITE:
            output = self.run_dense(args, kwargs)
            if self._was_finite:  # stay unpacked if this happens in consecutive calls
                self.pack()
            self._was_finite = False
        else:
            self._was_finite = True
        return output

    @torch.inference_mode(False)
    def _unpack(self, strides: Strides) -> None:
        """Restores the weights of the model in this memory format, unless they are already."""
        if self._packed or self._current_strides is not strides:
            unpack_parameters(self._model, self._packed)
            set_strides(self._model, strides)
            self._current_strides = strides

    @torch.inference_mode(False)
    def pack(self) -> None:
        """Packs the weights that no plan holds, unless torch runs the network for some inputs."""
        plans = self._plans.all()
        if not self._plans.has_overflowed and not any(each.is_dense for each in plans):
            held = {t.untyped_storage().data_ptr() for each in plans for t in each.tensors}
            pack_parameters(self._model, held, self._packed)  # some may still be packed, after an out-of-memory error

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Compiled:
        """Times the plan against the dense network, whose weights are left in the faster memory format if it wins."""
        self._unpack(self._original_strides)
        check_wrote_nothing(try_example(self._model, args, kwargs, where=where), self._model)
        try:
            graph = trace(self._model, args, kwargs)
        except Untraceable as error:
            seconds = steps.dense_time(partial(self.run_dense, args, kwargs), TRIALS)
            return left_to_torch(self.run_dense, f"torch runs all of it: {error.what}", seconds)
        attempt = self._attempt(graph, args, kwargs)
        shared = {name: parameter.data for name, parameter in self._model.named_parameters()}  # with the plan
        strides = self._fastest_strides(graph, args, kwargs)
        dense = partial(self._run_in, strides, args, kwargs)
        times = steps.race(attempt.run or dense, dense)
        why = attempt.why_not
        if not why and not self._always and not steps.is_enough_faster(min(times[0]), min(times[1])):
            why = ", which is faster here"
        if not why or strides is self._original_strides:
            for name, parameter in self._model.named_parameters():
                parameter.data = shared[name]
            self._current_strides = self._original_strides
        return self._compiled(attempt, why, strides, times, None if why else _one_thread_seconds(attempt.run, times[0]))

    def _attempt(self, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attempt:
        """A plan without constant channels if that gives the same outputs, else of all channels."""
        if depends_on_layout(graph):
            why_not = ": an operation depends on the memory layout"
            return Attempt([torch_step(op) for op in graph.ops], why_not)
        small = self._smaller(graph, args, kwargs)
        attempt = None if small is None else self._attempt_with(*small, args, kwargs)
        if attempt is not None and not attempt.why_not:
            return attempt
        return self._attempt_with(self._model, graph, args, kwargs)

    def _smaller(self, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[nn.Module, Graph] | None:
        """The network without constant channels, and its graph; None if there are none that could be removed."""
        with suppress(DataError, ModelError, RuntimeError):  # code that knows the number of channels may not run
            small = without_constant_channels(self._model, args, kwargs)
            if small is not None:
                try_example(small, args, kwargs)
                small_graph = trace(small, args, kwargs)
                return (small, small_graph) if has_same_numbers(small_graph, graph) else None
        return None

    def _attempt_with(self, model: nn.Module, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attempt:
        """The plan of this network, which is the model or smaller, compared with the model on the example."""
        is_smaller = model is not self._model
        plan, chunk = _make_plan(model, graph, args, kwargs, checks_all=is_smaller)
        run = partial(_run, plan, chunk, flat_inputs(args, kwargs))
        why_not = _why_not(run(), partial(self.run_dense, args, kwargs))
        return Attempt(plan.plan.steps, why_not, plan, chunk, is_smaller, None if why_not else run)

    def _compiled(
        self, attempt: Attempt, why_dense: str, strides: Strides, times: Times, one_thread_seconds: float | None
    ) -> Compiled:
        """The record of what runs: the plan, or torch if there is a reason why."""
        plan, chunk = attempt.plan, attempt.chunk
        medians = median(times[0]), median(times[1])
        speed = speed_of(*times, runs_dense=bool(why_dense)).words
        if why_dense or plan is None:
            how, run = f"torch runs all of it{why_dense}", partial(self._run_in, strides)
            return Compiled(without_weights(attempt.steps), run, True, how, *medians, speed, chunk=chunk)
        how = f"as above{', without constant channels' if attempt.is_smaller else ''}"
        how = how if chunk is None else f"{how}, {chunk} inputs at a time"
        run = partial(self._run_plan, plan, chunk)
        return Compiled(
            attempt.steps, run, False, how, *medians, speed, one_thread_seconds, chunk, plan.tensors,
            plan.n_packed_bytes, plan.arena.n_bytes,
        )  # fmt: skip

    def _fastest_strides(self, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Strides:
        """The memory format of convolution weights in which torch is fastest: the model's own, or another."""
        original = self._original_strides
        others = [] if depends_on_layout(graph) else other_formats(self._model, original)
        times = [(steps.dense_time(partial(self._run_in, original, args, kwargs), TRIALS), original)]
        for strides in others:
            with suppress(RuntimeError):  # some views work in one memory format only
                self._run_in(strides, args, kwargs)
                times.append((steps.dense_time(partial(self._run_in, strides, args, kwargs), TRIALS), strides))
        return min(times, key=lambda timed: timed[0])[1]


def _one_thread_seconds(run: Callable[[], Any] | None, times: Sequence[float]) -> float | None:
    """The time of a call on one thread, with a warning if more of them were slower; None if there is only one."""
    if run is None or torch.get_num_threads() == 1:
        return None
    alone = steps.best_time(run, TRIALS)
    if min(times) > max(SLOWER_TOGETHER * alone, LEAST_WARNED):
        warn_caller(
            f"{torch.get_num_threads()} threads took {min(times) * steps.MS:.3g} ms and one took "
            f"{alone * steps.MS:.3g}: other programs are busy, or the work is too small to share; its timings are not "
            "to be trusted. torch.set_num_threads(1) helps",
        )
    return alone


def _make_plan(
    model: nn.Module, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], *, checks_all: bool
) -> tuple[CpuPlan, int | None]:
    """The plan for these inputs, and its chunk size."""
    inputs = flat_inputs(args, kwargs)
    chunk = chunk_size(graph, inputs)
    if chunk is not None:
        args, kwargs = pytree.tree_map(lambda x: x[:chunk], (args, kwargs))
        with suppress(DataError, ModelError):  # it does not run on fewer points
            try_example(model, args, kwargs)  # fills caches, which must not keep the values of a trace
            part = trace(model, args, kwargs)
            if same_but_for_batch_size(graph, part, len(inputs[0]), chunk):
                return make_plan(part, flat_inputs(args, kwargs), checks_all=checks_all), chunk
    return make_plan(graph, inputs, checks_all=checks_all), None


def _why_not(output: Any, dense: Callable[[], Any]) -> str:
    """Why a plan with this output on the example cannot replace the network; empty if it can."""
    if output is NOT_FINITE:
        return ": a value inside was not finite, which only the model itself passes on"
    for own, other in numeric_pairs(output, dense()):
        if not output_difference([own], [other]) <= rounding_tolerance([other]):
            return ": the steps gave other outputs on the example, or the model is random"
    return ""
