"""Runs `sipp bench`: measures bytes on disk and in memory, and speed against torch.

`dense_ms` is torch's time for the same pruned network, in inference mode and the faster memory format. Calls alternate;
the result is the median over pairs.
"""

from __future__ import annotations

import copy
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sipp
from sipp.cli.data_option import normalisation_lines
from sipp.cli.errors import UNEXPECTED, CommandError, naming_option
from sipp.cli.options import StoredOptions
from sipp.cli.stored_networks import StoredNetwork, example_for, stored_network
from sipp.native import pytree
from sipp.report.summary import claim_of
from sipp.results.bench import Bench, BenchBytes, BenchRun, BenchStep
from sipp.results.display import counted, size_words
from sipp.results.network_hash import model_hash
from sipp.results.speed import speed_of
from sipp.runtime.examples import call_of, output_difference
from sipp.runtime.sparse_network import Sparse
from sipp_lab.training.setup import threads

AGREEMENT = 1e-4  # relative to the largest output
LEAST_SECONDS = 0.01  # shorter calls are repeated to take at least this long
TRIALS = 2  # of each memory format
MS = 1e3


def bench_file(asked: StoredOptions, *, n_points: int, n_threads: int | None, repeats: int) -> Bench:
    """Measures a stored network, with one input per call and with `n_points`."""
    stored = stored_network(asked.file, asked.model)
    with threads(n_threads), naming_option(f"FILE {asked.file}", "see sipp bench --help"):
        runs, fast = [], None
        for n in sorted({1, n_points}):
            example, points = example_for(stored, asked, n)
            fast = sipp.sparse(stored.model, example)
            assert isinstance(fast, Sparse)  # stored networks are on the CPU
            runs.append(_time_calls(stored.model, fast, example, repeats))
        assert isinstance(fast, Sparse)
        return _make_record(stored, fast, runs, normalisation_lines(points))


def _time_calls(model: nn.Module, fast: Sparse, example: Any, repeats: int) -> BenchRun:
    """Times a call, dense and sparse; CommandError if the outputs differ."""
    args, kwargs = call_of(example)
    last, last_args = copy.deepcopy(model).to(memory_format=torch.channels_last), pytree.tree_map(_channels_last, args)  # type: ignore[call-overload]
    with torch.inference_mode():
        gap = output_difference(*(pytree.tree_leaves(run(*args, **kwargs)) for run in (fast, model)))
        if not gap <= AGREEMENT:
            raise CommandError(
                f"the sparse network's outputs differ by {gap:.1e} of their size: not timed",
                where="sipp bench",
                fix="report this network",
                code=UNEXPECTED,
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
        taken = alternate(lambda: [fast(*args, **kwargs) for _ in range(n_calls)], dense, repeats=repeats)
    sparse_ms, dense_ms = (MS * statistics.median(times) / n_calls for times in taken)
    n_points = next(len(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    return BenchRun(
        n_points=n_points, dense_ms=dense_ms, sparse_ms=sparse_ms, faster=speed_of(*taken),
        runs_dense=fast.latest.is_dense, off_by=gap,
    )  # fmt: skip


def alternate(*functions: Callable[[], object], repeats: int) -> list[list[float]]:
    """Seconds of each call of each function; calls alternate, so that noise affects all of them."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(repeats):
        for taken, function in zip(times, functions):
            begun = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begun)
    return times


def _channels_last(value: Any) -> Any:
    is_image = isinstance(value, Tensor) and value.ndim == 4
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


def _make_record(stored: StoredNetwork, fast: Sparse, runs: list[BenchRun], images: list[str]) -> Bench:
    contents = stored.contents
    is_dense = fast.latest.is_dense  # torch runs the whole network, so no step is used
    steps = [
        BenchStep(
            name=step.name, kernel="torch" if is_dense else step.kernel, keep=step.keep,
            n_bytes=step.n_dense_bytes if is_dense else step.n_bytes, n_dense_bytes=step.n_dense_bytes,
            dense_ms=None if step.dense_seconds is None else MS * step.dense_seconds,
            sparse_ms=None if is_dense or step.seconds is None else MS * step.seconds,
        )
        for step in fast.steps if step.keep is not None
    ]  # fmt: skip
    about_stored = contents.certificate_about == "stored values"
    certified = claim_of(contents.certificate) if contents.certificate is not None and about_stored else ""
    size, best = size_words(contents.n_bytes, contents.dense_bytes), runs[-1]
    n_threads = torch.get_num_threads()
    to_make = ", sipp export --to small makes the file" if contents.path.is_dir() else ""
    line = (
        f"{size} ({contents.n_bytes:,} bytes, before pruning {contents.dense_bytes:,}{to_make}); "
        + (f"certified: {certified}; " if certified else "not certified; ")
        + f"{counted(best.n_points, 'input')} per call, {counted(n_threads, 'thread')}: {best.words}"
    )
    return Bench(
        images=images[0] if images else "",
        machine=f"{_processor()}, torch {torch.__version__}",
        n_threads=n_threads,
        network=stored.name,
        pruned_hash=model_hash(stored.model),
        bytes=BenchBytes(
            file=contents.n_bytes, dense=contents.dense_bytes, bound=contents.bound_bytes,
            memory=fast.n_bytes, memory_dense=fast.n_dense_bytes,
        ),
        runs=tuple(runs),
        steps=tuple(steps),
        step_points=fast.latest.chunk or best.n_points,
        certified=certified,
        line=line,
    )  # fmt: skip


def _processor() -> str:
    """The processor's name, from Linux or Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
