"""Sweeps on Ray: the records and weights of one process; workers that die, signals, errors, what must be refused."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lab.small_runs import contents, small

from sipp.errors import DataError, ModelError, OptionError
from sipp_lab.recipes import config_of
from sipp_lab.runs import on_ray, running
from sipp_lab.runs.context import load_feed
from sipp_lab.runs.folder import code_version, open_run
from sipp_lab.runs.on_ray import RunOnRay, train_stage
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.records import Origin
from sipp_lab.runs.running import FinishedRun, run
from sipp_lab.runs.stages import plan

RAY = RunOptions(engine="ray")
PATIENCE_S = 120.0  # for a busy machine: nothing is measured, only waited for
WITHOUT_RAY = "Ray is an optional extra (sipp[ray]) and is not installed"
TWO = "prune.methods=[sipp-hybrid, magnitude]"
ITERATIVE, AT_INIT = small("digits-iterative", TWO), small("digits-at-init", TWO)


def on_ray_in(out: Path, at_once: int) -> RunOptions:
    return RunOptions(out=out, device="cpu", engine="ray", at_once=at_once)


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
    return run(ITERATIVE, RunOptions(out=tmp_path_factory.mktemp("whole"), device="cpu"))


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
    n_at_once: list[int] = []

    @contextmanager
    def looking(title: str, total: int, *, shown: bool) -> Iterator[Any]:
        yield lambda n: n_at_once.append(len(workers()))

    monkeypatch.setattr(running, "progress_bar", looking)
    monkeypatch.setattr(on_ray, "train_network", None)  # in this process only: whatever is made, other processes make
    done = run(ITERATIVE, on_ray_in(tmp_path, 2))
    assert contents(done.folder) == contents(whole.folder) and done.n_made == len(plan(ITERATIVE)) == 5
    assert max(n_at_once) <= 2  # that two begin together is tested below: here it depends on how soon processes start


# the last of these: a worker that is started anew imports everything again
@pytest.mark.usefixtures("cluster")
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def kill_once() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not killed and time.monotonic() < deadline:
            under_way = [path.parent for path in (tmp_path / "two").glob("*/*/checkpoint.pt")]
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
    alone = run(few, RunOptions(out=tmp_path / "one", device="cpu"))
    how = on_ray_in(tmp_path / "two", 1)
    killer = threading.Thread(target=kill_once)
    killer.start()
    done = run(few, how, checkpoint_seconds=0.0)
    killer.join()
    assert len(killed) == 1 and done.n_made == 3
    run(few, RunOptions(out=tmp_path / "two", device="cpu", accept_changes=True))  # removes what the dead left
    assert contents(done.folder) == contents(alone.folder)
    monkeypatch.setattr(on_ray, "_cluster", None)  # nothing to do: Ray is not even asked
    assert run(few, replace(how, accept_changes=True)).n_made == 0


@pytest.mark.usefixtures("cluster")
def test_an_error_in_one_stage_ends_the_run_and_keeps_its_kind(tmp_path: Path) -> None:
    diverges = small("digits-at-init", "prune.methods=[magnitude]", "train.rate=1.0e+30")
    with pytest.raises(ModelError, match=r"seed0\..*: training diverged"):
        run(diverges, on_ray_in(tmp_path, 2))


# --- without Ray ----------------------------------------------------------------------------------------------------


def test_where_ray_is_missing_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install '\.\[ray\]'"):
        run(ITERATIVE, replace(RAY, out=tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_options_that_make_no_sense_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sipp_lab.runs.running.n_processes", lambda: 2)
    with pytest.raises(OptionError, match="accelerate"):
        run(ITERATIVE, replace(RAY, out=tmp_path))
    assert not list(tmp_path.iterdir())


def test_shares_of_the_machines() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}, {"Alive": True, "Resources": {"CPU": 3.0}}]
    nodes.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    with_gpus = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}, *nodes[1:]]

    def shares(n_threads: int | None, at_once: int | None, *, device: Any = "cpu", asked: Any = "auto") -> Any:
        """(networks at once, what each takes of a machine)"""
        recipe = ITERATIVE.model_copy(update={"n_threads": n_threads})
        how = RunOptions(engine="ray", at_once=at_once, device=asked)
        job = RunOnRay(recipe, Path(), how, 60.0, Origin(data="", code="", device=device))
        return on_ray._resources(found, job)

    found = nodes
    assert shares(2, None) == (5, {"num_cpus": 2})  # 4 workers of 2 threads, and 1
    assert shares(64, None) == (1, {"num_cpus": 8})
    assert shares(None, None) == (11, {"num_cpus": 1})  # no core has two networks, and none is idle
    assert shares(None, 3) == (3, {"num_cpus": 1}) and shares(2, 3) == (3, {"num_cpus": 2})
    assert shares(2, 22) == (22, {"num_cpus": 0.5}) and shares(None, 22) == (22, {"num_cpus": 0.5})
    with pytest.raises(OptionError, match="no GPU"):
        shares(None, None, device="cuda")
    found = with_gpus
    assert shares(None, None, device="cuda") == (2, {"num_cpus": 0, "num_gpus": 1})
    assert shares(None, 1, device="cuda")[0] == 1 and shares(1, None, asked="cpu")[0] == 11
    with pytest.raises(OptionError, match="2 GPUs, but this machine has none; add --device cuda"):
        shares(None, None)  # the driver has no GPU


@pytest.fixture
def job(tmp_path: Path) -> Iterator[RunOnRay]:
    """A run whose folder is open; what a task does with it happens in this process."""
    feed = load_feed(ITERATIVE, tmp_path, torch.device("cpu"))
    origin = Origin(data=feed.splits.digest, code=code_version(), device="cpu")
    with open_run(tmp_path, config_of(ITERATIVE), origin) as folder:
        yield RunOnRay(ITERATIVE, folder, RunOptions(data=tmp_path), 60.0, origin)


def test_a_task_refuses_another_folder_other_data_and_other_code(job: RunOnRay, tmp_path: Path) -> None:
    dense = plan(ITERATIVE)[0]
    for other in (replace(job, folder=tmp_path / "elsewhere"), replace(job, recipe=AT_INIT)):
        with pytest.raises(DataError, match="share"):
            train_stage(other, dense)
    for changed in ("data", "code"):
        with pytest.raises(OptionError, match="same version"):
            train_stage(replace(job, origin=replace(job.origin, **{changed: "other"})), dense)
    assert not list(job.folder.glob("seed*"))


def test_chains_grow_together() -> None:
    todo, started = plan(ITERATIVE), list[str]()
    unfinished = set(todo)
    while (stage := on_ray._next_stage(ITERATIVE, todo, unfinished)) is not None:
        todo.remove(stage)
        unfinished.remove(stage)
        started.append(stage.name.removeprefix("seed0."))
    assert started == ["dense", "sipp-hybrid.01", "magnitude.01", "sipp-hybrid.02", "magnitude.02"]
    assert (
        on_ray._next_stage(ITERATIVE, plan(ITERATIVE)[1:], set(plan(ITERATIVE))) is None
    )  # all wait for the dense one
