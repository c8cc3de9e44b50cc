"""Sweeps on Ray: the records and weights of one process; workers that die, signals, errors, what must be refused."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from lab.small_runs import contents, small

from sipp.errors import DataError, ModelError, OptionError, SippError
from sipp_lab.parallel import on_ray
from sipp_lab.parallel.on_ray import (
    RayOptions,
    RunOnRay,
    run_on_ray,
    train_stage,
)
from sipp_lab.parallel.processes import Processes
from sipp_lab.recipes import config_of
from sipp_lab.runs.folder import code_version, open_run
from sipp_lab.runs.one_run import FinishedRun, Progress, run
from sipp_lab.runs.records import Origin, Stage
from sipp_lab.runs.stages import plan
from sipp_lab.training.setup import load_feed

PATIENCE_S = 120.0  # for a busy machine: nothing is measured, only waited for
WITHOUT_RAY = "Ray is an optional extra (sipp[ray]) and is not installed"
TWO = "prune.methods=[sipp-hybrid, magnitude]"
ITERATIVE, AT_INIT = small("digits-iterative", TWO), small("digits-at-init", TWO)


# --- with Ray -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray on this machine that all tests share: the engine uses one that is connected, and leaves it so."""
    pytest.importorskip("ray", reason=WITHOUT_RAY)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    others = processes(os.getpid())  # of tests before
    with on_ray._cluster("local"):
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        started = {pid: name for pid, name in processes(os.getpid()).items() if pid not in others}
        assert any("raylet" in name for name in started.values())
        yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := [pid for pid in started if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The iterative run of one process that nobody disturbed."""
    return run(ITERATIVE, out=tmp_path_factory.mktemp("whole"), device="cpu")


def processes(root: int) -> dict[int, str]:
    """{process id: command line} of all that descend from `root`."""
    found = {}
    for process in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found[process.pid] = " ".join(process.cmdline())
    return found


def is_running(pid: int) -> bool:
    """Whether this process is running; a zombie is not."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def workers() -> list[int]:
    """The process ids of the tasks under way."""
    return [pid for pid, name in processes(os.getpid()).items() if name.startswith("ray::train_stage")]


@pytest.mark.usefixtures("cluster")
def test_two_workers_give_the_records_and_weights_of_one_process(
    whole: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_at_once = 0

    def look(progress: Progress) -> None:
        nonlocal most_at_once
        most_at_once = max(most_at_once, len(workers()))

    monkeypatch.setattr(on_ray, "train_network", None)  # in this process only: whatever is made, other processes make
    done = run(ITERATIVE, out=tmp_path, device="cpu", ray=RayOptions(n_at_once=2), on_progress=look)
    assert contents(done.folder) == contents(whole.folder) and done.n_made == len(plan(ITERATIVE)) == 5
    assert most_at_once <= 2  # that two begin together is tested below: here it depends on how soon processes start


# the last of these: a worker that is started anew imports everything again
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill_once() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not killed and time.monotonic() < deadline:
            under_way = [path.parent for path in (tmp_path / "two").glob("*/*/checkpoint.safetensors")]
            found = workers() if under_way else []
            for pid in found:
                os.kill(pid, signal.SIGSTOP)  # nothing moves while we look
            if under_way and found and not (under_way[0] / "final.safetensors").exists():
                (under_way[0] / ".tmp-7-final.safetensors").write_text("half")  # as a death in a save leaves it
                killed.extend(found)
            for pid in found:
                os.kill(pid, signal.SIGKILL if killed else signal.SIGCONT)
            time.sleep(0.001)

    few = small("digits-at-init", "prune.methods=[sipp-hybrid]", "train.epochs=6")
    alone = run(few, out=tmp_path / "one", device="cpu")
    again = partial(run, few, out=tmp_path / "two", device="cpu", ray=RayOptions(n_at_once=1))
    killer = threading.Thread(target=kill_once)
    killer.start()
    done = again(checkpoint_seconds=0.0)
    killer.join()
    assert len(killed) == 1 and done.n_made == 3
    run(few, out=tmp_path / "two", device="cpu", accept_changes=True)  # removes what the dead left
    assert contents(done.folder) == contents(alone.folder)
    monkeypatch.setattr(on_ray, "_cluster", None)  # nothing to do: Ray is not even asked
    assert again(accept_changes=True).n_made == 0


# --- without Ray ----------------------------------------------------------------------------------------------------


def test_where_ray_is_missing_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install '\.\[ray\]'"):
        run(ITERATIVE, out=tmp_path / "runs", device="cpu", ray=RayOptions())
    assert not (tmp_path / "runs").exists()


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="n_at_once=0"):
        run(ITERATIVE, out=tmp_path, ray=RayOptions(n_at_once=0))
    with pytest.raises(OptionError, match="accelerate"):
        run(ITERATIVE, out=tmp_path, ray=RayOptions(), processes=Processes(0, 2))
    assert not list(tmp_path.iterdir())


def test_shares_of_the_machines() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}, {"Alive": True, "Resources": {"CPU": 3.0}}]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    origin = Origin(data="", code="", device="cpu")
    job = RunOnRay(ITERATIVE, Path(), Path(), "cpu", 60.0, origin, n_threads=2)
    assert on_ray._resources(nodes, job, None) == (5, {"num_cpus": 2})  # 4 workers of 2 threads, and 1
    assert on_ray._resources(nodes, replace(job, n_threads=64), None) == (1, {"num_cpus": 8})
    assert on_ray._resources(nodes, job, 3) == (3, {"num_cpus": 2})
    assert on_ray._resources(nodes, job, 22) == (22, {"num_cpus": 0.5})
    assert on_ray._resources(nodes, replace(job, device="cuda"), None) == (2, {"num_cpus": 1, "num_gpus": 1})
    assert on_ray._resources(nodes, replace(job, device="cuda"), 1)[0] == 1
    with pytest.raises(OptionError, match="no GPU"):
        on_ray._resources(nodes[1:], replace(job, device="cuda"), None)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[RunOnRay]:
    """A run whose folder is open; what a task does with it happens in this process."""
    feed = load_feed(ITERATIVE, data_root=tmp_path, device=torch.device("cpu"))
    origin = Origin(data=feed.splits.digest, code=code_version(), device="cpu")
    with open_run(tmp_path, config_of(ITERATIVE), origin) as folder:
        yield RunOnRay(ITERATIVE, folder, tmp_path, "cpu", 60.0, origin)


