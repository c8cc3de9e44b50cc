"""What all generated kernels share: how they are called, and a loop that watches for values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sipp.native import machine_code, memory, vector
from sipp.runtime import timing

SHARED_SECONDS = 5e-5  # faster kernels run on one thread
LONG_SECONDS = 1e-3  # a kernel that nothing is compared with, and takes this long, is timed once
SHARES_PER_THREAD = 4  # so that a delayed thread holds up the others less

Argument = Tensor | np.ndarray | float | int | None
Watch = Callable[[Any], None]  # takes note of a vector


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

    def time_and_set_threads(self, limit: float = math.inf) -> float:
        """The time on one thread; short kernels stay on one, because starting a second would take too long."""
        seconds = timing.best_time(self.alone, limit=limit)
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


@contextmanager
def tasks(b: Any, lanes: int, args: machine_code.Arguments, n: Any) -> Iterator[tuple[Any, Watch]]:
    """A loop over the thread's share of n tasks; yields the task and a function that watches vectors of values.

    The first watched value that is not finite makes a sum NaN, which raises the flag in the end: one multiply-add each.
    """
    zero = vector.constant(0.0, lanes)
    (bad,) = vector.variables(b, [zero])

    def watch(value: Any) -> None:
        b.store(vector.fused(b, value, zero, b.load(bad)), bad)

    with vector.each(b, *args.share(n)) as task:
        yield task, watch
    total = vector.across(b, lambda b, left, right: b.fadd(left, right), b.load(bad))
    with b.if_then(b.fcmp_unordered("uno", total, total)):
        raise_flag(b, args)


def raise_flag(b: Any, args: machine_code.Arguments) -> None:
    """Makes torch run the network (`Flag`)."""
    vector.store(b, vector.constant(1.0, 1), args.number("flag"))
