"""Compiles a pruned network for a CUDA GPU: skips zeros where that is faster, recorded as a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sipp.inputs.restore import ONE_AT_A_TIME, turn_off_caches
from sipp.native import pytree
from sipp.records.html import view
from sipp.runtime.examples import (
    cloned_results,
    in_signature_order,
    input_signature,
    output_difference,
    try_example,
    without_aliases,
)
from sipp.runtime.gpu import recording
from sipp.runtime.gpu.linear import AGREEMENT
from sipp.runtime.gpu.plan import make_plan
from sipp.runtime.graph import depends_on_layout, trace_unfused
from sipp.runtime.plain_copy import plain_copy
from sipp.runtime.plan_cache import PlanCache, refuse_copy
from sipp.runtime.steps import LEAST_GAIN, Step
from sipp.runtime.table import MB, MS, Labels, as_html, as_text, left_to_torch, steps_table

DEVICE = "cuda"
BY_STEPS, RECORDED = "as above, recorded", "torch runs all of it, recorded"
AS_CALLED = "torch runs all of it, as called"
N_ROUNDINGS = 8  # allowed error of a network, in multiples of that of one product


@dataclass(frozen=True)
class CompiledOnGpu:
    """How inputs of one signature are run. Steps that lost to torch keep their table row, not their weights."""

    steps: list[Step]
    run: Callable[[list[Any]], Any]
    how: str
    seconds: float  # per call from Python
    dense_seconds: float  # torch's time, recorded or not, whichever is faster
    why: str = ""  # why it was not recorded, or does not use the steps

    @property
    def is_dense(self) -> bool:
        return self.how != BY_STEPS


def _why_different(outputs: Any, expected: Any) -> str:
    """Why the steps cannot replace the network: their outputs differ on the example; empty if they agree."""
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True)
    for output, other in pairs:
        if isinstance(other, Tensor) and other.is_floating_point():
            by = output_difference([output], [other])
            if not by <= N_ROUNDINGS * AGREEMENT.get(other.dtype, AGREEMENT[torch.float32]):
                return f"its steps are {by:.0e} off on the example"
    return ""


class SparseOnGpu:
    """A network compiled for a CUDA GPU: call it like the model. `print` shows what runs where, and how fast.

    It is compiled for the shapes of the example, and again for other shapes, up to eight; for further shapes torch runs
    the dense network. Calls are launched one at a time, on the caller's stream.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
            self._model = plain_copy(model)
        turn_off_caches(self._model.modules())
        tensors = [*self._model.parameters(), *self._model.buffers()]
        self._device_tensor = tensors[0]  # gives the GPU to use
        self._compiled: PlanCache[CompiledOnGpu] = PlanCache()
        self._lock = self._compiled.lock
        self.n_dense_bytes = sum(t.nbytes for t in tensors)
        self.seconds = 0.0  # of compilation
        kwargs = in_signature_order(self._model, kwargs)
        self.latest = self._compile(input_signature(args, kwargs, DEVICE), args, kwargs)  # compiled last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = in_signature_order(self._model, kwargs)
        signature = input_signature(args, kwargs, DEVICE)
        compiled = self._compiled.plan_for(signature, lambda: self._compile(signature, args, kwargs))
        with self._lock, torch.no_grad(), torch.cuda.device_of(self._device_tensor):
            if compiled is not None:
                return compiled.run(pytree.tree_leaves((args, kwargs)))
            return cloned_results(self._model(*args, **kwargs))

    def __reduce__(self) -> Any:
        refuse_copy()

    @torch.inference_mode(False)
    def _compile(self, signature: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledOnGpu:
        """Compiles the network for inputs like these, outside of the caller's inference mode, which it outlives."""
        # always lock in this order; torch.export is not thread-safe
        with ONE_AT_A_TIME, self._lock, torch.no_grad(), torch.cuda.device_of(self._device_tensor):
            if (known := self._compiled.used(signature)) is not None:  # another thread was faster
                return known
            start = time.perf_counter()
            args, kwargs = without_aliases(args, kwargs)
            where = "the input" if len(self._compiled) else "the example"
            try_example(self._model, args, kwargs, where=where, device=DEVICE)
            self.latest = self._choose_fastest(args, kwargs)
            self._compiled.put(signature, self.latest)
            self.seconds = time.perf_counter() - start
            return self.latest

    def _choose_fastest(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledOnGpu:
        """Times the steps against torch, recorded and as called; the steps must be 5 % faster."""
        graph = trace_unfused(self._model, args, kwargs)
        inputs, spec = pytree.tree_flatten((args, kwargs))
        cast = torch.get_autocast_dtype(DEVICE) if torch.is_autocast_enabled(DEVICE) else None

        def dense(leaves: list[Any]) -> Any:
            own_args, own_kwargs = pytree.tree_unflatten(leaves, spec)
            with torch.autocast(DEVICE, dtype=cast, enabled=cast is not None, cache_enabled=False):
                return self._model(*own_args, **own_kwargs)

        def as_called(leaves: list[Any]) -> Any:
            return cloned_results(dense(leaves))

        runners: dict[str, Callable[[list[Any]], Any]] = {AS_CALLED: as_called}
        steps, why = [], ""
        try:
            runners[RECORDED] = recording.Recorded(dense, inputs)
            if depends_on_layout(graph):
                why = "an operation takes values as they lie in memory"
            else:
                plan = make_plan(graph, inputs)
                steps = plan.steps
                by_steps = recording.Recorded(plan.run, inputs) if any(step.held for step in steps) else None
                if by_steps is not None and not (why := _why_different(by_steps(inputs), as_called(inputs))):
                    runners[BY_STEPS] = by_steps
        except recording.kernel_errors() as error:  # not recordable, such as a value that Python waits for
            why = f"it cannot be recorded ({str(error).splitlines()[0][:80]})"
        times = dict(zip(runners, recording.race([partial(run, inputs) for run in runners.values()])))
        dense_seconds = min(times[name] for name in runners if name != BY_STEPS)
        name = min((name for name in runners if name != BY_STEPS), key=times.__getitem__)
        if times.get(BY_STEPS, dense_seconds) <= LEAST_GAIN * dense_seconds:
            name = BY_STEPS
        kept = steps if name == BY_STEPS else [replace(step, run=lambda values: None, held=()) for step in steps]
        return CompiledOnGpu(kept, runners[name], name, times[name], dense_seconds, why)

    @property
    def steps(self) -> list[Step]:
        """The steps for the input shapes compiled last, in order."""
        return list(self.latest.steps)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights: the model's own, kept for other input shapes, and the packed ones."""
        held = {t.data_ptr(): t.nbytes for each in self._compiled.all() for s in each.steps for t in s.held}
        return self.n_dense_bytes + sum(held.values())

    def __repr__(self) -> str:
        ran, dense = self.latest.seconds, self.latest.dense_seconds
        ratio = "torch runs all of it" if self.latest.is_dense else f"{dense / ran:.2g} x dense when it was compiled"
        return f"<SparseOnGpu {type(self._model).__name__}: {ratio}; print() shows what runs where>"

    def __str__(self) -> str:
        return as_text(steps_table(self.latest.steps, with_notes=True), self._labels())

    def _repr_html_(self) -> str:
        shown = as_html(steps_table(self.latest.steps, with_notes=True), self._labels())
        return view(f"{type(self._model).__name__}, compiled for this GPU", shown)

    def _labels(self) -> Labels:
        latest = self.latest
        why = f" ({latest.why})" if latest.why else ""
        times = f"{latest.seconds * MS:.3f} ms per call, torch {latest.dense_seconds * MS:.3f} ms"
        memory = (
            f"{self.n_bytes / MB:.2f} MB with the dense ones for other shapes, dense {self.n_dense_bytes / MB:.2f} MB"
        )
        return (
            ("left to torch", left_to_torch(latest.steps)),
            ("network", f"{latest.how}{why}; {times} ({latest.dense_seconds / latest.seconds:.2g} x)"),
            ("weights", memory),
            (
                "compiled in",
                f"{self.seconds:.1f} s; steps were timed kernel by kernel, the network as a whole call",
            ),
        )
