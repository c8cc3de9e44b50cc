"""Faults 1 to 3: a full disk, a killed process, a power cut: the old file or the new one is whole."""

import json
import os
import resource
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import run_script
from torch import nn

import sipp
from sipp.errors import DataError
from sipp.files import new_folder


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


def test_killed_before_every_step(tmp_path: Path) -> None:
    done = run_script(Path(__file__).with_name("killed_writers.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file"] >= 4 and found["folder"] >= 8


def test_the_order_in_which_a_power_cut_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replaced(source: Any, target: Any) -> None:
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    sipp.save(nn.Linear(4, 2), tmp_path / "net.safetensors")
    assert steps == ["file", "replace", "folder"]
    steps.clear()
    with new_folder(tmp_path / "made") as place:
        (place / "a").write_text("a")
    assert steps == ["file", "folder", "replace", "folder"] and os.listdir(tmp_path / "made") == ["a"]
