"""Trains several networks of a run at once on Ray, with the same records and weights as one process.

    driver (holds the lock)        tasks, one stage each
      starts what is ready    ->   train_network in the run folder: checkpoint, final

With several machines, the folder must be on a shared disk, and the data at the same path everywhere. A task first
checks that it sees the same run, data and code. The result of a stage depends only on the configuration and its parent,
so order and place do not matter. Files are whole at any moment, so tasks can be killed: if the driver is stopped, it
kills them, and each stage goes on from its checkpoint when the run is resumed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sipp.errors import DataError, OptionError, SippError
from sipp.extras import needed_for
from sipp_lab.own_code import load_scores
from sipp_lab.pipelines import PIPELINES
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs.context import RunContext, code_version_of, device_named, load_feed, torch_settings
from sipp_lab.runs.folder import MANIFEST, is_done, read_manifest
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.records import Origin, Stage
from sipp_lab.runs.stages import left_to_train, train_network

LOCAL = "local"  # Ray's address for starting a new instance here
POLL_SECONDS = 0.25
N_TRIES = 3  # attempts per stage if its process dies
OBJECT_STORE_BYTES = 100 * 2**20  # Ray only transports stage names; its default is a third of the memory


@dataclass(frozen=True)
class RunOnRay:
    """Everything a task needs to train any stage of the run."""

    recipe: Recipe
    folder: Path
    how: RunOptions
    checkpoint_seconds: float
    origin: Origin  # its device is that of every task


def train_stage(run: RunOnRay, stage: Stage) -> None:
    """Runs in a Ray process: trains the stage into the run folder, after a look at run, data and code."""
    here, recipe = socket.gethostname(), run.recipe
    if not (run.folder / MANIFEST).is_file() or read_manifest(run.folder).config != config_of(recipe):
        raise DataError(
            f"{here} does not see this run in {run.folder}", fix="choose an --out on a disk that all machines share"
        )
    for path in run.how.code or ():
        load_scores(path)
    with torch_settings(recipe.n_threads or 1):
        device = device_named(run.origin.device)
        feed = load_feed(recipe, run.how.data, device)
        origin = Origin(data=feed.splits.digest, code=code_version_of(recipe), device=device.type)
        if origin != run.origin:
            raise OptionError(
                f"{here} has other data or code than the machine that began the run ({origin}, not {run.origin})",
                fix="install the same version and put the same data everywhere",
            )
        if not is_done(run.folder, stage.name):  # by an earlier try
            train_network(RunContext(recipe, run.folder, feed, run.checkpoint_seconds), stage)


def train_on_ray(run: RunOnRay) -> Generator[Stage, None, None]:
    """Trains all stages that are not done, and yields each when it is; Ray is not started if there are none.

    If a process dies, another resumes its stage from the last checkpoint. An error in one stage ends all.
    """
    todo = left_to_train(run.recipe, run.folder)
    if not todo:
        return
    unfinished, running = set(todo), dict[Any, Stage]()
    with _cluster(run.how.ray_address or LOCAL) as ray:
        n_at_once, resources = _resources(ray.nodes(), run)
        code = [path.resolve() for path in run.how.code or ()]
        run = replace(run, folder=run.folder.resolve(), how=replace(run.how, data=run.how.data.resolve(), code=code))
        # Ray restarts a task whose process died.
        train = ray.remote(train_stage).options(max_retries=N_TRIES - 1, **resources)
        try:
            while running or todo:
                while len(running) < n_at_once and (ready := _next_stage(run.recipe, todo, unfinished)) is not None:
                    todo.remove(ready)
                    running[train.remote(run, ready)] = ready
                for ref in ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)[0]:
                    stage = running.pop(ref)
                    try:
                        ray.get(ref)
                    except ray.exceptions.RayTaskError as failed:
                        if isinstance(failed.cause, SippError):
                            raise failed.cause.inside(stage.name) from None
                        raise
                    except ray.exceptions.RayError as died:
                        raise DataError(
                            f"the process died {N_TRIES} times ({_first_line(died)})",
                            where=stage.name,
                            fix="if memory is short, make fewer networks at once (--at-once); the same command resumes",
                        ) from died
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


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _resources(nodes: Sequence[Mapping[str, Any]], run: RunOnRay) -> tuple[int, dict[str, float]]:
    """How many stages to run at once, and the share of a machine of each: one GPU, or a CPU for each thread."""
    at_once, alive = run.how.at_once, [node["Resources"] for node in nodes if node["Alive"]]
    cpus, n_gpus = [int(node.get("CPU", 0)) for node in alive], int(sum(node.get("GPU", 0) for node in alive))
    if run.origin.device == "cuda":
        if not n_gpus:
            raise OptionError("device 'cuda' was asked for, but Ray has no GPU", fix="use --device cpu")
        return min(at_once or n_gpus, n_gpus), {"num_cpus": 0, "num_gpus": 1}
    if run.how.device == "auto" and n_gpus:
        raise OptionError(f"Ray has {n_gpus} GPUs, but this machine has none", fix="add --device cuda, or --device cpu")
    n_threads = min(run.recipe.n_threads or 1, max(cpus))
    at_once = at_once or sum(n // n_threads for n in cpus)
    part = sum(cpus) / at_once  # less than one CPU if more stages than CPUs were asked for
    return at_once, {"num_cpus": min(n_threads, int(part) if part >= 1 else part)}


def import_ray() -> Any:
    """Imports Ray, an optional dependency."""
    with needed_for("engine 'ray'"):
        import ray
        import ray.exceptions
    return ray


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Connects to Ray; shuts it down at the end unless the caller was already connected."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    logging.getLogger("ray").setLevel(logging.ERROR)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except Exception as error:  # of many classes; Ray's own words say which
        raise OptionError(
            f"Ray {'here' if address == LOCAL else f'at {address!r}'} cannot be used: {_first_line(error)}",
            fix="start one with `ray start --head`; if it asks for a token, set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN to those of the cluster",
        ) from error
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray sets its own, which would end the run without a word
        yield ray
    finally:
        ray.shutdown()
