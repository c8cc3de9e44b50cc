"""`sparse(model, example)`: compiles a pruned network into a callable that skips its zeros."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from sipp.errors import ModelError
from sipp.inputs import ONE_AT_A_TIME, turn_off_caches
from sipp.results import NetworkLike, Sheet, check, network_of, shown
from sipp.runtime.copying import plain_copy, turn_off_fused_attention
from sipp.runtime.cpu_network import CpuNetwork
from sipp.runtime.examples import call_of, in_signature_order, input_signature, without_aliases
from sipp.runtime.gpu.network import GpuNetwork
from sipp.runtime.plan_cache import Compiled, PlanCache
from sipp.runtime.steps import Step
from sipp.runtime.table import steps_table, summary_labels


class Device(Protocol):
    """A model on the CPU or a GPU. One thread calls it at a time."""

    kind: str  # torch's name of the device
    processor: str  # "CPU" or "GPU"
    timed: str  # how steps and networks are timed

    @property
    def n_packed_bytes(self) -> int:
        """Bytes of the model's own weights that are packed."""

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Compiled:
        """The fastest way to run inputs like these; `where` names them in errors."""

    def run_dense(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model with torch; results are the caller's own."""

    def pack(self) -> None:
        """Frees weights that no later call needs as they are; called after each compilation."""


@shown
class Sparse:
    """A compiled network: call it like the model. `print` shows what runs where, and how fast.

    It is compiled for the shapes of the example, and again for other shapes, up to eight (`plan_cache.py`); for further
    shapes torch runs the dense network. Calls are thread-safe but serialised; on a GPU they are launched one at a time,
    on the caller's stream.
    """

    def __init__(
        self, make: Callable[[nn.Module, PlanCache], Device], model: nn.Module, args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
            self._model = plain_copy(model)
        turn_off_caches(self._model.modules())
        turn_off_fused_attention(self._model)
        self._plans = PlanCache()
        self._device = make(self._model, self._plans)
        self.n_dense_bytes = sum(t.nbytes for t in (*self._model.parameters(), *self._model.buffers()))
        self.seconds = 0.0  # spent compiling
        kwargs = in_signature_order(self._model, kwargs)
        self.latest = self._compile(input_signature(args, kwargs, self._device.kind), args, kwargs)  # compiled last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = in_signature_order(self._model, kwargs)
        signature = input_signature(args, kwargs, self._device.kind)
        compiled = self._plans.plan_for(signature, lambda: self._compile(signature, args, kwargs))
        with self._plans.lock:  # another thread that compiles would move the weights
            return (self._device.run_dense if compiled is None else compiled.run)(args, kwargs)

    def __reduce__(self) -> Any:
        raise ModelError(
            "a compiled network can be neither copied nor pickled: it is compiled for this process",
            fix="share it, any number of threads may call it; elsewhere call sipp.sparse on the model again",
        )

    @torch.inference_mode(False)
    def _compile(self, signature: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """Compiles the network for inputs like these, outside of the caller's inference mode, which it outlives."""
        with ONE_AT_A_TIME, self._plans.lock:  # always in this order; torch.export is not thread-safe
            if (known := self._plans.used(signature)) is not None:  # another thread was faster
                return known
            start = time.perf_counter()
            args, kwargs = without_aliases(args, kwargs)
            try:
                self.latest = self._device.compile(args, kwargs, "the input" if len(self._plans) else "the example")
                self._plans.put(signature, self.latest)
            finally:  # also if the model rejects the input
                self._device.pack()
            self.seconds = time.perf_counter() - start
            return self.latest

    @property
    def steps(self) -> list[Step]:
        """The steps for the input shapes compiled last, in order."""
        return list(self.latest.steps)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights in memory: those of every plan, and those kept for other input shapes."""
        with self._plans.lock:
            plans = self._plans.all()
            whole = [*self._model.parameters(), *self._model.buffers(), *(t for plan in plans for t in plan.tensors)]
            once = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in whole}
            return sum(once.values()) + self._device.n_packed_bytes + sum(plan.n_packed_bytes for plan in plans)

    def __repr__(self) -> str:
        return f"<Sparse {type(self._model).__name__}: {self.latest.speed}; print() shows what runs where>"

    @property
    def sheet(self) -> Sheet:
        title = f"{type(self._model).__name__}, compiled for this {self._device.processor}"
        facts = summary_labels(self.latest, self.n_bytes, self.n_dense_bytes, self.seconds, self._device.timed)
        return Sheet(title, facts, (steps_table(self.steps, with_notes=self._device.processor == "GPU"),))


@torch.inference_mode(False)
def sparse(model: NetworkLike, example: Any, *, always: bool = False) -> Sparse:
    """Compiles the model to skip its zeros, on the CPU or a CUDA GPU: same call, same outputs up to rounding.

    It runs on the model's device: in float32 on the CPU, to within 1e-4 of an output's size; in float32, fp16 or bf16
    on a GPU. `model` is a network, or a result of `prune` or `prune_to`. `example` is an input like those you will use:
    a tensor, a tuple of arguments, or a dict of keyword arguments. The model is not changed, and later changes to its
    weights have no effect. Weights masked by `hold` or torch.nn.utils.prune count as zeros. At padded tokens of an
    nn.TransformerEncoder, outputs are those that torch computes with gradients, not the zeros of its nested tensors.
    What torch.export cannot trace is left to torch; a model that writes to its weights, buffers or inputs is refused.
    torch also runs the network where it was faster on the example; `always=True` skips the zeros even then.

    Example:
        >>> import torch, sipp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> pruned = sipp.prune(model, None, keep=0.05, method="magnitude")
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
    check.flag("always", always)
    make = GpuNetwork if any(device.type == "cuda" for device in devices) else CpuNetwork
    return Sparse(partial(make, always=always), model, *call_of(example))
