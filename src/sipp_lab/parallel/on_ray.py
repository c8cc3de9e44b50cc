"""Trains several networks of a run at once on Ray, with the same records and weights as one process.

    driver (holds the lock)        tasks, one stage each
      starts what is ready    ->   train_network in the run folder: step-*, final
      on a signal: stop       ->   checkpoint after the step under way, then end

Driver and tasks communicate only through files in the run folder; "stop" is one of them. With several machines, the
folder must be on a shared disk, and the data at the same path everywhere. A task first checks that it sees the same
run, data and code. The result of a stage depends only on the configuration and its parent, so order and place do not
matter, and a task that briefly outlives its driver writes complete files with the same bits as any other.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sipp.errors import DataError, OptionError, SippError
from sipp.extras import needed_for
from sipp.files import remove_leftovers
from sipp.results.manifest import Origin
from sipp_lab.own_code import load_scores
from sipp_lab.parallel.processes import ALONE
from sipp_lab.pipelines import parent_of
from sipp_lab.recipes import Recipe, config_of
from sipp_lab.runs import store
from sipp_lab.runs.context import RunContext
from sipp_lab.runs.plan import Stage, plan
from sipp_lab.runs.train_networks import finished_network, train_network
from sipp_lab.training.feed import Feed
from sipp_lab.training.setup import code_version_of, device_named, load_feed, threads
from sipp_lab.training.signals import Interrupted, StopSignal

LOCAL = "local"  # Ray's address for starting a new instance here
POLL_SECONDS = 0.25
STOP = "stop"  # a file in the run folder: tasks that see it end after the current step
N_TRIES = 3  # attempts per stage if its process dies
OBJECT_STORE_BYTES = 100 * 2**20  # Ray only transports stage names; its default is a third of the memory


@dataclass(frozen=True)
class RayOptions:
    """Which Ray to use ("local" starts one, "auto" or HOST:PORT joins one), and how many stages to train at once."""

    address: str = LOCAL
    n_at_once: int | None = None  # None: as many as the CPUs (recipe.n_threads each) or GPUs allow


@dataclass(frozen=True)
class RunOnRay:
    """Everything a task needs to train any stage of the run."""

    recipe: Recipe
    folder: Path
    data_root: Path
    device: Literal["cpu", "cuda"]
    n_workers: int  # image-decoding processes per task
    n_threads: int
    checkpoint_seconds: float
    origin: Origin
    code: tuple[Path, ...] = ()  # files with the user's own scores, loaded by every task


@dataclass(frozen=True)
class StageOutcome:
    """What a task did: the stages it finished, its error, and its warnings. A task that was stopped finished none."""

    done: tuple[Stage, ...] = ()  # its own stage last, after damaged parents that were trained again
    error: SippError | None = None
    warned: tuple[str, ...] = ()


def train_stage(run: RunOnRay, stage: Stage) -> StageOutcome:
    """Runs in a Ray process: trains the stage into the run folder, and returns how that ended."""
    outcome = StageOutcome()
    with warnings.catch_warnings(record=True) as caught, threads(run.n_threads):
        try:
            feed, memory = _open_run(run)
            remove_leftovers(run.folder / stage.name)  # left by a process that died
            context = RunContext(
                run.recipe,
                run.folder,
                feed,
                lambda: signal.SIGTERM if (run.folder / STOP).exists() else None,
                run.checkpoint_seconds,
                lambda name, row: None,
                memory=memory,
            )
            trained = tuple(train_network(context, stage))  # none if an earlier try finished it
            outcome = StageOutcome(trained or (stage,))
        except Interrupted:
            pass
        except SippError as error:
            outcome = StageOutcome(error=error)
    return replace(outcome, warned=tuple(str(warning.message) for warning in caught))


@functools.lru_cache(maxsize=1)  # a Ray process trains several stages in turn
def _open_run(run: RunOnRay) -> tuple[Feed, dict[Any, Any]]:
    """The data and the pipeline's cache, after checking that this machine has the same run folder, data and code."""
    here = socket.gethostname()
    if not (run.folder / store.MANIFEST).is_file() or store.read_manifest(run.folder).config != config_of(run.recipe):
        raise DataError(
            f"{here} does not see this run in {run.folder}", fix="choose an --out on a disk that all machines share"
        )
    for path in run.code:
        load_scores(path)
    device = device_named(run.device)
    feed = load_feed(run.recipe, data_root=run.data_root, device=device, n_workers=run.n_workers)
    origin = Origin(data=feed.splits.digest, code=code_version_of(run.recipe), device=device.type)
    if origin != run.origin:
        raise OptionError(
            f"{here} has other data or code than the machine that began the run ({origin}, not {run.origin})",
            fix="install the same version and put the same data everywhere",
        )
    return feed, {}


