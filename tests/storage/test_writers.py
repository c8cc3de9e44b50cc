"""Faults 1 to 3: several writers at one place, a full disk, a killed process: the old file or the new one is whole."""

import json
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from fresh_process import run_script
from torch import nn

import sipp
from sipp.errors import DataError
from sipp.files import new_folder, write_atomic

N_THREADS, N_WRITES = 3, 60


def test_threads_that_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "net"
    contents = [bytes([i]) * 300_000 for i in range(N_THREADS)]
    write_atomic(path, contents[0])
    failed: list[Exception] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(N_WRITES):
                write_atomic(path, data)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in contents
    assert not failed and path.read_bytes() in contents and os.listdir(tmp_path) == ["net"]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_full_disk_leaves_what_was_there_and_no_half_file(what: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small, large = (sipp.prune(nn.Linear(width, 64), None, keep=0.9, method="magnitude") for width in (8, 512))
    save = sipp.save if what == "file" else sipp.save_folder
    path = tmp_path / "net"
    save(small, path)

    def content() -> dict[str, bytes]:
        files = [path] if what == "file" else sorted(path.iterdir())
        return {file.name: file.read_bytes() for file in files}

    before, limits = content(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        with pytest.raises(DataError, match=rf"{path}.* could not be written .*give another place"):
            save(large, path)
        with pytest.raises(DataError, match=r"other.* could not be written"):
            save(large, tmp_path / "other")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    files = {one for one in tmp_path.rglob("*") if one.is_file()}
    assert content() == before and files == ({path} if what == "file" else set(path.iterdir()))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "nowhere" / "net"):
        with pytest.raises(DataError, match=rf"{path}: could not be written"):
            sipp.save(nn.Linear(4, 2), path)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_that_could_not_be_filled_does_not_appear(tmp_path: Path) -> None:
    def stopped() -> None:
        with new_folder(tmp_path / "a" / "b") as place:
            (place / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not os.listdir(tmp_path / "a")


def test_killed_at_every_step(tmp_path: Path) -> None:
    done = run_script(Path(__file__).with_name("killed_writers.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps over a folder"] >= 6 and found["steps of a new folder"] >= 6 and found["steps of a file"] >= 4
