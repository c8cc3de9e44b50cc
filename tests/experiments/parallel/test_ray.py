"""Sweeps on Ray: the records and weights of one process; workers that die, signals, errors, what must be refused."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from sipp.cli import run_display
from sipp.cli.commands import run_command
from sipp.errors import DataError, ModelError, OptionError
from sipp.experiments.parallel import on_ray
from sipp.experiments.parallel.on_ray import Job, Outcome, RayOptions, Worker, next_stage, run_on_ray
from sipp.experiments.parallel.processes import Processes
from sipp.experiments.pipelines import parent_of
from sipp.experiments.recipes import Recipe, config_of, load_recipe
from sipp.experiments.runs.listing import list_runs
from sipp.experiments.runs.plan import Stage, plan
from sipp.experiments.runs.run_recipe import Finished, Progress, run
from sipp.experiments.runs.store import Origin, Store, code_version, open_run, without_clock
from sipp.experiments.training.setup import feed_of
from sipp.experiments.training.signals import Interrupted
from sipp.storage.files import staged

PATIENCE_S = 120.0  # for a busy machine: nothing is measured, only waited for
WITHOUT_RAY = "Ray is an optional extra (sipp[ray]) and is not installed"
SMALL = (
    "train.epochs=2",
    "train.decay={factor: 0.5, milestones: [1]}",
    "train.batch_size=256",
    "prune.methods=[sipp-hybrid, wt]",
    "prune.levels=2",
    "data.n_calibration=40",
    "data.n_holdout=100",
)
ITERATIVE = load_recipe("digits-iterative", settings=SMALL)
AT_INIT = load_recipe("digits-at-init", settings=SMALL)

app = typer.Typer()
app.command()(run_command.run)


def contents(done: Finished) -> dict[str, object]:
    """All that a run left behind: the bytes of every file, of JSON files the records without their clock."""
    left = [path for path in sorted(done.folder.rglob("*")) if path.is_file()]
    tensors: dict[str, object] = {
        str(path.relative_to(done.folder)): path.read_bytes() for path in left if path.suffix == ".safetensors"
    }
    names = [str(path.relative_to(done.folder)) for path in left]
    written = [json.loads(line) for line in (done.folder / "records.jsonl").read_text().splitlines()]
    assert written == done.records
    return {**tensors, "files": names, "records": [without_clock(record) for record in written]}


# --- with Ray -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray on this machine that all tests share: the engine uses one that is connected, and leaves it so."""
    pytest.importorskip("ray", reason=WITHOUT_RAY)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with on_ray._cluster("local"):
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        started = processes(os.getpid())
        assert any("raylet" in name for name in started.values())
        yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := is_running(started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The iterative run of one process that nobody disturbed."""
    return run(ITERATIVE, out=tmp_path_factory.mktemp("whole"), device="cpu")


def processes(root: int) -> dict[int, str]:
    """{process id: command line} of all that descend from `root`."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: names[pid] for pid in found - {root} if pid in names}


def is_running(pids: Iterable[int]) -> list[int]:
    """Those that have neither ended nor wait for their parent to look."""
    return [pid for pid in processes(1) if pid in pids and "Z" not in state_of(pid)]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def workers() -> list[int]:
    """The process ids of the sweep's workers."""
    return [pid for pid, name in processes(os.getpid()).items() if name.startswith("ray::Worker")]


@pytest.mark.usefixtures("cluster")
def test_two_workers_give_the_records_and_weights_of_one_process(whole: Finished, tmp_path: Path) -> None:
    seen: set[int] = set()

    def look(progress: Progress) -> None:
        seen.update(workers())

    done = run(ITERATIVE, out=tmp_path, device="cpu", engine="ray", ray=RayOptions(n_at_once=2), on_progress=look)
    assert contents(done) == contents(whole) and done.n_made == len(plan(ITERATIVE)) == 5
    assert len(seen) == 2 and os.getpid() not in seen


@pytest.mark.usefixtures("cluster")
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if killed or progress.epoch is None:
            return
        (folder,) = (tmp_path / "two").iterdir()
        found = workers()
        for pid in found:
            os.kill(pid, signal.SIGSTOP)  # nothing moves while we look
        if not (folder / progress.stage / "final.json").exists():  # it may be done since we heard of it
            staged(folder / progress.stage / "final.json").write_text("half")  # as a death in a save leaves it
            killed.extend(found)
        for pid in found:
            os.kill(pid, signal.SIGKILL if killed else signal.SIGCONT)

    alone = run(AT_INIT, out=tmp_path / "one", device="cpu")
    again = partial(run, AT_INIT, out=tmp_path / "two", device="cpu", engine="ray", ray=RayOptions(n_at_once=1))
    done = again(on_progress=kill, checkpoint_seconds=0.0)
    assert len(killed) == 1 and contents(done) == contents(alone) and done.n_made == 5
    monkeypatch.setattr(on_ray, "_cluster", None)  # nothing to do: Ray is not even asked
    assert again(accept_changes=True).n_made == 0


@pytest.mark.usefixtures("cluster")
def test_a_sweep_that_is_asked_to_stop(whole: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [part for setting in SMALL for part in ("--set", setting)]
    command = ["digits-iterative", *settings, "--out", str(tmp_path), "--device", "cpu", "--engine", "ray"]

    def ask(console: object, progress: Progress) -> None:
        if progress.stage.endswith("01") and signal.getsignal(signal.SIGTERM) is not handler:
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(run_display, "_plain_line", ask)
    stopped = CliRunner().invoke(app, [*command, "--at-once", "2"], catch_exceptions=False)
    assert stopped.exit_code == 128 + signal.SIGTERM and "stopped by SIGTERM" in stopped.output
    assert signal.getsignal(signal.SIGTERM) is handler and [one.state for one in list_runs(tmp_path)] == ["stopped"]
    resumed = run(ITERATIVE, out=tmp_path, device="cpu", accept_changes=True)
    assert 0 < resumed.n_made < 5 and contents(resumed) == contents(whole)


# --- without Ray ----------------------------------------------------------------------------------------------------


def test_where_ray_is_missing_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'sipp\[ray\]'"):
        run(ITERATIVE, out=tmp_path / "runs", device="cpu", engine="ray")
    assert not (tmp_path / "runs").exists()


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    command = ["digits-iterative", "--out", str(tmp_path), "--ray-address", "auto"]
    with pytest.raises(OptionError, match="--engine ray"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    with pytest.raises(OptionError, match="n_at_once=0"):
        run(ITERATIVE, out=tmp_path, engine="ray", ray=RayOptions(n_at_once=0))
    with pytest.raises(OptionError, match="accelerate"):
        run(ITERATIVE, out=tmp_path, engine="ray", processes=Processes(0, 2))
    with pytest.raises(OptionError, match="'cluster'"):
        run(ITERATIVE, out=tmp_path, engine="cluster")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def began_order(recipe: Recipe, n_workers: int) -> list[list[str]]:
    """The stages begun together when `n_workers` stages at a time end together."""
    todo, rounds = plan(recipe), []
    unfinished = set(todo)
    while unfinished:
        now: list[Stage] = []
        while len(now) < n_workers and (stage := next_stage(recipe, todo, unfinished)) is not None:
            assert parent_of(recipe.pipeline, stage) not in unfinished
            todo.remove(stage)
            now.append(stage)
        unfinished -= set(now)
        rounds.append([stage.name.removeprefix("seed0.") for stage in now])
    return rounds


def test_what_is_begun_when() -> None:
    assert began_order(ITERATIVE, 2) == [["dense"], ["sipp-hybrid.01", "wt.01"], ["sipp-hybrid.02", "wt.02"]]
    assert began_order(AT_INIT, 2) == [["dense", "sipp-hybrid.01"], ["sipp-hybrid.02", "wt.01"], ["wt.02"]]
    alone = [["dense"], ["sipp-hybrid.01"], ["wt.01"], ["sipp-hybrid.02"], ["wt.02"]]  # chains end together
    assert began_order(ITERATIVE, 1) == alone


def test_shares_of_the_machines() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}, {"Alive": True, "Resources": {"CPU": 3.0}}]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    job = Job(ITERATIVE, Path(), Path(), "cpu", 0, 2, 60.0, Origin("", "", "cpu"))
    assert on_ray._shares(nodes, job, None) == (5, {"num_cpus": 2})  # 4 workers of 2 threads, and 1
    assert on_ray._shares(nodes, replace(job, n_threads=64), None) == (1, {"num_cpus": 8})
    assert on_ray._shares(nodes, job, 3) == (3, {"num_cpus": 2})
    assert on_ray._shares(nodes, job, 22) == (22, {"num_cpus": 0.5})
    assert on_ray._shares(nodes, replace(job, device="cuda"), None) == (2, {"num_cpus": 1, "num_gpus": 1})
    assert on_ray._shares(nodes, replace(job, device="cuda"), 1)[0] == 1
    with pytest.raises(OptionError, match="no GPU"):
        on_ray._shares(nodes[1:], replace(job, device="cuda"), None)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job whose run folder is open; what a worker does with it happens in this process."""
    feed = feed_of(ITERATIVE, data_root=tmp_path, device=torch.device("cpu"))
    origin = Origin(feed.splits.digest, code_version(), "cpu")
    with open_run(tmp_path, config_of(ITERATIVE), origin) as store:
        yield Job(ITERATIVE, store.folder, tmp_path, "cpu", 0, 1, 60.0, origin)


def test_a_worker_refuses_another_folder_other_data_and_other_code(job: Job, tmp_path: Path) -> None:
    dense = plan(ITERATIVE)[0]
    elsewhere = Worker(replace(job, folder=tmp_path / "elsewhere")).make(dense)
    assert elsewhere.end == "error" and isinstance(elsewhere.error, DataError) and "share" in str(elsewhere.error)
    other_run = Worker(replace(job, recipe=AT_INIT)).make(dense)
    assert other_run.end == "error" and isinstance(other_run.error, DataError)
    for changed in ("data", "code"):
        found = Worker(replace(job, origin=replace(job.origin, **{changed: "other"}))).make(dense)
        assert found.end == "error" and isinstance(found.error, OptionError) and "same version" in str(found.error)
    assert not list(job.folder.glob("seed*"))


def test_a_worker_stops_at_the_next_step_and_says_what_it_warned_of(job: Job) -> None:
    worker, dense = Worker(job), plan(ITERATIVE)[0]
    worker.stop(signal.SIGINT)
    assert worker.make(dense).end == "stopped" and worker.newest() is None
    assert [path.name for path in job.folder.glob("*/start.json")] == ["start.json"]
    (job.folder / dense.name / "start.safetensors").write_bytes(b"damaged")
    again = Worker(job)
    done = again.make(dense)
    newest = again.newest()
    assert done.end == "done" and newest is not None and newest[1].epoch == 2
    assert len(done.warned) == 1 and "SHA-256" in done.warned[0]


class FakeCrew:
    """Workers that end as the script says, {stage: outcomes one after the other}; without a word they are done."""

    def __init__(self, job: Job, script: dict[str, list[Outcome | None]]) -> None:
        self.job, self.script, self.n_at_once, self.resources = job, script, 2, {"num_cpus": 1}
        self.idle: list[int] = []
        self.events: list[str] = []
        self.queue: list[Stage | None] = []

    def hire(self) -> None:
        self.events.append("hire")
        self.queue.append(None)

    def begin(self, stage: Stage) -> None:
        self.idle.pop()
        self.events.append(stage.name)
        self.queue.append(stage)

    def ended(self) -> Iterator[tuple[Stage | None, Outcome | None]]:
        stage = self.queue.pop(0)
        left = self.script.get("start" if stage is None else stage.name, [])
        outcome = left.pop(0) if left else Outcome("done")
        self.idle += [] if outcome is None else [0]
        yield stage, outcome

    def show(self) -> None:
        pass

    def stop(self, number: int) -> Iterator[Stage]:
        self.events.append(f"stop {number}")
        yield from [stage for stage in self.queue if stage is not None]


def swept(job: Job, script: dict[str, list[Outcome | None]], wish: Any = lambda: None) -> tuple[list[str], list[str]]:
    """(stages that were done, events) of a sweep of these workers; an error is the last event."""
    crew, made = FakeCrew(job, script), []
    try:
        store = Store(job.folder, {}, resumed=True)
        for stage in on_ray._sweep(crew, store, plan(ITERATIVE), wish):  # type: ignore[arg-type]
            made.append(stage.name)
    except (DataError, ModelError, OptionError, Interrupted) as error:
        crew.events.append(f"{type(error).__name__}: {error}")
    return made, crew.events


def test_deaths_are_forgiven_twice(job: Job) -> None:
    all_stages = sorted(stage.name for stage in plan(ITERATIVE))
    made, events = swept(job, {"seed0.wt.01": [None, None]})
    assert sorted(made) == all_stages and events.count("hire") == 4 and events.count("seed0.wt.01") == 3
    made, events = swept(job, {"seed0.wt.01": [None, None, None]})
    assert events[-1].startswith("DataError: seed0.wt.01: the worker process died 3 times") and events[-2] == "stop 15"
    assert "seed0.wt.01" not in made and "seed0.wt.02" not in events
    assert swept(job, {"start": [None, None, None]})[1][-1].startswith("DataError: starting: the worker")
    # a signal that reaches every process kills the workers too, and is a stop all the same
    polls = iter([None, None, signal.SIGINT, signal.SIGINT])
    assert swept(job, {"start": [None, None, None]}, lambda: next(polls))[1][-1].startswith("Interrupted")


def test_an_error_in_one_unit_stops_the_others_and_keeps_its_kind(job: Job) -> None:
    made, events = swept(job, {"seed0.wt.01": [Outcome("error", ModelError("training diverged"))]})
    assert events[-2:] == ["stop 15", "ModelError: seed0.wt.01: training diverged"]
    assert "seed0.wt.01" not in made and len(set(made)) == len(made)


def test_what_ends_while_all_stop_is_not_lost(job: Job) -> None:
    polls = iter([None, None, None, signal.SIGTERM])
    made, events = swept(job, {}, lambda: next(polls))
    assert events[-1].startswith("Interrupted") and events[-2] == f"stop {int(signal.SIGTERM)}"
    assert set(made) == set(events) - {"hire", events[-1], events[-2]}


def test_nothing_to_do_needs_no_ray(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "plan", lambda recipe: [])
    monkeypatch.setitem(sys.modules, "ray", None)
    store = Store(job.folder, {}, resumed=True)
    assert list(run_on_ray(job, store, RayOptions(), lambda: None, lambda stage, row: None)) == []
