"""`sparse(model, example)`: compiles a pruned network into a callable that skips its zeros."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Hashable
from typing import Any

import torch

from sipp.errors import ModelError
from sipp.inputs import ONE_AT_A_TIME, turn_off_caches
from sipp.results import NetworkLike, Sheet, Table, check, network_of, shown
from sipp.runtime.copying import plain_copy, turn_off_fused_attention
from sipp.runtime.cpu_network import CpuNetwork
from sipp.runtime.examples import call_of, in_signature_order, input_signature, without_aliases
from sipp.runtime.gpu.network import GpuNetwork
from sipp.runtime.steps import Compiled, Step, bytes_in_memory
from sipp.runtime.timing import MS

MB = 1e6
MOST_PLANS = 8
TOO_MANY = (
    f"more than {MOST_PLANS} kinds of input (shapes, or numbers among the arguments): torch runs the others, dense; "
    "pad inputs to fewer shapes, and pass numbers that change as tensors"
)


@shown
class Sparse:
    """A compiled network: call it like the model. `print` shows what runs where, and how fast.

    It is compiled for the shapes of the example, and again for other shapes, up to eight; for further shapes torch runs
    the dense network. Calls are thread-safe but serialised; on a GPU they are launched one at a time, on the caller's
    stream.
    """

    def __init__(self, device: CpuNetwork | GpuNetwork, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._device, self._lock = device, threading.RLock()
        self._plans: dict[Hashable, Compiled] = {}  # by kind of input
        self._has_overflowed = False
        self.n_dense_bytes = sum(tensor.nbytes for tensor in device.tensors)
        self.seconds = 0.0  # spent compiling
        kwargs = in_signature_order(device.model, kwargs)
        self.latest: Compiled  # compiled last
        self._compile(input_signature(args, kwargs, device.kind), args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = in_signature_order(self._device.model, kwargs)
        signature = input_signature(args, kwargs, self._device.kind)
        compiled = self._plans.get(signature) or self._compile(signature, args, kwargs)
        with self._lock:  # another thread that compiles would move the weights
            if compiled is None and not self._has_overflowed:
                self._has_overflowed = True
                warnings.warn(TOO_MANY, stacklevel=2)
            return (self._device.run_dense if compiled is None else compiled.run)(args, kwargs)

    def __reduce__(self) -> Any:
        raise ModelError(
            "a compiled network cannot be copied or pickled",
            fix="share it, any number of threads may call it; elsewhere call sipp.sparse on the model again",
        )

    @torch.inference_mode(False)
    def _compile(self, signature: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled | None:
        """Compiles the network for inputs like these, outside of the caller's inference mode, which it outlives.

        None if there are as many plans as there may be.
        """
        if len(self._plans) == MOST_PLANS:  # plans are only added: no need to wait for other threads
            return self._plans.get(signature)
        with ONE_AT_A_TIME, self._lock:  # always in this order; torch.export is not thread-safe
            if signature not in self._plans and len(self._plans) < MOST_PLANS:  # other threads may have been faster
                start = time.perf_counter()
                where = "the input" if self._plans else "the example"
                self.latest = self._device.compile(*without_aliases(args, kwargs), where)
                self._plans[signature] = self.latest
                self.seconds = time.perf_counter() - start
            return self._plans.get(signature)

    @property
    def steps(self) -> list[Step]:
        """The steps for the input shapes compiled last, in order."""
        return list(self.latest.steps)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights in memory: those of every plan, and those kept for other input shapes."""
        with self._lock:
            plans = self._plans.values()
            return bytes_in_memory([*self._device.tensors, *(tensor for plan in plans for tensor in plan.tensors)])

    def __repr__(self) -> str:
        return f"<Sparse {type(self._device.model).__name__}: {self.latest.speed}; print() shows what runs where>"

    @property
    def sheet(self) -> Sheet:
        """The steps, what runs and how fast, and how much memory the weights take."""
        compiled, processor = self.latest, self._device.processor
        times = f"{compiled.seconds * MS:.3f} ms per call, torch {compiled.dense_seconds * MS:.3f} ms"
        if compiled.one_thread_seconds is not None:
            times += f" (one thread {compiled.one_thread_seconds * MS:.3f} ms)"
        memory = f"{self.n_bytes / MB:.2f} MB, dense {self.n_dense_bytes / MB:.2f} MB"
        kinds = ", ".join(sorted({step.name.rstrip("_0123456789") for step in compiled.steps if step.by == "torch"}))
        kinds += "" if compiled.is_dense or not kinds else "; torch runs these as before, sipp the other steps"
        facts = (
            ("left to torch", (kinds or "nothing") if compiled.steps else "everything"),
            ("network", compiled.how if compiled.is_dense else f"{compiled.how}; {times}: {compiled.speed}"),
            ("weights", memory),
            ("compiled in", f"{self.seconds:.1f} s; {self._device.timed}"),
        )
        title = f"{type(self._device.model).__name__}, compiled for this {processor}"
        return Sheet(title, facts, (_steps_table(self.steps, with_notes=processor == "GPU"),))


