"""The stages of a run on Ray, several at once, with the records and weights that one process gives.

    driver (holds the lock)        workers, one stage at a time each
      begins what is ready    ->   make_network in the run folder: start.*, step-*.*, final.*
      passes a signal on      ->   checkpoint after the step under way, then stop

Units hand on to each other only what is in the run folder: on several machines it must lie on a disk that all of them
share, and the data at the same path everywhere. A worker checks first that it sees this run, this data and this code.
What a stage gives follows from the configuration and its parent, so neither order nor place can change it; and a
worker that outlives its driver for a moment writes whole files with the bits that any other would write.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sipp.errors import DataError, OptionError, SippError
from sipp.experiments.parallel.processes import ALONE
from sipp.experiments.pipelines import parent_of
from sipp.experiments.recipes import Recipe, config_of
from sipp.experiments.runs import store as runs
from sipp.experiments.runs.plan import Stage, plan
from sipp.experiments.runs.walk import finished, make_network
from sipp.experiments.runs.work import Work
from sipp.experiments.training.setup import code_of, device_named, feed_of, threads
from sipp.experiments.training.signals import Interrupted, Wish
from sipp.extras import needed_for
from sipp.records.schemas import EpochRow
from sipp.storage.files import read_json, remove_leftovers

LOCAL = "local"  # Ray's own word for: start it here, whatever else may run
POLL_SECONDS = 0.25
START_SECONDS = 60.0  # after which a worker that has not started is worth a word
N_TRIES = 3  # of one stage, before a worker that dies in it is no accident
OBJECT_STORE_BYTES = 100 * 2**20  # only stages and epochs travel through Ray; its own choice is a third of the memory

OnEpoch = Callable[[str, EpochRow], None]


@dataclass(frozen=True)
class RayOptions:
    """Which Ray to use ("local" starts one, "auto" or HOST:PORT joins one), and how many stages it makes at once."""

    address: str = LOCAL
    n_at_once: int | None = None  # None: as many as CPUs (of recipe.n_threads each) or GPUs there are


@dataclass(frozen=True)
class Job:
    """What a worker is told: enough to make any stage of the run."""

    recipe: Recipe
    folder: Path
    data_root: Path
    device: Literal["cpu", "cuda"]
    n_workers: int  # processes that decode image files, of each worker
    n_threads: int
    checkpoint_seconds: float
    origin: runs.Origin


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: done, stopped by a signal, or with this error; and the warnings on the way.

    `parents`: the stages before it that were damaged, and are made anew now.
    """

    end: Literal["done", "stopped", "error"]
    error: SippError | None = None
    warned: tuple[str, ...] = ()
    parents: tuple[Stage, ...] = ()


