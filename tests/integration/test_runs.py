"""Runs as a user meets them: a second process, SIGTERM from outside, and kill -9 at any moment."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fresh_process import run_script

from sipp.errors import OptionError
from sipp_lab.recipes import load_recipe
from sipp_lab.runs.folder import list_runs
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import run

KILL_LOOP = Path(__file__).parent.parent / "lab" / "runs" / "kill_loop.py"
N_KILLS = 3
PATIENCE_S = 120.0  # for a busy machine: nothing is measured, only waited for

SMALL = (
    "train.epochs=1",
    "train.decay={factor: 0.5, every: 5}",
    "train.batch_size=300",
    "prune.levels=1",
    "prune.methods=[magnitude]",
    "data.n_calibration=20",
)


def options(*settings: str) -> list[str]:
    return [part for setting in (*SMALL, *settings) for part in ("--set", setting)]


def wait_for(found: Path, pattern: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not list(found.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def test_a_process_that_is_asked_to_stop(tmp_path: Path) -> None:
    endless = ("train.epochs=100000",)
    arguments = ["run", "digits-iterative", *options(*endless), "--out", str(tmp_path), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "sipp", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        wait_for(tmp_path, "*/manifest.json", process)
        assert [one.state for one in list_runs(tmp_path)] == ["running"]
        with pytest.raises(OptionError, match=f"in use by process {process.pid}"):
            run(load_recipe("digits-iterative", settings=(*SMALL, *endless)), RunOptions(out=tmp_path, device="cpu"))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert "run the same command again to resume" in errors and "stopped by SIGTERM" in errors
    assert [one.state for one in list_runs(tmp_path)] == ["stopped"]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    done = run_script(KILL_LOOP, tmp_path, N_KILLS)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["equal"] and report["kills"] == N_KILLS and report["finished"] >= 1
