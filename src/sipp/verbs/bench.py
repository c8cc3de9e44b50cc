"""`bench`: measures the size of a pruned network, and its speed in the sparse runtime against torch.

Torch runs the same pruned network in inference mode and in the faster memory format. Calls take turns, so that noise
affects both; the result is the median over pairs.
"""

from __future__ import annotations

import copy
import math
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs import turn_off_caches
from sipp.native import pytree
from sipp.results import Bench, BenchRun, NetworkLike, Speed, hashing, network_of
from sipp.runtime import call_of, numeric_difference, plain_copy, sparse
from sipp.verbs.save import content_of

REPEATS = 15  # pairs of calls, of which the median counts
LEAST_SECONDS = 0.01  # shorter calls are repeated to take at least this long
TRIALS = 2  # of each memory format
MS = 1e3


@torch.inference_mode(False)
def bench(pruned: NetworkLike, example: Any) -> Bench:
    """Measures how small the file of a network is, and how fast `sparse` runs it compared with torch.

    `example` is a batch as for `sparse`; it is timed as a whole and with one input, in pairs of calls. The file is that
    of `save`, with the certificate of `prune_to` if there is one; it is not written. Nothing is timed if the outputs
    differ.

    Example:
        >>> import sipp, torch
        >>> pruned = sipp.prune(torch.nn.Linear(300, 200), None, keep=0.05, method="magnitude")
        >>> measured = sipp.bench(pruned, torch.rand(16, 300))
        >>> measured.file_bytes < measured.dense_bytes / 5, [run.n_inputs for run in measured.runs]
        (True, [1, 16])
    """
    model = plain_copy(network_of(pruned))
    turn_off_caches(model.modules())  # `sparse` does the same; a cache is not an output
    args, kwargs = call_of(example)
    n_inputs = next((len(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()), 1)
    runs = []
    for n in sorted({1, n_inputs}):
        call = pytree.tree_map(partial(_first, n), (args, kwargs))
        fast = sparse(model, call[0] if call[0] else call[1])
        runs.append(_time_calls(model, fast, call, n, runs_dense=fast.latest.is_dense))
    contents = content_of(pruned, Path("network"))[1]
    return Bench(
        machine=f"{_processor(model)}, torch {torch.__version__}",
        n_threads=torch.get_num_threads(),
        network=type(model).__name__,
        pruned_hash=hashing.of_model(model),
        file_bytes=contents.n_bytes,
        dense_bytes=contents.dense_bytes,
        bound_bytes=contents.bound_bytes,
        memory_bytes=fast.n_bytes,
        memory_dense_bytes=fast.n_dense_bytes,
        runs=tuple(runs),
    )


def _time_calls(
    model: nn.Module, fast: Callable[..., Any], call: tuple[Any, Any], n_inputs: int, *, runs_dense: bool
) -> BenchRun:
    """Times a call, dense and sparse; ModelError if the outputs differ."""
    args, kwargs = call
    last, last_args = copy.deepcopy(model).to(memory_format=torch.channels_last), pytree.tree_map(_channels_last, args)  # type: ignore[call-overload]
    with torch.inference_mode():
        gap, is_same = numeric_difference(fast(*args, **kwargs), model(*args, **kwargs))
        if not is_same:
            raise ModelError(
                f"the sparse network's outputs differ by {gap:.1e} of their size, so it is not timed",
                where=type(model).__name__,
                fix="this is a bug in sipp: please report it with the model's code",
            )
        begun = time.perf_counter()
        fast(*args, **kwargs)
        n_calls = max(1, math.ceil(LEAST_SECONDS / max(time.perf_counter() - begun, 1e-7)))
        ways = [
            lambda: [model(*args, **kwargs) for _ in range(n_calls)],
            lambda: [last(*last_args, **kwargs) for _ in range(n_calls)],
        ]
        tried = [min(times) for times in alternate(*ways, repeats=TRIALS)]
        dense = ways[tried.index(min(tried))]
        taken = alternate(lambda: [fast(*args, **kwargs) for _ in range(n_calls)], dense, repeats=REPEATS)
    sparse_ms, dense_ms = (MS * statistics.median(times) / n_calls for times in taken)
    return BenchRun(
        n_inputs=n_inputs, dense_ms=dense_ms, sparse_ms=sparse_ms, off_by=gap,
        faster=Speed.of(*taken, runs_dense=runs_dense),
    )  # fmt: skip


def _first(n: int, value: Any) -> Any:
    return value[:n] if isinstance(value, Tensor) and value.dim() else value


def alternate(*functions: Callable[[], object], repeats: int) -> list[list[float]]:
    """Seconds of each call of each function; calls alternate, so that noise affects all of them."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(repeats):
        for taken, function in zip(times, functions):
            _wait_for_gpu()
            begun = time.perf_counter()
            function()
            _wait_for_gpu()
            taken.append(time.perf_counter() - begun)
    return times


def _wait_for_gpu() -> None:
    """A GPU works on while Python goes on."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _channels_last(value: Any) -> Any:
    is_image = isinstance(value, Tensor) and value.ndim == 4
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


def _processor(model: nn.Module) -> str:
    """The name of the GPU that the model is on, or of the processor, from Linux or Python."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