def next_stage(recipe: Recipe, todo: Sequence[Stage], unfinished: set[Stage]) -> Stage | None:
    """The stage to start now; None if all wait for others.

    In chains, lower levels come first, so that chains finish together. Without chains (at-init), stages follow the
    order of the plan, where one process can reuse its scores for all levels of a method.
    """
    parents = {stage: parent_of(recipe.pipeline, stage) for stage in todo}
    ready = [stage for stage in todo if parents[stage] not in unfinished]
    if any(parent is not None for parent in parents.values()):
        ready.sort(key=lambda stage: stage.level)
    return ready[0] if ready else None


def check_ray(options: RayOptions) -> None:
    """Checks the options, and that Ray is installed, before any work."""
    if options.n_at_once is not None and options.n_at_once < 1:
        raise OptionError(f"n_at_once={options.n_at_once} must be at least 1")
    _ray()


def run_on_ray(run: RunOnRay, options: RayOptions, stop_signal: StopSignal) -> Generator[Stage, None, None]:
    """Trains all stages that are not done, and yields each when it is; Ray is not started if there are none.

    If a process dies, another resumes its stage from the last checkpoint. A signal, or an error in one stage, stops all
    others after a checkpoint.
    """
    stages = [stage for stage in plan(run.recipe) if finished_network(ALONE, run.folder / stage.name) is None]
    if not stages:
        return
    todo, unfinished = list(stages), set(stages)
    running: dict[Any, Stage] = {}
    asked: int | None = None
    error: SippError | None = None
    stop = run.folder / STOP
    stop.unlink(missing_ok=True)  # left by a driver that was killed
    with _cluster(options.address) as ray:
        n_at_once, resources = _resources(ray.nodes(), run, options.n_at_once)
        # Ray restarts a task whose process died.
        train = ray.remote(train_stage).options(max_retries=N_TRIES - 1, **resources)
        try:
            while running or (unfinished and not stop.exists()):
                while not stop.exists() and len(running) < n_at_once:
                    ready = next_stage(run.recipe, todo, unfinished)
                    if ready is None:
                        break
                    todo.remove(ready)
                    running[train.remote(run, ready)] = ready
                for ref in ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)[0]:
                    stage, outcome = running.pop(ref), _get_outcome(ray, ref)
                    for text in outcome.warned:
                        warnings.warn(f"{stage.name}: {text}", stacklevel=2)
                    unfinished.difference_update(outcome.done)
                    yield from outcome.done
                    if outcome.error is not None and error is None:
                        error = outcome.error.inside(stage.name)
                        stop.touch()
                if asked is None and (asked := stop_signal()) is not None:
                    stop.touch()
        finally:  # files are complete at any moment, so tasks can be killed
            for ref in running:
                ray.cancel(ref, force=True)
            stop.unlink(missing_ok=True)
    if asked is not None:
        raise Interrupted(asked)
    if error is not None:
        raise error


def _get_outcome(ray: Any, ref: Any) -> StageOutcome:
    try:
        outcome: StageOutcome = ray.get(ref)
        return outcome
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError:
        what = f"the process died {N_TRIES} times: is there too little memory? Make fewer networks at once (--at-once)"
        return StageOutcome(error=DataError(what, fix="the same command resumes from the last checkpoints"))


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
    own: dict[str, Any] = {}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Started in a thread, Ray cannot replace our SIGTERM handler, so a signal still stops the run gracefully. The
    # thread must live as long as Ray, whose processes end with the thread that started them.
    with ThreadPoolExecutor(1) as thread:
        options = {"log_to_driver": False, "logging_level": "ERROR", **own}
        try:
            thread.submit(lambda: ray.init(address=address, **options)).result()
        except ConnectionError as error:
            raise OptionError(
                f"no Ray answers at {address!r}", fix="start one with `ray start --head`, or leave it out"
            ) from error
        try:
            if threading.current_thread() is threading.main_thread():
                # Ray's native code wraps the handler to print a stack trace; setting it again undoes that.
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            yield ray
        finally:
            ray.shutdown()
