"""Kills a run with SIGKILL again and again, resumes it each time, and compares it with one that nobody disturbed.

    python tests/lab/runs/kill_loop.py FOLDER N_KILLS [SEED]

Every other kill strikes inside a save (before or after a chosen fsync), the others at a random time. Prints one line
of JSON and exits with 0 only if every finished run is bitwise the undisturbed one: weights, masks and records (but for
what a clock decides). Nothing is computed by several threads before children are forked: none is lost on the way.
"""

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from sipp.verbs.prune import prune
from sipp_lab.data.sets import load_digits
from sipp_lab.nets import plain
from sipp_lab.recipes import load_recipe
from sipp_lab.runs.folder import load_state, read_records
from sipp_lab.runs.options import RunOptions
from sipp_lab.runs.running import run

plain.DIGITS_WIDTHS = (4, 8, 8)  # its size decides nothing here
SETTINGS = (
    "train.epochs=4",
    "train.decay={factor: 0.5, milestones: [2]}",
    "train.batch_size=200",
    "prune.methods=[sipp-hybrid]",
    "prune.levels=2",
    "data.n_calibration=20",
)
MIN_DELAY = 0.02
LONGEST_SHARE = 0.5  # of the time an undisturbed run takes: the longest that a child lives
MOST_SYNCS = 12  # a checkpoint after each of 4 epochs but the last, a network and records: 3 stages


def die_in_save(after: int) -> None:
    """From now on the process kills itself at its fsync number `after // 2`, before or after it."""
    n_left, fsync = after, os.fsync

    def counted(descriptor: int) -> None:
        nonlocal n_left
        for act in (lambda: None, lambda: fsync(descriptor)):
            act()
            n_left -= 1
            if n_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = counted


def start(out: Path, *, dies_at: int | None = None) -> int:
    """The process id of a child that runs (or resumes) the recipe below `out`, checkpointing after every epoch."""
    pid = os.fork()
    if pid:
        return pid
    if dies_at is not None:
        die_in_save(dies_at)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a damaged file would be one, and no kill may leave any
            recipe = load_recipe("digits-iterative", settings=SETTINGS)
            run(recipe, RunOptions(out=out, device="cpu", accept_changes=True), checkpoint_seconds=0.0)
    except BaseException as error:
        print(f"child failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def contents(out: Path) -> dict[str, object]:
    """All that a finished run left behind: the bytes of every tensor file, and the records without their clock."""
    (folder,) = out.iterdir()
    tensors: dict[str, object] = {
        str(path.relative_to(folder)): save(load_state(path)[0]) for path in sorted(folder.rglob("*.safetensors"))
    }
    return {**tensors, "records": [{**record, "seconds": 0} for record in read_records(folder)]}


def main(folder: Path, n_kills: int, seed: int) -> int:
    """The exit status; kills until `n_kills` children have died, however many runs that takes."""
    load_digits()
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # nobody cuts the power here, and disks are slow
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports what every optimizer does, once for all
    prune(nn.Linear(40, 30), torch.rand(9, 40), keep=0.5, method="sipp-hybrid")  # loads what is compiled, once for all
    began = time.monotonic()
    _, status = os.waitpid(start(folder / "whole"), 0)
    assert status == 0, "the undisturbed run failed"
    seconds = time.monotonic() - began
    expected = contents(folder / "whole")
    rng = random.Random(seed)
    n_killed, n_finished, all_equal = 0, 0, True
    while n_killed < n_kills or not n_finished:
        out = folder / f"parts{n_finished}"
        is_last = n_killed >= n_kills
        in_save = n_killed % 2 == 0
        pid = start(out, dies_at=rng.randrange(2 * MOST_SYNCS) if in_save and not is_last else None)
        if not in_save and not is_last:
            time.sleep(rng.uniform(MIN_DELAY, LONGEST_SHARE * seconds))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            n_killed += 1
            continue
        n_finished += 1
        all_equal &= status == 0 and contents(out) == expected
        if status:
            break
    report = {"kills": n_killed, "finished": n_finished, "equal": all_equal}
    print(json.dumps({**report, "files": len(expected), "undisturbed_seconds": round(seconds, 2)}))
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