def _steps_table(steps: list[Step], *, with_notes: bool) -> Table:
    """One line per step with weights, and, with notes, per step left to torch for a reason."""
    columns = (
        "node",
        "kernel",
        "kept",
        "kB dense",
        "kB sparse",
        "ms torch",
        "ms sparse",
        *(["why"] if with_notes else []),
    )
    rows = tuple(
        (
            step.name,
            step.kernel or step.by,
            step.keep,
            *(n / 1e3 if n else None for n in (step.n_dense_bytes, step.n_bytes)),
            *(None if t is None else t * MS for t in (step.dense_seconds, step.seconds)),
            *([step.note] if with_notes else []),
        )
        for step in steps
        if step.n_dense_bytes or step.note
    )
    forms = {
        "kept": "{:.2%}".format,
        **dict.fromkeys(("kB dense", "kB sparse"), "{:,.1f}".format),
        **dict.fromkeys(("ms torch", "ms sparse"), "{:.3f}".format),
    }
    return Table(columns, rows, texts=("kernel", "why"), bars=("ms torch", "ms sparse"), forms=forms)


@torch.inference_mode(False)
def sparse(model: NetworkLike, example: Any, *, always: bool = False) -> Sparse:
    """Compiles the model to skip its zeros, on the CPU or a CUDA GPU: same call, same outputs up to rounding.

    It runs on the model's device: in float32 on the CPU, to within 1e-4 of an output's size; in float32, fp16 or bf16
    on a GPU. `model` is a network, or a result of `prune` or `prune_to`. `example` is an input like those you will use:
    a tensor, a tuple of arguments, or a dict of keyword arguments. The model is not changed, and later changes to its
    weights have no effect. Weights masked by `hold` or torch.nn.utils.prune count as zeros. At padded tokens of an
    nn.TransformerEncoder, outputs are those that torch computes with gradients, not the zeros of its nested tensors.
    What torch.export cannot trace is left to torch; a model that writes to its buffers or inputs is refused.
    torch also runs the network where it was faster on the example; `always=True` skips the zeros even then. It runs all
    networks on CPUs other than x86, for which there is no vector code.

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
            f"is on {device}; sipp.sparse needs a model on the CPU or on one CUDA GPU", where=name,
            fix="give model.cpu() or model.cuda()",
        )  # fmt: skip
    check.flag("always", always)
    args, kwargs = call_of(example)
    with ONE_AT_A_TIME:  # no other thread changes the model while it is copied
        own = plain_copy(model)
    turn_off_caches(own.modules())
    turn_off_fused_attention(own)
    make = GpuNetwork if any(device.type == "cuda" for device in devices) else CpuNetwork
    return Sparse(make(own, always=always), args, kwargs)