class Worker:
    """A process that makes stages; while it makes one, a second thread of it answers `newest` and hears `stop`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._work: Work | None = None  # made with the first stage, and kept with its data and scores
        self._newest: tuple[str, EpochRow] | None = None
        self._asked: int | None = None

    def ready(self) -> Outcome:
        """A word that the process is there."""
        return Outcome("done")

    def newest(self) -> tuple[str, EpochRow] | None:
        """The stage and the last epoch of it that was trained here."""
        return self._newest

    def stop(self, number: int) -> None:
        """Makes the step under way the last one."""
        self._asked = number

    def make(self, stage: Stage) -> Outcome:
        """How making the stage ended; its result is in the run folder."""
        outcome = Outcome("done")
        with warnings.catch_warnings(record=True) as caught, threads(self.job.n_threads):
            try:
                if self._work is None:
                    self._work = self._opened()
                made = tuple(make_network(self._work, stage))
                outcome = Outcome("done", parents=tuple(one for one in made if one != stage))
            except Interrupted:
                outcome = Outcome("stopped")
            except SippError as error:
                outcome = Outcome("error", error)
        return replace(outcome, warned=tuple(str(one.message) for one in caught))

    def _opened(self) -> Work:
        """The work in the run folder (whose lock the driver holds), if data and code are those of the driver."""
        job, here = self.job, socket.gethostname()
        manifest = job.folder / runs.MANIFEST
        if not manifest.is_file() or read_json(manifest)["config"] != config_of(job.recipe):
            raise DataError(
                f"{here} does not see this run in {job.folder}", fix="choose an --out on a disk that all machines share"
            )
        device = device_named(job.device)
        feed = feed_of(job.recipe, data_root=job.data_root, device=device, n_workers=job.n_workers)
        found = runs.Origin(feed.splits.digest, code_of(job.recipe), device.type)
        if found != job.origin:
            raise OptionError(
                f"{here} has other data or code than the machine that began the sweep ({found}, not {job.origin})",
                fix="install the same version and put the same data everywhere",
            )

        def keep(stage: str, row: EpochRow) -> None:
            self._newest = (stage, row)

        store = runs.Store(job.folder, config_of(job.recipe), resumed=True)
        return Work(job.recipe, store, feed, lambda: self._asked, job.checkpoint_seconds, keep)


def next_stage(recipe: Recipe, todo: Sequence[Stage], unfinished: set[Stage]) -> Stage | None:
    """The stage to begin now, None if all wait for others.

    Of a chain, lower levels come first: many chains then end together. Without chains (at-init), the order of the plan,
    in which a worker's scores serve all levels of a method.
    """
    parents = {stage: parent_of(recipe.pipeline, stage) for stage in todo}
    ready = [stage for stage in todo if parents[stage] not in unfinished]
    if any(parent is not None for parent in parents.values()):
        ready.sort(key=lambda stage: stage.level)
    return ready[0] if ready else None


def check_ray(options: RayOptions) -> None:
    """Refuses, before any work, options that make no sense, and any where Ray is missing."""
    if options.n_at_once is not None and options.n_at_once < 1:
        raise OptionError(f"n_at_once={options.n_at_once} must be at least 1")
    _ray()


def run_on_ray(
    job: Job, store: runs.Store, options: RayOptions, wish: Wish, on_epoch: OnEpoch
) -> Generator[Stage, None, None]:
    """Each stage that had to be made, once it is done. Ray is not started where there is none.

    A stage whose worker died is begun again by another, from its last checkpoint. A signal, or an error in one stage,
    stops all others after a checkpoint.
    """
    stages = [stage for stage in plan(job.recipe) if finished(ALONE, store.stage(stage.name)) is None]
    if not stages:
        return
    with _cluster(options.address) as ray:
        crew = _Crew(ray, job, *_shares(ray.nodes(), job, options.n_at_once), on_epoch)
        try:
            yield from _sweep(crew, store, stages, wish)
        finally:
            crew.dismiss()


@dataclass
class _Crew:
    """The workers, and what is awaited of each: a stage, or (None) that it has started."""

    ray: Any
    job: Job
    n_at_once: int
    resources: Mapping[str, float]
    on_epoch: OnEpoch
    awaited: dict[Any, tuple[Any, Stage | None]] = field(default_factory=dict)
    idle: list[Any] = field(default_factory=list)
    shown: dict[str, int] = field(default_factory=dict)

    def hire(self) -> None:
        """Starts one more worker."""
        actor = self.ray.remote(Worker).options(max_concurrency=2, **self.resources).remote(self.job)
        self.awaited[actor.ready.remote()] = (actor, None)

    def begin(self, stage: Stage) -> None:
        """Sets an idle worker to the stage."""
        actor = self.idle.pop()
        self.awaited[actor.make.remote(stage)] = (actor, stage)

    def ended(self) -> Iterator[tuple[Stage | None, Outcome | None]]:
        """The (stage, outcome) of workers that are done, after at most a moment; the outcome is None of a dead one."""
        arrived, _ = self.ray.wait(list(self.awaited), num_returns=1, timeout=POLL_SECONDS)
        for ref in arrived:
            actor, stage = self.awaited.pop(ref)
            try:
                outcome: Outcome | None = self.ray.get(ref)
                self.idle.append(actor)
            except self.ray.exceptions.RayActorError:
                outcome = None
            for text in () if outcome is None else outcome.warned:
                warnings.warn(f"{_name(stage)}: {text}", stacklevel=2)
            yield stage, outcome

    def show(self) -> None:
        """Shows the epochs trained since the last call."""
        asked = {actor.newest.remote(): stage for actor, stage in self.awaited.values() if stage is not None}
        answered = self.ray.wait(list(asked), num_returns=len(asked), timeout=POLL_SECONDS)[0] if asked else []
        for ref in answered:
            try:
                found = self.ray.get(ref)
            except self.ray.exceptions.RayActorError:  # heard of by `ended` too
                continue
            if found is None or found[0] != asked[ref].name or self.shown.get(found[0]) == found[1].epoch:
                continue
            self.shown[found[0]] = found[1].epoch
            self.on_epoch(*found)

    def stop(self, number: int) -> Iterator[Stage]:
        """The stages that came to their end while all workers were asked to stop."""
        self.awaited = {ref: pair for ref, pair in self.awaited.items() if pair[1] is not None}
        for actor, _ in self.awaited.values():
            actor.stop.remote(number)
        while self.awaited:
            for stage, outcome in self.ended():
                if stage is not None and outcome is not None and outcome.end == "done":
                    yield from (*outcome.parents, stage)

    def dismiss(self) -> None:
        """Ends all workers. Files are whole at any moment, so this needs no word from them."""
        for actor in {*(actor for actor, _ in self.awaited.values()), *self.idle}:
            self.ray.kill(actor)


def _sweep(crew: _Crew, store: runs.Store, stages: list[Stage], wish: Wish) -> Iterator[Stage]:
    todo, unfinished, deaths = list(stages), set(stages), Counter[Stage | None]()
    began: float | None = time.monotonic()  # None once a worker has started
    for _ in range(min(crew.n_at_once, len(stages))):
        crew.hire()
    while unfinished:
        for stage, outcome in crew.ended():
            if outcome is None:
                deaths[stage] += 1
                crew.hire()
                if stage is not None:
                    remove_leftovers(store.stage(stage.name))
                    todo.insert(0, stage)
            elif stage is not None and outcome.end == "done":
                unfinished.remove(stage)
                yield from (*outcome.parents, stage)
            error = _error_of(stage, outcome, deaths[stage])
            if error is not None and wish() is None:  # a signal that reaches all processes kills workers too
                yield from crew.stop(signal.SIGTERM)
                raise error
        number = wish()
        if number is not None:
            yield from crew.stop(number)
            raise Interrupted(number)
        while crew.idle and (ready := next_stage(crew.job.recipe, todo, unfinished)) is not None:
            began = None
            todo.remove(ready)
            crew.begin(ready)
        if began is not None and time.monotonic() - began > START_SECONDS:
            began = None
            warnings.warn(f"Ray has not yet found a place for a worker with {dict(crew.resources)}", stacklevel=2)
        crew.show()


def _error_of(stage: Stage | None, outcome: Outcome | None, n_deaths: int) -> Exception | None:
    """What ends the sweep: an error in a stage, or one death too many; None if it goes on."""
    if outcome is None and n_deaths >= N_TRIES:
        return DataError(
            f"the worker process died {n_deaths} times: is there too little memory? Make fewer networks at "
            "once (--at-once); the same command goes on from the last checkpoints",
            where=_name(stage),
        )
    if outcome is not None and outcome.error is not None:
        return outcome.error.inside(_name(stage))
    return None


def _name(stage: Stage | None) -> str:
    return "starting" if stage is None else stage.name


def _shares(nodes: Sequence[Mapping[str, Any]], job: Job, n_at_once: int | None) -> tuple[int, dict[str, float]]:
    """How many workers there are, and what each takes of a machine: its threads in CPUs, or one GPU."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    cpus = [int(node.get("CPU", 0)) for node in alive]
    if job.device == "cuda":
        n_gpus = int(sum(node.get("GPU", 0) for node in alive))
        if not n_gpus:
            raise OptionError("device 'cuda' was asked for, but Ray knows of no GPU", fix="use --device cpu")
        return min(n_at_once or n_gpus, n_gpus), {"num_cpus": min(1, max(cpus)), "num_gpus": 1}
    if n_at_once is None:
        share = max(1, min(job.n_threads, max(cpus)))
        return max(1, sum(n // share for n in cpus)), {"num_cpus": share}
    # More workers than CPUs are what was asked for: each takes a part of one.
    part = sum(cpus) / n_at_once
    return n_at_once, {"num_cpus": min(job.n_threads, int(part) if part >= 1 else part)}


def _ray() -> Any:
    """Ray itself, which is an optional part of the installation."""
    with needed_for("engine 'ray'"):
        import ray
        import ray.exceptions
    return ray


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Ray, connected; what was started here is gone at the end. One the caller is connected to is used as it is."""
    ray = _ray()
    if ray.is_initialized():
        yield ray
        return
    own: dict[str, Any] = {}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Started in a thread, Ray cannot put its own handler of SIGTERM in the place of ours: a signal stays a wish. The
    # thread lives as long as Ray does, whose processes end with the thread that started them.
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
                # Ray's native code wraps the handler to print a stack; setting it anew takes that away.
                signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
            yield ray
        finally:
            ray.shutdown()
