"""`sparse(model, example)`: compiles a pruned network into a callable that skips its zeros."""

from __future__ import annotations

import time
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs.restore import ONE_AT_A_TIME, turn_off_caches
from sipp.native import pytree
from sipp.records.html import view
from sipp.records.pruned_to import NetworkLike, network_of
from sipp.records.speed import speed_of, speed_words
from sipp.runtime import steps
from sipp.runtime.chunks import chunk_size, same_but_for_batch_size
from sipp.runtime.examples import (
    call_of,
    cloned_results,
    in_signature_order,
    input_signature,
    output_difference,
    rounding_tolerance,
    try_example,
    without_aliases,
)
from sipp.runtime.gpu.network import SparseOnGpu
from sipp.runtime.graph import depends_on_layout, trace
from sipp.runtime.model_weights import (
    PackedParameter,
    Strides,
    conv_strides,
    other_formats,
    pack_parameters,
    set_strides,
    unpack_parameters,
)
from sipp.runtime.plain_copy import plain_copy
from sipp.runtime.plan import Plan, flat_inputs, make_plan, torch_plan, without_weights
from sipp.runtime.plan_cache import Compiled, PlanCache, refuse_copy
from sipp.runtime.steps import Step
from sipp.runtime.table import Labels, as_html, as_text, steps_table, summary_labels

TRIALS = 2
NOT_FINITE = object()


def _run(plan: Plan, chunk: int | None, inputs: list[Any]) -> Any:
    """The outputs of the model; NOT_FINITE if an intermediate value is not finite, so torch must run it."""
    n, parts = len(inputs[0]) if chunk else 1, []
    for i in range(0, n, chunk or n):
        part = plan.run([x[i : i + chunk] for x in inputs] if chunk else inputs)
        if part is None:
            return NOT_FINITE
        parts.append(part)
    flat = [torch.cat(part) for part in zip(*parts)] if chunk else parts[0]
    return pytree.tree_unflatten(flat, plan.graph.out_spec)