def test_a_task_refuses_another_folder_other_data_and_other_code(job: RunOnRay, tmp_path: Path) -> None:
    dense = plan(ITERATIVE)[0]
    elsewhere = train_stage(replace(job, folder=tmp_path / "elsewhere"), dense)
    assert isinstance(elsewhere, DataError) and "share" in str(elsewhere)
    other_run = train_stage(replace(job, recipe=AT_INIT), dense)
    assert isinstance(other_run, DataError)
    for changed in ("data", "code"):
        found = train_stage(replace(job, origin=replace(job.origin, **{changed: "other"})), dense)
        assert isinstance(found, OptionError) and "same version" in str(found)
    assert not list(job.folder.glob("seed*"))


class FakeRef(NamedTuple):
    stage: Stage
    number: int  # of the try


class FakeRay:
    """A fake Ray whose tasks end one by one with the scripted {stage: outcome}; others succeed."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            pass

    def __init__(self, script: dict[str, SippError | None]) -> None:
        self.script, self.events, self.left_running, self.most_running = script, list[str](), 0, 0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, made: Any) -> Any:
        return SimpleNamespace(options=lambda **options: self._handle(made, options))

    def _handle(self, made: Any, options: dict[str, Any]) -> Any:
        assert made is train_stage and options == {"max_retries": 2, "num_cpus": 1}
        return SimpleNamespace(remote=self._begin)

    def _begin(self, run: RunOnRay, stage: Stage) -> FakeRef:
        self.events.append(stage.name)
        self.left_running += 1
        self.most_running = max(self.most_running, self.left_running)
        return FakeRef(stage, len(self.events))

    def wait(self, refs: list[FakeRef], *, num_returns: int, timeout: float) -> tuple[list[FakeRef], list[FakeRef]]:
        self.left_running -= 1
        return refs[:1], refs[1:]

    def get(self, ref: Any) -> Any:
        if not isinstance(ref, FakeRef):
            return ref
        error = self.script.get(ref.stage.name)
        if ref.stage.name in self.script and error is None:
            raise self.exceptions.RayError("out of memory\nand more")
        return error

    def cancel(self, ref: FakeRef, *, force: bool) -> None:
        self.left_running -= 1
        self.events.append(f"cancel {ref.stage.name}")


def swept(
    job: RunOnRay, script: dict[str, SippError | None], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """(stages that were done, events) of a sweep of such tasks; an error is the last event."""
    fake, made = FakeRay(script), []
    monkeypatch.setattr(on_ray, "_cluster", lambda address: nullcontext(fake))
    try:
        for stage in run_on_ray(job, RayOptions()):
            made.append(stage.name)
    except (DataError, ModelError, OptionError) as error:
        fake.events.append(f"{type(error).__name__}: {error}")
    assert fake.left_running == 0 and fake.most_running <= 2
    return made, fake.events


def test_a_sweep_in_the_order_of_the_chains(job: RunOnRay, monkeypatch: pytest.MonkeyPatch) -> None:
    made, events = swept(job, {}, monkeypatch)
    assert made == events and sorted(made) == sorted(s.name for s in plan(ITERATIVE))


def test_a_process_that_dies_again_and_again(job: RunOnRay, monkeypatch: pytest.MonkeyPatch) -> None:
    made, events = swept(job, {"seed0.magnitude.01": None}, monkeypatch)
    assert events[-1].startswith("DataError: seed0.magnitude.01: the process died 3 times (out of memory)")
    assert "seed0.magnitude.01" not in made and "seed0.magnitude.02" not in events


def test_an_error_in_one_stage_stops_the_others_and_keeps_its_kind(
    job: RunOnRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, events = swept(job, {"seed0.magnitude.01": ModelError("training diverged")}, monkeypatch)
    assert events[-2:] == ["cancel seed0.sipp-hybrid.02", "ModelError: seed0.magnitude.01: training diverged"]
    assert "seed0.magnitude.01" not in made and len(set(made)) == len(made)
