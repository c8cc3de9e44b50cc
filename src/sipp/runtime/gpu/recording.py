"""Records functions of GPU tensors as CUDA graphs, so that a call is one launch, and times them."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sipp.runtime.examples import cloned

WARM_UPS = 3  # before recording, so that libraries choose kernels and allocate memory
LEAST_CALLS, REPLAYS = 48, 5  # when timing a layer
TURNS, RACE_SECONDS, MOST_CALLS = 5, 0.02, 100  # when timing a network


def kernel_errors() -> tuple[type[Exception], ...]:
    """What a kernel may raise that does not fit this GPU; Triton's errors are no RuntimeErrors."""
    with suppress(ImportError):
        from triton.errors import TritonError

        return RuntimeError, TritonError
    return (RuntimeError,)


ONE_AT_A_TIME = threading.Lock()


@functools.cache
def _latest_call(device: int) -> torch.cuda.Event:
    """When the latest call of any graph on a device ends.

    torch records all graphs on one stream, and cuBLAS has one workspace for each stream: two graphs that ran at once
    could write to the same one.
    """
    return torch.cuda.Event()


class Recorded:
    """`function(inputs)` as a CUDA graph: copies inputs in and results out. One call at a time on a device."""

    def __init__(self, function: Callable[[list[Any]], Any], inputs: list[Any]) -> None:
        self._function = function  # keeps alive what the graph reads
        self._inputs = [x.detach().clone() if isinstance(x, Tensor) else x for x in inputs]
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function(self._inputs)
        before.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._found = function(self._inputs)
        self._latest = _latest_call(torch.cuda.current_device())

    def replay(self) -> None:
        self._graph.replay()

    def __call__(self, inputs: list[Any]) -> Any:
        with ONE_AT_A_TIME:
            torch.cuda.current_stream().wait_event(self._latest)  # it may have used another stream
            for own, value in zip(self._inputs, inputs):
                if isinstance(own, Tensor):
                    own.copy_(value)
            self._graph.replay()
            results = cloned(self._found)
            self._latest.record()
            return results


def kernel_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds per call, for these calls recorded one after the other, several times over."""
    repeated = [*calls] * -(-LEAST_CALLS // len(calls))
    recorded = Recorded(lambda _: [call() for call in repeated], [])
    recorded.replay()
    best = math.inf
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        recorded.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best / len(repeated)


def race(calls: Sequence[Callable[[], object]]) -> list[float]:
    """The shortest time of each call from Python, GPU work included, measured in alternation."""
    best = [math.inf] * len(calls)
    for turn in range(TURNS):
        for i, call in enumerate(calls):
            n_calls = 1 if turn == 0 else max(1, min(MOST_CALLS, int(RACE_SECONDS / best[i])))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(n_calls):
                call()
            torch.cuda.synchronize()
            best[i] = min(best[i], (time.perf_counter() - start) / n_calls)
    return best