class Sparse:
    """A network compiled for the CPU: call it like the model. `print` shows what runs where, and how fast.

    It is compiled for the shapes of the example, and again for other shapes, up to eight (`plan_cache.py`); for further
    shapes torch runs the dense network. Calls are thread-safe but serialised.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
            self._model = plain_copy(model)
        turn_off_caches(self._model.modules())
        self._original_strides = self._current_strides = conv_strides(self._model)
        self._packed: dict[str, PackedParameter] = {}
        self._compiled: PlanCache[Compiled] = PlanCache()
        self._lock = self._compiled.lock
        self._was_finite = True  # in the previous call
        self.n_dense_bytes = sum(t.nbytes for t in (*self._model.parameters(), *self._model.buffers()))
        self.seconds = 0.0  # spent compiling
        kwargs = in_signature_order(self._model, kwargs)
        self.latest = self._compile(input_signature(args, kwargs, "cpu"), args, kwargs)  # compiled last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = in_signature_order(self._model, kwargs)
        signature = input_signature(args, kwargs, "cpu")
        compiled = self._compiled.plan_for(signature, lambda: self._compile(signature, args, kwargs))
        if compiled is None or compiled.is_dense:
            return self._run_dense(self._original_strides if compiled is None else compiled.strides, args, kwargs)
        output = _run(compiled.plan, compiled.chunk, flat_inputs(args, kwargs))
        if output is NOT_FINITE:
            with self._lock:
                output = self._run_dense(self._original_strides, args, kwargs)
                if self._was_finite:  # stay unpacked if this happens in consecutive calls
                    self._pack()
                self._was_finite = False
            return output
        self._was_finite = True
        return output

    def __reduce__(self) -> Any:
        refuse_copy()

    def _run_dense(self, strides: Strides, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model with torch; the returned tensors are copies that the caller may keep."""
        with self._lock, torch.no_grad():  # another thread that compiles would move the weights
            self._unpack(strides)
            return cloned_results(self._model(*args, **kwargs))

    @torch.inference_mode(False)
    def _unpack(self, strides: Strides) -> None:
        """Restores the weights of the model in this memory format, unless they are already."""
        if self._packed or self._current_strides is not strides:
            unpack_parameters(self._model, self._packed)
            set_strides(self._model, strides)
            self._current_strides = strides

    @torch.inference_mode(False)
    def _pack(self) -> None:
        """Packs the weights that no plan holds, unless torch runs the network for some inputs."""
        if not self._compiled.has_overflowed and not any(each.is_dense for each in self._compiled.all()):
            held = {t.untyped_storage().data_ptr() for each in self._compiled.all() for t in each.plan.tensors}
            self._packed |= pack_parameters(self._model, held)  # some may still be packed, after an out-of-memory error

    @torch.inference_mode(False)
    def _compile(self, signature: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """Compiles the network for inputs like these, outside of the caller's inference mode, which it outlives."""
        with ONE_AT_A_TIME, self._lock:  # always in this order; torch.export is not thread-safe
            if (known := self._compiled.used(signature)) is not None:  # another thread was faster
                return known
            start = time.perf_counter()
            args, kwargs = without_aliases(args, kwargs)
            try:
                self._unpack(self._original_strides)
                try_example(self._model, args, kwargs, where="the input" if len(self._compiled) else "the example")
                plan, chunk = self._make_plan(args, kwargs)
                self.latest = self._choose_fastest(plan, chunk, args, kwargs)
                self._compiled.put(signature, self.latest)
            finally:  # also if the model rejects the input
                self._pack()
            self.seconds = time.perf_counter() - start
            return self.latest

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, int | None]:
        """The plan for these inputs, and its chunk size."""
        graph, inputs = trace(self._model, args, kwargs), flat_inputs(args, kwargs)
        if depends_on_layout(graph):
            return torch_plan(graph), None
        chunk = chunk_size(graph, inputs)
        if chunk is not None:
            args, kwargs = pytree.tree_map(lambda x: x[:chunk], (args, kwargs))
            try:
                part = trace(self._model, args, kwargs)
            except ModelError:  # it does not run on fewer points
                chunk = None
            else:
                chunk = chunk if same_but_for_batch_size(graph, part, len(inputs[0]), chunk) else None
            if chunk is not None:
                graph, inputs = part, flat_inputs(args, kwargs)
        return make_plan(graph, inputs), chunk

    def _choose_fastest(self, plan: Plan, chunk: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """Times the plan against the dense network, whose weights are left in the faster memory format if it wins."""
        inputs, is_whole = flat_inputs(args, kwargs), depends_on_layout(plan.graph)
        before = {name: parameter.data for name, parameter in self._model.named_parameters()}  # shared with the plan
        choices = (
            [self._original_strides]
            if is_whole
            else [self._original_strides, *other_formats(self._model, self._original_strides)]
        )
        ways = [partial(self._run_dense, strides, args, kwargs) for strides in choices]
        times = {0: steps.dense_time(ways[0], TRIALS)}
        for i, dense in enumerate(ways[1:], 1):
            with suppress(RuntimeError):  # some views work in one memory format only
                dense()
                times[i] = steps.dense_time(dense, TRIALS)
        best = min(times, key=times.__getitem__)
        output = NOT_FINITE if is_whole else _run(plan, chunk, inputs)
        is_finite = is_whole or output is not NOT_FINITE
        is_same = output is NOT_FINITE or _is_same(output, ways[0]())
        is_raced = is_finite and is_same and not is_whole
        raced = steps.race((lambda: _run(plan, chunk, inputs)) if is_raced else ways[best], ways[best])
        is_dense = not is_raced or min(raced[0]) > steps.LEAST_GAIN * min(raced[1])
        if not is_dense or best == 0:
            for name, parameter in self._model.named_parameters():
                parameter.data = before[name]
            self._current_strides = self._original_strides
        kept = without_weights(plan) if is_dense else plan
        timed = median(raced[0]), median(raced[1]), speed_of(*raced)
        return Compiled(kept, chunk, is_dense, is_finite, is_same, *timed, choices[best])

    @property
    def steps(self) -> list[Step]:
        """The steps for the input shapes compiled last, in order."""
        return list(self.latest.plan.steps)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights in memory: those of every plan, and those kept for other input shapes."""
        with self._lock:
            plans = [each.plan for each in self._compiled.all() if not each.is_dense]
            whole = [*self._model.parameters(), *self._model.buffers(), *(t for plan in plans for t in plan.tensors)]
            once = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in whole}
            packed = sum(plan.n_packed_bytes for plan in plans) + sum(kept.n_bytes for kept in self._packed.values())
            return packed + sum(once.values())

    def __repr__(self) -> str:
        speed = speed_words(self.latest.speed, runs_dense=self.latest.is_dense)
        return f"<Sparse {type(self._model).__name__}: {speed}; print() shows what runs where>"

    def __str__(self) -> str:
        return as_text(steps_table(self.steps), self._labels())

    def _repr_html_(self) -> str:
        shown = as_html(steps_table(self.steps), self._labels())
        return view(f"{type(self._model).__name__}, compiled for this CPU", shown)

    def _labels(self) -> Labels:
        return summary_labels(self.latest.plan, self.latest, self.n_bytes, self.n_dense_bytes, self.seconds)


def _is_same(outputs: Any, expected: Any) -> bool:
    """Whether all floating-point outputs agree up to rounding; integers are not compared, rounding may decide them."""
    for output, other in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(expected), strict=True):
        is_real = isinstance(other, Tensor) and (other.is_floating_point() or other.is_complex())
        if is_real and not output_difference([output], [other]) <= rounding_tolerance([other]):
            return False
    return True


@torch.inference_mode(False)
def sparse(model: NetworkLike, example: Any) -> Sparse | SparseOnGpu:
    """Compiles the model to skip its zeros, on the CPU or a CUDA GPU: same call, same outputs up to rounding.

    It runs on the model's device: in float32 on the CPU, to within 1e-4 of an output's size; in float32, fp16 or bf16
    on a GPU. `model` is a network, or a result of `prune` or `prune_to`. `example` is an input like those you will use:
    a tensor, a tuple of arguments, or a dict of keyword arguments. The model is not changed, and later changes to its
    weights have no effect. Weights masked by `hold` or torch.nn.utils.prune count as zeros. At padded tokens of an
    nn.TransformerEncoder, outputs are those that torch computes with gradients, not the zeros of its nested tensors.

    Example:
        >>> import torch, sipp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> pruned = sipp.prune(model, None, keep=0.05, method="wt")
        >>> fast = sipp.sparse(pruned.model, torch.zeros(32, 64))
        >>> fast(torch.randn(32, 64)).shape
        torch.Size([32, 10])
    """
    model = network_of(model)
    devices = {t.device: name for name, t in (*model.named_parameters(), *model.named_buffers())}
    if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", "cuda"}:
        name, device = next((name, device) for device, name in devices.items() if device.type != "cpu")
        raise ModelError(
            f"is on {device}, and the runtime is for one device, the CPU or a CUDA GPU", where=name,
            fix="give model.cpu() or model.cuda()",
        )  # fmt: skip
    if any(device.type == "cuda" for device in devices):
        return SparseOnGpu(model, *call_of(example))
    return Sparse(model, *call_of(example))
