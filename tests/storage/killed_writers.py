"""Kills writers at every step of a save; prints what was tried as JSON.

    python tests/storage/killed_writers.py FOLDER

Children are forked from a process that has computed nothing with threads. Exits with 0 only if whatever is left is the
old or the new network, whole, and can be saved over again.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sipp
from sipp.files import RECORD_NAME, WEIGHTS_NAME
from sipp.results import hashing
from sipp.storage.pruned_folder import read_pruned

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
STEPS = ("os.rename", "os.remove", "os.mkdir")
MOST_STEPS = 100


def die_at(step: int) -> None:
    """From now on the process kills itself before its step number `step` that changes anything on the disk."""
    n_left = step

    def count(*_: object) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event in STEPS or (event == "open" and isinstance(args[2], int) and args[2] & WRITES):
            count()

    os.fsync = count
    sys.addaudithook(heard)


def child(work: Callable[[], object]) -> int:
    """The process id of a child that does this work, and exits with 0."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException as error:
        print(f"child failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def n_steps(begin: Callable[[], object], save: Callable[[], object], check: Callable[[], object]) -> int:
    """How many steps a save has: it was killed before each of them, and what was left was checked each time."""
    for step in range(MOST_STEPS):
        begin()
        _, status = os.waitpid(child(lambda at=step: (die_at(at), save())), 0)  # type: ignore[misc]
        check()
        if os.WIFEXITED(status):
            assert status == 0
            return step
    raise AssertionError("a save without an end")


def main(place: Path) -> dict[str, int]:
    os.fsync = lambda descriptor: None  # nobody cuts the power here, and disks are slow
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    old, new, third = (sipp.prune(net, None, keep=keep, method="magnitude") for keep in (0.9, 0.5, 0.3))
    old_hash, new_hash = hashing.of_model(old.model), hashing.of_model(new.model)
    done: dict[str, int] = {}

    here = place

    def fresh() -> Path:
        nonlocal here
        here = place / f"{len(list(place.iterdir()))}"
        return here

    def begin_over() -> None:
        sipp.save_folder(old, fresh())
        (here / "mine.txt").write_text("mine")

    def check_over() -> None:
        assert read_pruned(here).identity.pruned_hash in (old_hash, new_hash)
        save_again()
        found = {one.name for one in here.iterdir() if not one.name.startswith(".tmp-")}
        assert found == {WEIGHTS_NAME, RECORD_NAME, "mine.txt"} and (here / "mine.txt").read_text() == "mine"

    def check_new() -> None:
        if (here / WEIGHTS_NAME).exists():
            assert read_pruned(here).identity.pruned_hash == new_hash
        save_again()

    def save_again() -> None:
        sipp.save_folder(third, here)
        assert read_pruned(here).identity.pruned_hash == hashing.of_model(third.model)
        assert json.loads((here / RECORD_NAME).read_bytes())["pruned_hash"] == hashing.of_model(third.model)

    done["steps over a folder"] = n_steps(begin_over, lambda: sipp.save_folder(new, here), check_over)
    done["steps of a new folder"] = n_steps(fresh, lambda: sipp.save_folder(new, here), check_new)

    file = place / "net.safetensors"
    whole = {sipp.save(one, file) and file.read_bytes() for one in (old, new)}

    def check_file() -> None:
        assert file.read_bytes() in whole

    done["steps of a file"] = n_steps(lambda: sipp.save(old, file), lambda: sipp.save(new, file), check_file)

    return done


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
