"""Faults 4, 5 and 6: a damaged or hostile file is refused with DataError, whatever was done to it, in little memory."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import check, damaged, forged, network, parts, rewritten
from torch import nn

import sipp
from sipp.errors import DataError
from sipp.storage.small_file import file_format

MANY = 10**12


def file_of(folder: Path, values: str = "fp32") -> tuple[Path, bytes]:
    path = folder / "net.sipp.safetensors"
    net, masks = network()
    sipp.save(net, path, values=values, masks=masks)  # type: ignore[arg-type]
    return path, path.read_bytes()


def test_every_flipped_byte_of_the_header_and_some_of_every_region(tmp_path: Path) -> None:
    path, content = file_of(tmp_path)
    end = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(end), *range(end, len(content), 997), len(content) - 1]:
        broken = bytearray(content)
        broken[place] ^= 1 << (place % 8)
        assert check(path, bytes(broken), is_forged=False), place


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_a_cut_file(tmp_path: Path, share: float) -> None:
    path, content = file_of(tmp_path)
    for n_bytes in {int(share * len(content)), int(share * len(content)) + 1}:
        assert check(path, content[:n_bytes], is_forged=False)
    assert check(path, content + b"\0", is_forged=False)


@pytest.mark.parametrize("values", ["fp32", "lossless", "int8"])
def test_random_damage_and_random_forgery(tmp_path: Path, values: str) -> None:
    path, content = file_of(tmp_path, values)
    chance = random.Random(values)
    tracemalloc.start()
    for i in range(120):
        broken = (forged if i % 2 else damaged)(content, chance)
        if broken != content:
            check(path, broken, is_forged=bool(i % 2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20  # an index may take 16 MiB


def entry(index: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in index["tensors"] if one["names"][0] == name)
    return found


def set_in(name: str, **changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda index: entry(index, name).update(changes)


def all_of(n_weights: int) -> dict[str, object]:
    return {"kind": "all", "kept": n_weights, "n_bytes": 0}


def planes(*lengths: int, rounding: str = "exact") -> dict[str, object]:
    return {
        "rounding": rounding, "planes": lengths, "scale_planes": [], "largest_change": 0.0, "norm_change": 0.0,
    }  # fmt: skip


GAPS_OF_ONE = {"kind": "kept gaps", "kept": 1, "n_bytes": 100}  # of so many weights that more bytes are due
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "huge sparse": (set_in("0.weight", shape=[MANY]), "0.weight.*impossible"),
    "huge gaps": (
        set_in("0.weight", shape=[MANY], positions=GAPS_OF_ONE, values=planes(1, 1, 1, 1), mask=None),
        "0.weight.*impossible",
    ),
    "huge dense": (set_in("0.bias", shape=[MANY], positions=all_of(MANY)), "0.bias.*impossible"),
    "huge empty": (set_in("none", shape=[0, 2**40, 2**40]), "larger than any tensor"),
    "negative": (set_in("0.weight", shape=[-40, 30]), "greater than or equal to 0"),
    "planes of nothing": (set_in("0.bias", values=planes(0, 0, 0, 0)), "impossible"),
    "a plane too few": (set_in("0.bias", values=planes(30, 30, 30)), "3 planes"),
    "wrong dtype": (set_in("0.bias", dtype="float64"), "4 planes of bytes for numbers of 8"),
    "unknown dtype": (set_in("0.bias", dtype="float31"), "unknown dtype"),
    "sparse integers": (
        set_in("1.num_batches_tracked", positions={"kind": "bitmask", "kept": 1, "n_bytes": 1}),
        "floats",
    ),
    "rounded integers": (set_in("1.num_batches_tracked", values=planes(1, 1, rounding="bf16")), "floats"),
    "scales without int8": (set_in("0.bias", values=planes(30, 30, 30, 30) | {"scale_planes": [1]}), "not of a form"),
    "exact and moved": (set_in("0.bias", values=planes(30, 30, 30, 30) | {"largest_change": 0.1}), "moved"),
    "not a number": (set_in("0.bias", values=planes(30, 30, 30, 30) | {"largest_change": float("nan")}), "finite"),
    "unknown key": (set_in("0.bias", more=1), "Extra inputs"),
    "a number as text": (set_in("0.bias", shape=["30"]), "valid integer"),
    "the same name twice": (set_in("0.bias", names=["0.weight"]), "same name"),
    "a tensor twice": (lambda index: index["tensors"].append(index["tensors"][0]), "same name"),
    "one tensor less": (lambda index: index["tensors"].pop(), "other bytes"),
    "steers the terminal": (set_in("0.bias", names=["\x1b[2J"]), "printed"),
    "no certificate": (lambda index: index.update(certificate="{}"), "kind"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_index_is_refused_before_memory_is_asked_for(tmp_path: Path, case: str) -> None:
    path, content = file_of(tmp_path)
    change, words = HOSTILE[case]
    assert not check(path, content, is_forged=True)  # what is loaded once does not count
    path.write_bytes(rewritten(content, change))
    tracemalloc.start()
    for reader in (sipp.load, sipp.inspect):
        with pytest.raises(DataError, match=words):
            reader(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_an_index_that_was_only_written_anew_still_loads(tmp_path: Path) -> None:
    """Shows that the cases above fail for the reason they name, not because they were rewritten."""
    path, content = file_of(tmp_path)
    assert not check(path, rewritten(content, lambda index: None), is_forged=True)


def test_a_bool_that_is_no_bool_and_a_weight_outside_of_its_mask(tmp_path: Path) -> None:
    path, content = file_of(tmp_path)
    code, data = parts(content)
    flags = bytes([1, 0, 1])
    assert data.count(flags) >= 1
    path.write_bytes(file_format.pack(code, data.replace(flags, bytes([2, 0, 1])))[0])
    with pytest.raises(DataError, match="neither true nor false"):
        sipp.load(path)


def test_names_in_a_file_are_no_markup(tmp_path: Path) -> None:
    path, content = file_of(tmp_path)
    path.write_bytes(rewritten(content, set_in("0.weight", names=["[/red]0.weight"])))
    assert "[/red]0.weight" in str(sipp.inspect(path))


def test_a_certificate_of_another_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net"
    dense = nn.Linear(6, 4)
    pruned = sipp.prune(dense, None, keep=0.5, method="wt")
    certificate = sipp.certify(dense, pruned.model, torch.rand(100, 6))
    sipp.save(pruned, path, certificate=certificate)
    content = path.read_bytes()

    def borrowed(index: dict[str, Any]) -> None:
        index["certificate"] = index["certificate"].replace(certificate.pruned_hash, "0" * 64)

    path.write_bytes(rewritten(content, borrowed))
    with pytest.raises(DataError, match="another network"):
        sipp.load(path)


class Canary:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_other_files_are_refused_and_no_code_runs(tmp_path: Path) -> None:
    path, canary = tmp_path / "net", tmp_path / "canary"
    path.write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(DataError, match=r"not a file from sipp\.save"):
        sipp.load(path)
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(DataError, match=r"not a file from sipp\.save"):
        sipp.load(path)
    assert not canary.exists()
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, path)
    with pytest.raises(DataError, match=r"safetensors\.torch\.load_file"):
        sipp.load(path)
    for other in (tmp_path, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(DataError, match="is not a file"):
            sipp.load(other)
    _, content = file_of(tmp_path)
    for mark, words in (
        (b"sipp-file/3", "sipp-file/3, this version reads sipp-file/2"),
        (b"sipp-file/2", "its header does not fit"),
    ):
        path.write_bytes(content.replace(b"sipp-file/1", mark))
        with pytest.raises(DataError, match=words):
            sipp.load(path)
