"""The steps of a plan: how each operation is run, and how steps are timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sipp.native import machine_code, memory, pytree
from sipp.runtime.activations import BY_TORCH, NONE
from sipp.runtime.graph import ATEN, Op, Ref

TRIALS = 3
MOST_TRIALS, LEAST_SECONDS = 50, 0.003
TURNS, RACE_SECONDS = 6, 0.2  # for the whole network, sparse against dense
MOST_TIME = 0.95  # sparse is used if it takes at most this share of the dense time
SHARED_SECONDS = 5e-5  # faster kernels run on one thread
SHARES_PER_THREAD = 4  # so that a delayed thread holds up the others less

MS = 1e3  # milliseconds in a second

ATTENTION = ATEN.scaled_dot_product_attention.default
Values = dict[int, Any]


@dataclass(frozen=True)
class Step:
    """One operation of a plan. `run` reads and writes values; most other fields are for the table."""

    name: str
    kernel: str
    run: Callable[[Values], None]
    out: int
    keep: float | None = None  # share of weights that are not zero
    n_bytes: int = 0  # of its weights
    n_dense_bytes: int = 0
    seconds: float | None = None
    dense_seconds: float | None = None
    note: str = ""
    held: tuple[Tensor, ...] = ()  # dense weights that it reads, perhaps shared with other steps
    holds_weights: bool = True  # False: reads them from the values, as torch does


Argument = Tensor | np.ndarray | float | int | None


def _as_number(value: Argument) -> int:
    """An argument as generated code takes it."""
    if isinstance(value, Tensor):
        return memory.address(value)
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    return machine_code.bits_of(value) if isinstance(value, float) else value or 0


class PreparedKernel:
    """A generated function with its arguments, which do not change between calls.

    Arguments are addresses (given as tensors and arrays, None: 0), whole numbers, and real ones (as their bits). `key`
    and the names of the arguments must decide what `emit` writes.
    """

    def __init__(
        self, key: tuple[Any, ...], arguments: Mapping[str, Argument], n_tasks: int,
        emit: Callable[[Any, machine_code.Arguments], None], also: Sequence[object] = (),
    ) -> None:  # fmt: skip
        numbers = {name: _as_number(value) for name, value in arguments.items()}
        self._code, self._n_tasks = machine_code.generate(key, numbers, emit), n_tasks
        self._numbers = machine_code.argument_list(self._code, numbers)
        self._held = arguments, also  # keeps the memory at its addresses alive

    def time(self, limit: float = math.inf) -> float:
        """The time on one thread; short kernels stay on one, because starting a second would take too long."""
        seconds = best_time(self.alone, limit=limit)
        if seconds < SHARED_SECONDS:
            self._n_tasks = 1
        return seconds

    def __call__(self) -> None:
        n_threads = min(torch.get_num_threads(), self._n_tasks)
        if n_threads > 1:
            machine_code.run(self._code, self._numbers, min(self._n_tasks, n_threads * SHARES_PER_THREAD), n_threads)
        else:
            machine_code.run(self._code, self._numbers, 1, 1)

    def alone(self) -> None:
        """Runs on the calling thread only."""
        machine_code.run(self._code, self._numbers, 1, 1)


def best_time(function: Callable[[], object], trials: int = TRIALS, limit: float = math.inf) -> float:
    """The shortest of a few runs in seconds of CPU time; short functions are run more often.

    Uses one thread and counts only its own CPU time, so other programs hardly disturb it. Stops after a run that takes
    more than `limit`.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best, spent, n_runs = math.inf, 0.0, 0
        while n_runs <= trials or (spent < LEAST_SECONDS and n_runs < MOST_TRIALS):
            start = time.thread_time()
            function()
            seconds = time.thread_time() - start
            best, spent, n_runs = min(best, seconds), spent + seconds, n_runs + 1
            if best > limit:
                break
    finally:
        torch.set_num_threads(n_threads)
    return best


def dense_time(function: Callable[[], object], trials: int = TRIALS) -> float:
    """The time of torch's dense implementation, which every sparse one must beat."""
    return best_time(function, trials)


def is_enough_faster(seconds: float, dense_seconds: float) -> bool:
    """Whether something sparse, a layer or a network, is enough faster than torch's dense one to be used."""
    return seconds <= MOST_TIME * dense_seconds


def race(fast: Callable[[], object], dense: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Wall times of both on all of torch's threads, in alternation, so that noise affects both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < TURNS or (sum(map(sum, times)) < RACE_SECONDS and len(times[0]) < MOST_TRIALS):
        for taken, function in zip(times, (fast, dense)):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return times


def kept_share(weight: Tensor) -> float:
    """The share of weights that are not zero."""
    return float((weight != 0).sum()) / max(1, weight.numel())


def arguments_of(values: Values, template: Any) -> Any:
    """The arguments with each `Ref` replaced by its value."""
    return pytree.tree_map(lambda leaf: values[leaf.value] if isinstance(leaf, Ref) else leaf, template)


def apply_epilogue(values: Values, op: Op, result: Tensor) -> Tensor:
    """Adds the addend and applies the activation of a product, with torch."""
    if op.addend is not None:
        result = result + values[op.addend]
    return BY_TORCH[op.act](result)


def torch_step(op: Op, note: str = "") -> Step:
    """The operation as torch runs it."""
    is_view = op.target in (ATEN.view.default, ATEN._unsafe_view.default)
    target = ATEN.reshape.default if is_view else op.target  # any strides
    if op.target is ATTENTION:
        target = _attention
    if op.target is ATEN.view_as_complex.default:
        target = _complex
    flat = [arg.value if isinstance(arg, Ref) else None for arg in op.args]
    inside = pytree.tree_leaves([arg for arg in op.args if isinstance(arg, (list, tuple, dict))])
    is_flat = not op.kwargs and not any(isinstance(leaf, Ref) for leaf in inside)

    def run_step(values: Values) -> None:
        if is_flat:
            result = target(*[arg if n is None else values[n] for arg, n in zip(op.args, flat)])
        else:
            result = target(*arguments_of(values, op.args), **arguments_of(values, op.kwargs))
        values[op.out] = result if op.addend is None and op.act == NONE else apply_epilogue(values, op, result)

    return Step(op.name, "torch", run_step, op.out, note=note, holds_weights=False)


def without_weights(steps: list[Step]) -> list[Step]:
    """The steps of a network that torch runs as a whole: they can be printed but not run."""

    def run(values: Values) -> None:
        raise AssertionError("torch runs this network")

    return [replace(step, run=run, held=()) for step in steps]


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Tensor:
    """torch's attention on contiguous heads: with other strides it is slow on the CPU."""
    q, k, v = (x.contiguous() if x.is_cpu else x for x in (q, k, v))
    return ATTENTION(q, k, v, *options, **named)


def _complex(x: Tensor) -> Tensor:
    """view_as_complex, which needs adjacent pairs."""
    return torch.view_as_complex(x.contiguous())
