"""A network in several files: every bit comes back, damage is found, an interrupted save leaves the old or new one."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import network
from torch import Tensor, nn

import sipp
from sipp.cli.errors import run_and_report
from sipp.cli.main import app
from sipp.errors import DataError, OptionError
from sipp.results.options import Precision
from sipp.storage.small_file import network as coded_network
from sipp.storage.small_file import parts


def pruned(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4))
    return sipp.prune(net, None, keep=0.3, method="lamp", progress=False)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def parts_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "-of-" in path.name)


@pytest.mark.parametrize("values", ["fp32", "lossless", "bf16", "int8"])
def test_every_bit_comes_back_from_parts_of_at_most_the_size(values: Precision, tmp_path: Path) -> None:
    net, masks = network()
    one = sipp.save(net, tmp_path / "one.safetensors", masks=masks, values=values)
    many = sipp.save(net, tmp_path / "many.safetensors", masks=masks, values=values, shard="1KB")
    files = [tmp_path / "many.safetensors", *(tmp_path / name for name in parts_in(tmp_path))]
    assert len(files) > 3 and many.n_bytes == sum(path.stat().st_size for path in files)
    largest = max(tensor.n_bytes for tensor in many.tensors)
    assert max(path.stat().st_size for path in files) <= max(1000, largest) + 1024  # its header
    state = sipp.load(tmp_path / "many.safetensors")
    assert same(state, sipp.load(tmp_path / "one.safetensors")) and state["tied"] is state["2.weight"]
    found = sipp.inspect(tmp_path / "many.safetensors")
    assert found.tensors == one.tensors and found.n_bytes == many.n_bytes and found.sha256 == many.sha256
    assert same(found.masks, masks) and many.n_bytes < one.n_bytes + 700 * len(files)


def test_one_part_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sipp.save(pruned(), tmp_path / "net.safetensors", shard=1000)
    order: list[str] = []
    unpack, decode = parts.unpack, coded_network._decode
    monkeypatch.setattr(parts, "unpack", lambda *args: (order.append("part"), unpack(*args))[1])
    monkeypatch.setattr(coded_network, "_decode", lambda *args: (order.append("tensor"), decode(*args))[1])
    sipp.load(tmp_path / "net.safetensors")
    n_parts = len(parts_in(tmp_path))
    assert n_parts > 2 and order.count("part") == n_parts and order[0] == "part"
    assert order != sorted(order)  # tensors of the first part are made before the second is read


@pytest.mark.parametrize("damage", ["missing", "changed", "swapped", "link", "of another save"])
def test_a_part_that_is_not_the_one_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    sipp.save(pruned(), path, shard=1000)
    first, second, *_ = (tmp_path / name for name in parts_in(tmp_path))
    if damage == "missing":
        first.unlink()
    elif damage == "changed":
        content = bytearray(first.read_bytes())
        content[-1] ^= 1
        first.write_bytes(content)
    elif damage == "swapped":
        first.write_bytes(second.read_bytes())
    elif damage == "link":
        first.rename(tmp_path / "elsewhere")
        first.symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "b").mkdir()
        sipp.save(pruned(1), tmp_path / "b" / "net.safetensors", shard=1000)
        first.write_bytes((tmp_path / "b" / parts_in(tmp_path / "b")[0]).read_bytes())
    with pytest.raises(DataError, match=r"is not there|SHA-256|is not the part"):
        sipp.load(path)
    with pytest.raises(DataError, match="is one part of a network"):
        sipp.load(second)
    if damage == "link":
        before = (tmp_path / "elsewhere").stat()
        with pytest.raises(DataError, match=f"{first.name}: is a symbolic link"):
            sipp.save(pruned(), path, shard=1000)
        assert (tmp_path / "elsewhere").stat().st_ino == before.st_ino  # a file that is replaced is another one


def test_a_save_that_is_stopped_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "net.safetensors", parts.write_atomic
    states = [pruned(seed).model.state_dict() for seed in (0, 1)]
    n_left = 0

    def stopping(*args: Any) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise KeyboardInterrupt
        write(*args)

    for step in range(20):
        monkeypatch.setattr(parts, "write_atomic", write)
        sipp.save(pruned(0), path, shard=1000)
        n_left = step
        monkeypatch.setattr(parts, "write_atomic", stopping)
        try:
            sipp.save(pruned(1), path, shard=1000)
        except KeyboardInterrupt:
            assert same(sipp.load(path), states[0])
        else:
            break
    assert step > 2 and same(sipp.load(path), states[1])


def test_parts_of_the_old_network_go_and_those_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    sipp.save(pruned(0), path, shard=1000)
    old = parts_in(tmp_path)
    mine = tmp_path / "net-00001-of-00002-mine.safetensors"
    others = tmp_path / old[0].replace("net-", "network-")
    for one in (mine, others):
        one.write_bytes(b"mine")
    stale, fresh = (tmp_path / f"net-00001-of-00001-{digit * 16}.safetensors" for digit in "ab")
    for one in (stale, fresh):  # of writers that were killed, and of one that may still write
        one.write_bytes(b"x")
    os.utime(stale, (time.time() - 2 * 86_400,) * 2)
    sipp.save(pruned(1), path, shard=1000)
    new = {*parts_in(tmp_path)} - {mine.name, others.name, fresh.name}
    assert not new & {*old} and stale.name not in new and fresh.exists() and mine.exists() and others.exists()
    sipp.save(pruned(1), path)  # one file again
    assert {*parts_in(tmp_path)} == {mine.name, others.name, fresh.name}
    assert same(sipp.load(path), pruned(1).model.state_dict())


def test_a_link_stays_and_parts_lie_beside_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link = tmp_path / "net.safetensors"
    link.symlink_to(tmp_path / "far" / "real.safetensors")
    sipp.save(pruned(), link, shard=1000)
    assert not parts_in(tmp_path) and all(name.startswith("real-") for name in parts_in(tmp_path / "far"))
    assert same(sipp.load(link), pruned().model.state_dict())


@pytest.mark.parametrize("shard", ["large", "", 0, -3, 1.5, True, "5 parsecs", b"5GB"])
def test_what_is_no_size_is_refused(shard: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not a size"):
        sipp.save(pruned(), tmp_path / "net.safetensors", shard=shard)
    assert not list(tmp_path.iterdir())


def test_names_with_and_without_a_suffix_share_no_parts(tmp_path: Path) -> None:
    for name in ("net", "net.safetensors"):
        sipp.save(pruned(), tmp_path / name, shard=1000)
    sipp.save(nn.Linear(40, 40), tmp_path / "net", shard=1000)
    assert same(sipp.load(tmp_path / "net.safetensors"), pruned().model.state_dict())


def test_commands_write_and_read_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.safetensors"
    words = ["--model", "digits-cnn", "--method", "wt", "--keep", "0.3", "--out", str(path), "--shard"]
    assert run_and_report(app, ["prune", *words, "20KB"]) == 0 and len(parts_in(tmp_path)) > 1
    assert run_and_report(app, ["inspect", str(path)]) == 0
    assert (
        run_and_report(app, ["export", str(path), "--to", "safetensors", "-o", str(tmp_path / "plain.safetensors")])
        == 0
    )
    dense = tmp_path / "plain.safetensors"
    data = ["--data", "digits", "--dense", str(dense), "--points", "20"]
    assert run_and_report(app, ["eval", "--model", "digits-cnn", "--pruned", str(path), *data]) == 0
    assert " x smaller; the kept values" in capsys.readouterr().out
    assert run_and_report(app, ["prune", *words[:-2], str(tmp_path / "folder"), "--shard", "5GB"]) == 2
    assert run_and_report(app, ["prune", *words, "large", "--force"]) == 2
    assert "is not a size" in capsys.readouterr().err


def test_two_writers_of_one_path_leave_a_whole_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replaces a network while the other saves the same one again: no part of what is named last is missing."""
    path, first, second = tmp_path / "net.safetensors", pruned(0), pruned(1)
    sipp.save(first, path, shard=1000)
    write, is_nested = parts.write_atomic, list[bool]()

    def between(file: Path, content: bytes) -> None:
        if file == path and not is_nested:  # the parts are there, the index is not
            is_nested.append(True)
            sipp.save(second, path, shard=1000)
        write(file, content)

    monkeypatch.setattr(parts, "write_atomic", between)
    sipp.save(first, path, shard=1000)
    assert same(sipp.load(path), first.model.state_dict()) and is_nested


def test_parts_that_another_writer_just_wrote_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    sipp.save(pruned(0), path, shard=1000)
    before = parts_in(tmp_path)
    remove = parts._remove_old

    def written_again(*args: Any) -> None:
        os.utime(tmp_path / before[0])
        remove(*args)

    monkeypatch.setattr(parts, "_remove_old", written_again)
    sipp.save(pruned(1), path, shard=1000)
    assert set(parts_in(tmp_path)) & set(before) == {before[0]}
