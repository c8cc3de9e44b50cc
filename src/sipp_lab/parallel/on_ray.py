"""Trains several networks of a run at once on Ray, with the same records and weights as one process.

    driver (holds the lock)        tasks, one stage each
      starts what is ready    ->   train_network in the run folder: checkpoint, final

With several machines, the folder must be on a shared disk, and the data at the same path everywhere. A task first
checks that it sees the same run, data and code. The result of a stage depends only on the configuration and its parent,
so order and place do not matter. Files are whole at any moment, so tasks can be killed: if the driver is stopped, it
kills them, and each stage goes on from its checkpoint when the run is resumed.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sipp.errors import DataError, OptionError, SippError
from sipp.extras import needed_for
from sipp_lab.own_code import load_scores
from sipp_lab.pipelines import PIPELINES
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs.context import RunContext
from sipp_lab.runs.folder import MANIFEST, is_done, read_manifest
from sipp_lab.runs.records import Origin, Stage
from sipp_lab.runs.stages import plan, train_network
from sipp_lab.training.feed import Feed
from sipp_lab.training.setup import code_version_of, device_named, load_feed, threads

LOCAL = "local"  # Ray's address for starting a new instance here
POLL_SECONDS = 0.25
N_TRIES = 3  # attempts per stage if its process dies
OBJECT_STORE_BYTES = 100 * 2**20  # Ray only transports stage names; its default is a third of the memory


@dataclass(frozen=True)
class RayOptions:
    """Which Ray to use ("local" starts one, "auto" or HOST:PORT joins one), and how many networks to train at once."""

    address: str = LOCAL
    n_at_once: int | None = None  # None: as many as the CPUs (recipe.n_threads each) or GPUs allow
    code: tuple[Path, ...] = ()  # files with the user's own scores, loaded by every task


@dataclass(frozen=True)
class RunOnRay:
    """Everything a task needs to train any stage of the run."""

    recipe: Recipe
    folder: Path
    data_root: Path
    device: str  # "cpu" or "cuda"
    checkpoint_seconds: float
    origin: Origin
    code: tuple[Path, ...] = ()
    n_threads: int = 1


def train_stage(run: RunOnRay, stage: Stage) -> SippError | None:
    """Runs in a Ray process: trains the stage into the run folder, and returns its error, if any."""
    try:
        with threads(run.n_threads):
            context = RunContext(run.recipe, run.folder, _open_run(run), run.checkpoint_seconds)
            if not is_done(run.folder, stage.name):  # by an earlier try
                train_network(context, stage)
    except SippError as error:
        return error
    return None


@functools.lru_cache(maxsize=1)  # a Ray process trains several stages in turn
def _open_run(run: RunOnRay) -> Feed:
    """The data, after checking that this machine has the same run folder, data and code."""
    here = socket.gethostname()
    if not (run.folder / MANIFEST).is_file() or read_manifest(run.folder).config != config_of(run.recipe):
        raise DataError(
            f"{here} does not see this run in {run.folder}", fix="choose an --out on a disk that all machines share"
        )
    for path in run.code:
        load_scores(path)
    device = device_named("cuda" if run.device == "cuda" else "cpu")
    feed = load_feed(run.recipe, data_root=run.data_root, device=device)
    origin = Origin(data=feed.splits.digest, code=code_version_of(run.recipe), device=device.type)
    if origin != run.origin:
        raise OptionError(
            f"{here} has other data or code than the machine that began the run ({origin}, not {run.origin})",
            fix="install the same version and put the same data everywhere",
        )
    return feed


def check_ray(options: RayOptions) -> None:
    """Checks the options, and that Ray is installed, before any work."""
    if options.n_at_once is not None and options.n_at_once < 1:
        raise OptionError(f"n_at_once={options.n_at_once} must be at least 1")
    _ray()


def run_on_ray(run: RunOnRay, options: RayOptions) -> Iterator[Stage]:
    """Trains all stages that are not done, and yields each when it is; Ray is not started if there are none.

    If a process dies, another resumes its stage from the last checkpoint. An error in one stage ends all.
    """
    todo = [stage for stage in plan(run.recipe) if not is_done(run.folder, stage.name)]
    if not todo:
        return
    run = replace(
        run,
        folder=run.folder.resolve(),
        data_root=run.data_root.resolve(),
        code=tuple(path.resolve() for path in options.code),
        n_threads=torch.get_num_threads(),
    )
    unfinished, running = set(todo), dict[Any, Stage]()
    with _cluster(options.address) as ray:
        n_at_once, resources = _resources(ray.nodes(), run, options.n_at_once)
        # Ray restarts a task whose process died.
        train = ray.remote(train_stage).options(max_retries=N_TRIES - 1, **resources)
        try:
            while running or todo:
                while len(running) < n_at_once and (ready := _next_stage(run.recipe, todo, unfinished)) is not None:
                    todo.remove(ready)
                    running[train.remote(run, ready)] = ready
                for ref in ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)[0]:
                    stage = running.pop(ref)
                    if (error := _error_of(ray, ref)) is not None:
                        raise error.inside(stage.name)
                    unfinished.remove(stage)
                    yield stage
        finally:
            for ref in running:
                ray.cancel(ref, force=True)


def _next_stage(recipe: Recipe, todo: Sequence[Stage], unfinished: set[Stage]) -> Stage | None:
    """The stage to start now; None if all wait for others. In chains, lower levels first: chains finish together."""
    pipeline = PIPELINES[recipe.pipeline]
    ready = [stage for stage in todo if pipeline.parent_of(stage) not in unfinished]
    return min(ready, key=lambda stage: stage.level, default=None)


def _error_of(ray: Any, ref: Any) -> SippError | None:
    try:
        error: SippError | None = ray.get(ref)
        return error
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as died:
        what = f"the process died {N_TRIES} times ({_first_line(died)})"
        return DataError(
            what, fix="if memory is short, make fewer networks at once (--at-once); the same command resumes"
        )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _resources(
    nodes: Sequence[Mapping[str, Any]], run: RunOnRay, n_at_once: int | None
) -> tuple[int, dict[str, float]]:
    """How many stages to run at once, and the resources of each: CPUs for its threads, or one GPU."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    cpus = [int(node.get("CPU", 0)) for node in alive]
    if run.device == "cuda":
        n_gpus = int(sum(node.get("GPU", 0) for node in alive))
        if not n_gpus:
            raise OptionError("device 'cuda' was asked for, but Ray knows of no GPU", fix="use --device cpu")
        return min(n_at_once or n_gpus, n_gpus), {"num_cpus": min(1, max(cpus)), "num_gpus": 1}
    if n_at_once is None:
        share = max(1, min(run.n_threads, max(cpus)))
        return max(1, sum(n // share for n in cpus)), {"num_cpus": share}
    # If more stages than CPUs were requested, each gets a fraction of one.
    part = sum(cpus) / n_at_once
    return n_at_once, {"num_cpus": min(run.n_threads, int(part) if part >= 1 else part)}


def _ray() -> Any:
    """Imports Ray, an optional dependency."""
    with needed_for("engine 'ray'"):
        import ray
        import ray.exceptions
    return ray


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Connects to Ray; shuts it down at the end unless the caller was already connected."""
    ray = _ray()
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Started in a thread, Ray cannot replace our SIGTERM handler, so a signal still stops the run gracefully. The
    # thread must live as long as Ray, whose processes end with the thread that started them.
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(lambda: ray.init(address=address, **options)).result()
        except Exception as error:  # of many classes; Ray's own words say which
            raise OptionError(
                f"Ray {'here' if address == LOCAL else f'at {address!r}'} cannot be used: {_first_line(error)}",
                fix="start one with `ray start --head`; if it asks for a token, set RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN to those of the cluster",
            ) from error
        try:
            if threading.current_thread() is threading.main_thread():
                # Ray's native code wraps the handler to print a stack trace; setting it again undoes that.
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            yield ray
        finally:
            ray.shutdown()
