"""Kills writers before every step of a save that changes the disk; prints how many steps there were, as JSON.

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
from sipp.results import hashing

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


def killed(save: Callable[[], object], step: int) -> bool:
    """Whether a child that saves is killed before this step; if not, it must end well."""
    pid = os.fork()
    if pid == 0:
        die_at(step)
        save()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def file_hash(path: Path) -> str:
    return hashing.of_state(sipp.load(path))


def folder_hash(path: Path) -> str:
    report = sipp.inspect(path)
    assert isinstance(report, sipp.results.SavedNetwork) and (path / "mine.txt").read_text() == "mine"
    return report.pruned_hash


def main(place: Path) -> dict[str, int]:
    os.fsync = lambda descriptor: None  # nobody cuts the power here, and disks are slow
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    old, new = (sipp.prune(net, None, keep=keep, method="magnitude") for keep in (0.9, 0.5))
    old_hash, new_hash = hashing.of_model(old.model), hashing.of_model(new.model)
    done: dict[str, int] = {}
    (place / "folder").mkdir()
    (place / "folder" / "mine.txt").write_text("mine")
    saves: dict[str, tuple[Any, Callable[[Path], str]]] = {
        "file": (sipp.save, file_hash),
        "folder": (sipp.save_folder, folder_hash),
    }
    for name, (save, read) in saves.items():
        path = place / name
        for step in range(MOST_STEPS):
            save(old, path)
            is_killed = killed(lambda save=save, path=path: save(new, path), step)  # type: ignore[misc]
            assert read(path) in (old_hash, new_hash)
            if not is_killed:
                assert read(path) == new_hash
                done[name] = step
                break
    return done


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
