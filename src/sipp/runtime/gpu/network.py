"""A pruned network on a CUDA GPU: skips zeros where that is faster, recorded as a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sipp.native import pytree
from sipp.runtime.examples import AGREEMENT, cloned, numeric_pairs, output_difference, try_example
from sipp.runtime.gpu import recording
from sipp.runtime.gpu.linear import LIMITS
from sipp.runtime.gpu.plan import make_plan
from sipp.runtime.graph import Graph, Untraceable, trace_unfused
from sipp.runtime.steps import Compiled, Step, left_to_torch, without_weights
from sipp.runtime.timing import MS, is_enough_faster

DEVICE = "cuda"
BY_STEPS, RECORDED = "as above, recorded", "torch runs all of it, recorded"
AS_CALLED = "torch runs all of it, as called"
HALVES = (torch.float16, torch.bfloat16)
MOST_OFF = 2  # times as far from the outputs in float32 as torch's own, beside the rounding of one product
N_ROUNDINGS = 8  # where these are not known: the allowed difference from torch's, in multiples of that rounding


class GpuNetwork:
    """The model, whose weights stay as they are, and how it is compiled."""

    processor, timed = "GPU", "steps were timed kernel by kernel, the network as a whole call"

    def __init__(self, model: nn.Module, *, always: bool) -> None:
        self.kind, self.model, self._always = DEVICE, model, always
        self.tensors = [*model.parameters(), *model.buffers()]

    def run_dense(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad(), torch.cuda.device_of(self.tensors[0]):
            return cloned(self.model(*args, **kwargs))

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Compiled:
        """Times the steps against torch, recorded and as called; the steps must be 5 % faster."""
        with torch.no_grad(), torch.cuda.device_of(self.tensors[0]):
            try_example(self.model, args, kwargs, where=where, device=DEVICE)
            try:
                graph = trace_unfused(self.model, args, kwargs)
            except Untraceable as error:  # nor is it recorded: it may depend on values
                (seconds,) = recording.race([partial(self.run_dense, args, kwargs)])
                how = f"{AS_CALLED} ({error.what}); {seconds * MS:.3f} ms per call"
                return left_to_torch(self.run_dense, how, seconds)
            return self._choose_fastest(graph, args, kwargs)

    def _choose_fastest(self, graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        inputs, spec = pytree.tree_flatten((args, kwargs))
        cast = torch.get_autocast_dtype(DEVICE) if torch.is_autocast_enabled(DEVICE) else None

        def dense(leaves: list[Any]) -> Any:
            own_args, own_kwargs = pytree.tree_unflatten(leaves, spec)
            with torch.autocast(DEVICE, dtype=cast, enabled=cast is not None, cache_enabled=False):
                return self.model(*own_args, **own_kwargs)

        def precise() -> Any:
            return _in_float32(self.model, args, kwargs)

        runners, steps, why = _runners(graph, dense, inputs, precise)
        times = dict(zip(runners, recording.race([partial(run, inputs) for run in runners.values()])))
        ours = times.pop(BY_STEPS, torch.inf)
        by_torch = min(times, key=times.__getitem__)
        dense_seconds = times[by_torch]
        is_dense = not (self._always and BY_STEPS in runners) and not is_enough_faster(ours, dense_seconds)
        name, seconds = (by_torch, dense_seconds) if is_dense else (BY_STEPS, ours)
        chosen = runners[name]
        how = f"{name} ({why})" if why else name

        def run(own_args: tuple[Any, ...], own_kwargs: dict[str, Any]) -> Any:
            with torch.no_grad(), torch.cuda.device_of(self.tensors[0]):
                return chosen(pytree.tree_leaves((own_args, own_kwargs)))

        if is_dense:
            how = f"{how}; {seconds * MS:.3f} ms per call"
            return Compiled(without_weights(steps), run, True, how, seconds, dense_seconds, "torch runs all of it")
        tensors = [tensor for step in steps for tensor in step.held]
        speed = f"{dense_seconds / seconds:.2g} x dense when it was compiled"
        return Compiled(steps, run, False, how, seconds, dense_seconds, speed, tensors=tensors)


Runner = Callable[[list[Any]], Any]  # from flat inputs to the outputs


def _runners(
    graph: Graph, dense: Runner, inputs: list[Any], precise: Callable[[], Any]
) -> tuple[dict[str, Runner], list[Step], str]:
    """The ways to run the network, by their names; the steps that were tried; and why they are not among the ways."""

    def as_called(leaves: list[Any]) -> Any:
        return cloned(dense(leaves))

    def by_steps(leaves: list[Any]) -> Any:
        with torch.autocast("cuda", enabled=False):
            return pytree.tree_unflatten(plan.run(leaves), graph.out_spec)

    runners: dict[str, Runner] = {AS_CALLED: as_called}
    steps: list[Step] = []
    try:
        runners[RECORDED] = recording.Recorded(dense, inputs)
        plan = make_plan(graph, inputs)
        steps = plan.steps
        if not any(step.held for step in steps):
            return runners, steps, ""
        recorded = recording.Recorded(by_steps, inputs)
        why = _why_different(recorded(inputs), as_called(inputs), precise())
        return runners if why else runners | {BY_STEPS: recorded}, steps, why
    except recording.kernel_errors() as error:  # not recordable, such as a value that Python waits for
        return runners, steps, f"it cannot be recorded ({str(error).splitlines()[0][:80]})"


def _in_float32(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's outputs in float32; None if it does not run so: its code may name a dtype, or memory not suffice."""
    try:
        is_wide = all(tensor.dtype not in HALVES for tensor in (*model.parameters(), *model.buffers()))
        own = model if is_wide else copy.deepcopy(model).float()
        wide_args, wide_kwargs = pytree.tree_map(_wider, cloned((args, kwargs)))
        with torch.autocast(DEVICE, enabled=False):
            return own(*wide_args, **wide_kwargs)
    except (RuntimeError, TypeError, ValueError):
        return None


def _wider(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def _why_different(outputs: Any, expected: Any, precise: Any) -> str:
    """Why the steps cannot replace the network: their outputs differ on the example; empty if they agree.

    They may be about twice as far from the outputs in float32 as torch's own are, which round in other places.
    """
    pairs = numeric_pairs(outputs, expected)
    exact = [None] * len(pairs) if precise is None else [true for _, true in numeric_pairs(expected, precise)]
    for (own, other), true in zip(pairs, exact, strict=True):
        limit = LIMITS.get(other.dtype, AGREEMENT)  # of one product
        by, most = output_difference([own], [other]), N_ROUNDINGS * limit
        rounding = torch.inf if true is None else output_difference([other], [true])
        if true is not None and rounding < torch.inf:  # else what overflows in fp16 may not in float32
            by, most = output_difference([own], [true]), limit + MOST_OFF * rounding
        if not by <= most:
            return f"its steps are {by:.0e} off on the example"
    return ""
