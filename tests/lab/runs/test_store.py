"""Run folders: whole files or none, checksums, fallback, the lock, origins, names."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import _TYPES

from sipp import files
from sipp.errors import DataError, OptionError
from sipp.files import read_json, write_atomic, write_json
from sipp.results.manifest import Origin
from sipp.storage.state_files import load_state, save_state
from sipp_lab.runs import store
from sipp_lab.runs.store import newest_checkpoint, open_run, run_name, save_checkpoint
from sipp_lab.training.signals import Interrupted, stop_on_signals

CONFIG: dict[str, Any] = {"name": "toy", "seed": 1}
ORIGIN = Origin(data="d", code="c", device="cpu")
TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.tensor([True, False])}


def same(found: tuple[dict[str, torch.Tensor], dict[str, Any]] | None, values: dict[str, Any]) -> bool:
    assert found is not None
    return found[1] == values and all(torch.equal(found[0][key], TENSORS[key]) for key in TENSORS)


def test_saved_tensors_and_values_are_read_back(tmp_path: Path) -> None:
    shared = torch.rand(4)
    others = {str(dtype): torch.tensor([0.5, -1.0]).to(dtype) for dtype in _TYPES.values()}
    save_state(tmp_path / "s", "final", {"x": shared, "y": shared, **TENSORS, **others}, {"k": 0.1})
    assert same(load_state(tmp_path / "s", "final"), {"k": 0.1})
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["final.safetensors"]


def flips(data: bytes) -> Iterator[bytes]:
    """Every way a file is damaged here: cut at 0, 30 and 99 %, and one bit flipped in every byte."""
    for share in (0, 30, 99):
        yield data[: len(data) * share // 100]
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    name = "step-000001-000000000"
    save_checkpoint(tmp_path, "step-000000-000000005", TENSORS, {"n": 0})
    save_checkpoint(tmp_path, name, TENSORS, {"n": 1})
    assert same(newest_checkpoint(tmp_path), {"n": 1})
    path = tmp_path / f"{name}.safetensors"
    for damaged in flips(path.read_bytes()):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match=name):
            assert same(newest_checkpoint(tmp_path), {"n": 0})
    path.unlink()
    assert same(newest_checkpoint(tmp_path), {"n": 0})


def test_only_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for n in range(4):
        save_checkpoint(tmp_path, store.step_name(n, 0), TENSORS, {"n": n})
    assert store.checkpoints(tmp_path) == [store.step_name(3, 0), store.step_name(2, 0)]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/x"):
        write_atomic(tmp_path / "file" / "x", b"")
    with pytest.raises(DataError, match="file"), open_run(tmp_path / "file" / "runs", CONFIG, ORIGIN):
        pass


@pytest.mark.parametrize("name", ["../x", "a/b", "..", "", ".hidden", "a..b", "x" * 500, "a b", "a\0b", "/etc"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError):
        save_state(tmp_path, name, TENSORS, {})
    with pytest.raises(OptionError), open_run(tmp_path, {"name": name}, ORIGIN):
        pass
    assert not list(tmp_path.iterdir())


def test_leftovers_of_the_killed_are_removed(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, ORIGIN) as first:
        (first / "stage").mkdir()
        files.temporary_path(first / "stage" / "x").write_text("half")
    with open_run(tmp_path, CONFIG, ORIGIN) as second:
        assert not list((second / "stage").iterdir())


def test_a_second_process_is_refused_at_once(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, ORIGIN) as held:
        code = f"import fcntl; f = open({str(held / 'lock')!r}); fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
        assert b"BlockingIOError" in subprocess.run([sys.executable, "-c", code], capture_output=True).stderr
        with pytest.raises(OptionError, match=f"process {os.getpid()}"), open_run(tmp_path, CONFIG, ORIGIN):
            pass
        assert store.is_locked(held)
    assert not store.is_locked(held)
    with open_run(tmp_path, CONFIG, ORIGIN):
        pass


@pytest.mark.parametrize("changed", ["data", "code", "device"])
def test_another_origin_is_refused_without_the_flag(tmp_path: Path, changed: str) -> None:
    with open_run(tmp_path, CONFIG, ORIGIN) as first:
        pass
    other = replace(ORIGIN, **{changed: "other"})
    with pytest.raises(OptionError, match=f"different {changed}.*--accept-changes"), open_run(tmp_path, CONFIG, other):
        pass
    with open_run(tmp_path, CONFIG, other, accept_changes=True):
        pass
    assert len(read_json(first / "manifest.json")["origins"]) == 2


def test_another_configuration_has_another_folder_and_is_refused_in_this_one(tmp_path: Path) -> None:
    assert run_name(CONFIG) != run_name({**CONFIG, "seed": 2})
    with open_run(tmp_path, CONFIG, ORIGIN) as first:
        pass
    write_json(first / "manifest.json", {"config": {**CONFIG, "seed": 2}, "origins": [asdict(ORIGIN)]})
    with pytest.raises(OptionError, match="another configuration"), open_run(tmp_path, CONFIG, ORIGIN):
        pass
    text = (first / "manifest.json").read_text()
    (first / "manifest.json").write_text(json.dumps(json.loads(text) | {"format": 2}))
    with pytest.raises(DataError, match="checksum"), open_run(tmp_path, CONFIG, ORIGIN):
        pass


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_asks_to_stop_and_handlers_are_restored(number: signal.Signals, status: int) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    with stop_on_signals() as wish:
        assert wish() is None
        os.kill(os.getpid(), number)
        assert wish() == number
        assert signal.getsignal(number) is before[number]  # the second one is obeyed at once
        assert Interrupted(number).exit_status == status
    assert {one: signal.getsignal(one) for one in before} == before
