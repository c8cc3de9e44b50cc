"""Run folders: whole files or none, the lock, origins, names."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _TYPES

from sipp.errors import DataError, OptionError
from sipp.files import TEMPORARY
from sipp_lab.runs.folder import (
    is_locked,
    load_checkpoint,
    load_state,
    load_values,
    open_run,
    read_manifest,
    save_checkpoint,
    save_state,
)
from sipp_lab.runs.records import Origin, Stage

CONFIG: dict[str, Any] = {"name": "toy", "seed": 1}
ORIGIN = Origin(data="d", code="c", device="cpu")
TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor([True, False])}


def test_saved_tensors_and_values_are_read_back(tmp_path: Path) -> None:
    shared, path = torch.rand(4), tmp_path / "s" / "final.safetensors"
    others = {str(dtype): torch.tensor([0.5, -1.0]).to(dtype) for dtype in _TYPES.values()}
    given = {"x": shared, "y": shared, **TENSORS, **others}
    save_state(path, given, {"k": 0.1})
    tensors, values = load_state(path)
    assert values == load_values(path) == {"k": 0.1} and tensors.keys() == given.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == given[name].dtype and bool((tensor == given[name]).all())
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["final.safetensors"]


def test_a_file_that_is_cut_or_of_another_kind_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    save_state(path, TENSORS, {})
    whole = path.read_bytes()
    for broken in (b"", whole[:4], whole[: len(whole) // 2], whole[:-1], b"{}"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="is damaged"):
            load_state(path)


@pytest.mark.parametrize("damage", ["empty", "cut", "bit"])
def test_a_damaged_checkpoint_is_an_error(damage: str, tmp_path: Path) -> None:
    path, weight = tmp_path / "s" / "checkpoint.pt", torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last)
    save_checkpoint(path, {"model": {"w": weight}, "epoch": 3, "facts": {"a": [0.1]}})
    found, whole = load_checkpoint(path), bytearray(path.read_bytes())
    assert torch.equal(found["model"]["w"], weight) and found["model"]["w"].stride() == weight.stride()
    assert (found["epoch"], found["facts"]) == (3, {"a": [0.1]})
    whole[len(whole) // 2] ^= 1
    path.write_bytes({"empty": b"", "cut": whole[:-1], "bit": whole}[damage])
    with pytest.raises(DataError, match=r"is damaged.*remove it"):
        load_checkpoint(path)


def test_no_two_arms_have_one_folder() -> None:
    own, arm = Stage(0, "sipp-det-mean", 1), Stage(0, "sipp-det mean", 1)  # a score of one's own may be called so
    assert own.name != arm.name and " " not in arm.name


def test_leftovers_of_the_killed_are_removed(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, ORIGIN) as first:
        (first / "stage").mkdir()
        (first / "stage" / f"{TEMPORARY}7-x").write_text("half")
    with open_run(tmp_path, CONFIG, ORIGIN) as second:
        assert not list((second / "stage").iterdir())


def test_a_second_process_is_refused_at_once(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, ORIGIN) as held:
        code = f"import fcntl; f = open({str(held / 'lock')!r}); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
        assert b"BlockingIOError" in subprocess.run([sys.executable, "-c", code], capture_output=True).stderr
        with pytest.raises(OptionError, match=f"process {os.getpid()}"), open_run(tmp_path, CONFIG, ORIGIN):
            pass
        assert is_locked(held)
    assert not is_locked(held)
    with open_run(tmp_path, CONFIG, ORIGIN):
        pass


@pytest.mark.parametrize("changed", ["data", "code", "device"])
def test_another_origin_is_refused_without_the_flag(tmp_path: Path, changed: str) -> None:
    other = replace(ORIGIN, **{changed: "other"})
    with open_run(tmp_path, CONFIG, ORIGIN) as first:
        pass
    with open_run(tmp_path, CONFIG, other):  # there is nothing yet that both could mix
        pass
    with open_run(tmp_path, CONFIG, ORIGIN):
        (first / "seed0.dense").mkdir()
        (first / "seed0.dense" / "checkpoint.pt").touch()
    with pytest.raises(OptionError, match=f"different {changed}.*--accept-changes"), open_run(tmp_path, CONFIG, other):
        pass
    with open_run(tmp_path, CONFIG, other, accept_changes=True):
        pass
    assert len(read_manifest(first).origins) == 2
