"""Several writers at one place, some of them killed: one complete network is left, and can be replaced."""

import errno
import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import run_script
from safetensors.torch import load_file
from torch import nn

import sipp
from sipp.errors import DataError
from sipp.report.results import read_intact_results
from sipp.results.certificate import Certificate
from sipp.results.jsonio import from_json, to_json
from sipp.results.network_hash import model_hash, state_hash
from sipp.storage.files import sync_folder, temporary_path, write_atomic
from sipp.storage.outputs import CERTIFICATE, RECORD_NAME, WEIGHTS_NAME, write_file
from sipp.storage.pruned_folder import OTHER_COPY, read_pruned

N_THREADS, N_WRITES = 3, 60


@pytest.fixture(scope="module")
def both() -> tuple[sipp.Pruned, sipp.Pruned]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    return sipp.prune(net, None, keep=0.8, method="wt"), sipp.prune(net, None, keep=0.5, method="wt")


def modes(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- one file -------------------------------------------------------------------------------------------------------


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


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, empty = tmp_path / "far" / "net.safetensors", tmp_path / "net.safetensors", tmp_path / "empty"
    link.symlink_to(target)
    empty.symlink_to(link.name)
    for path in (link, empty):  # at first it leads to nothing, then by another link
        target.unlink(missing_ok=True)
        sipp.save(nn.Linear(4, 2), path)
        assert path.is_symlink() and not target.is_symlink() and sorted(sipp.load(target)) == ["bias", "weight"]
    assert os.listdir(tmp_path / "far") == [target.name]
    loop = tmp_path / "loop"
    loop.symlink_to(loop.name)
    with pytest.raises(DataError, match=r"loop: could not be written \(it is not a plain file"):
        sipp.save(nn.Linear(4, 2), loop)
    assert loop.is_symlink()


def test_permissions_stay_and_new_files_follow_the_umask(tmp_path: Path) -> None:
    path, before = tmp_path / "net.safetensors", os.umask(0o027)
    try:
        sipp.save(nn.Linear(4, 2), path)
        assert modes(path) == 0o640
        for mode in (0o600, 0o666, 0o444):
            path.chmod(mode)
            sipp.save(nn.Linear(4, 2), path)
            assert modes(path) == mode
    finally:
        os.umask(before)


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(DataError, match="not a plain file"):
            sipp.save(nn.Linear(4, 2), tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_what_is_said_where_the_folder_cannot_be_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync = tmp_path / "f", os.fsync
    code = errno.EIO

    def fails(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    write_atomic(path, b"old")
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(DataError, match="was written completely, but a power cut may undo that"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    code = errno.EINVAL  # file systems that have no such thing
    write_atomic(path, b"newer")
    sync_folder(tmp_path)
    assert path.read_bytes() == b"newer" and os.listdir(tmp_path) == ["f"]


def test_leftovers_of_the_killed_go_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "net"
    stale, fresh, others = temporary_path(path), temporary_path(path), temporary_path(tmp_path / "other")
    foreign = [tmp_path / name for name in (".tmp-1-net", ".tmp-mine", "tmp-0123456789abcdef-net")]
    for one in (stale, fresh, others, *foreign):
        one.write_text("x")
    linked = temporary_path(path)
    linked.symlink_to(foreign[0])
    long_ago = time.time() - 2 * 86_400
    for one in (stale, others, *foreign):
        os.utime(one, (long_ago, long_ago))
    write_atomic(path, b"new")
    assert {one.name for one in tmp_path.iterdir()} == {
        one.name for one in (path, fresh, others, linked, *foreign)
    }  # fmt: skip


# --- a folder -------------------------------------------------------------------------------------------------------


def is_pair(folder: Path) -> bool:
    """Whether one who knows nothing of sipp finds a record and the network that it speaks of."""
    record = json.loads((folder / RECORD_NAME).read_bytes())
    return bool(record["pruned_hash"] == state_hash(load_file(folder / WEIGHTS_NAME)))


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", [WEIGHTS_NAME, RECORD_NAME])
def test_a_save_during_another_save_leaves_one_complete_folder(
    name: str, when: str, dies: bool, both: tuple[sipp.Pruned, sipp.Pruned], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    slow, fast = both
    folder, replace = sipp.save_folder(fast, tmp_path / "net"), os.replace
    n_left = 1

    def interrupted(made: Any, path: Any) -> None:
        nonlocal n_left
        is_here, n_left = Path(path).name == name and n_left > 0, n_left - (Path(path).name == name)
        if is_here and when == "before":
            sipp.save_folder(fast, folder)
        replace(made, path)
        if is_here and when == "after":
            sipp.save_folder(fast, folder)
        if is_here and dies:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        if dies:
            with pytest.raises(KeyboardInterrupt):
                sipp.save_folder(slow, folder)
        else:
            sipp.save_folder(slow, folder)
    record, _ = read_pruned(folder)
    assert record.identity.pruned_hash == state_hash(load_file(folder / WEIGHTS_NAME))
    assert dies or (is_pair(folder) and sorted(os.listdir(folder)) == [WEIGHTS_NAME, RECORD_NAME])
    sipp.save_folder(slow, folder)
    assert is_pair(folder) and read_pruned(folder)[0].identity.pruned_hash == model_hash(slow.model)


def test_a_save_that_was_cut_short_is_shown_as_what_it_is(
    both: tuple[sipp.Pruned, sipp.Pruned], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = both
    report = (sipp.save_folder(old, tmp_path / "net") / RECORD_NAME).read_bytes()
    for folder in (tmp_path / "net", tmp_path / "fresh"):
        replace = os.replace

        def dies(made: Any, path: Any, replace: Any = replace) -> None:
            if Path(path).name == RECORD_NAME:
                raise KeyboardInterrupt
            replace(made, path)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", dies)
            with pytest.raises(KeyboardInterrupt):
                sipp.save_folder(new, folder)
        record, marks = read_pruned(folder)
        assert record.identity.pruned_hash == model_hash(new.model) and marks == (OTHER_COPY,)
    found, broken = read_intact_results([tmp_path])
    assert len(found) == 2 and not broken
    assert (tmp_path / "net" / RECORD_NAME).read_bytes() == report


@pytest.mark.parametrize("text", ['"\\ud800"', '"{}"', "7", "[" * 100_000, '"' + "[" * 100_000 + '"'])
def test_a_hostile_record_in_the_header_is_refused(
    text: str, both: tuple[sipp.Pruned, sipp.Pruned], tmp_path: Path
) -> None:
    folder = sipp.save_folder(both[0], tmp_path / "net")
    header = f'{{"__metadata__":{{"sipp record":{text}}}}}'.encode()
    (folder / WEIGHTS_NAME).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DataError):
        read_pruned(folder)


def test_killed_at_every_step_and_two_processes_at_once(tmp_path: Path) -> None:
    script = Path(__file__).with_name("killed_writers.py")
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps over a folder"] >= 8 and found["steps of a new folder"] >= 8 and found["steps of a file"] >= 5


@pytest.mark.parametrize(("measure", "n_duplicates"), [("output", 0), ("output", 3), ("kl", 0), ("next-token", 2)])
def test_every_certificate_can_be_written_again_over_itself(tmp_path: Path, measure: Any, n_duplicates: int) -> None:
    cert = Certificate(
        fixed="delta", epsilon=0.1, delta=0.05, confidence=0.95, violations=1, n=200, n_duplicates=n_duplicates,
        data_hash="a" * 64, dense_hash="b" * 64, pruned_hash="c" * 64, dtype="float32", output=None,
        calibration_checked=True, measure=measure,
    )  # fmt: skip
    place = tmp_path / "c.json"
    for force in (False, True):
        values = {"kind": "certificate", **to_json(cert)}
        write_file(place, json.dumps(values).encode(), CERTIFICATE, force=force)
    assert from_json(Certificate, json.loads(place.read_text()), place) == cert
