"""Faults 4 and 6: a damaged file is refused, and so is one of another network; no code runs from a file."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from odd_network import network, with_masks
from safetensors.torch import save_file

import sipp
from sipp.errors import DataError, ModelError
from sipp.storage import file_content


@pytest.fixture(params=["fp32", "lossless", "int8"])
def saved(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "net.sipp.safetensors"
    sipp.save(with_masks(*network()), path, values=request.param)
    return path


def refused(path: Path, content: bytes) -> bool:
    """Whether the damaged file is refused; if it is not, the state_dict must be that of the undamaged one."""
    before = sipp.load(path)
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        found = sipp.load(path)
    except DataError as error:
        return path.name in str(error)
    finally:
        path.write_bytes(whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    return False


def test_every_flipped_byte_of_the_header_and_some_of_every_region(saved: Path) -> None:
    content = saved.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for place in [*range(end), *range(end, len(content), 997), len(content) - 1]:
        broken = bytearray(content)
        broken[place] ^= 1 << (place % 8)
        assert refused(saved, bytes(broken)), place


def test_cut_longer_and_mixed_up_files(saved: Path) -> None:
    content, chance = saved.read_bytes(), random.Random(0)
    for share in (0.0, 0.001, 0.3, 0.99):
        assert refused(saved, content[: int(share * len(content))])
    assert refused(saved, content + b"\0")
    for _ in range(20):
        place, other = (chance.randrange(len(content) - 60) for _ in range(2))
        moved = content[:place] + content[other : other + 60] + content[place + 60 :]
        assert moved == content or refused(saved, moved)


def test_a_wrong_entry_is_named(tmp_path: Path) -> None:
    path = tmp_path / "net.sipp.safetensors"
    saved = sipp.save(torch.nn.Linear(3, 2), path)
    wrong = replace(saved, tensors=(replace(saved.tensors[0], kept="many"),))  # type: ignore[arg-type]
    path.write_bytes(file_content(wrong, b"")[0])
    with pytest.raises(DataError, match=r"net.sipp.safetensors: .*'kept' in tensors.0 must be a whole number"):
        sipp.load(path)


def test_other_files_are_refused_and_no_code_runs(tmp_path: Path) -> None:
    path, canary = tmp_path / "net", tmp_path / "canary"

    class Canary:
        def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
            return Path.touch, (canary,)

    path.write_bytes(pickle.dumps(Canary()))
    with pytest.raises(DataError, match=r"not a file from sipp\.save"):
        sipp.load(path)
    torch.save({"a": torch.ones(3)}, path)
    with pytest.raises(DataError, match=r"not a file from sipp\.save"):
        sipp.load(path)
    assert not canary.exists()
    save_file({"a": torch.ones(3)}, path)
    with pytest.raises(DataError, match=r"safetensors\.torch\.load_file"):
        sipp.load(path)
    for other in (tmp_path, tmp_path / "nothing", Path("/dev/zero")):
        with pytest.raises(DataError, match="is not a file"):
            sipp.load(other)


def test_a_shape_that_disagrees_is_named_before_memory_is_asked_for(tmp_path: Path) -> None:
    """Fault 6. Whatever the file says: here a tensor of 4 TB."""
    path, net = tmp_path / "net", torch.nn.Linear(6, 4)
    saved = sipp.save(net, path)
    (weight, bias), data = saved.tensors, bytes(saved.tensors[0].n_bytes + saved.tensors[1].n_bytes)
    path.write_bytes(file_content(replace(saved, tensors=(replace(weight, shape=(10**6, 10**6)), bias)), data)[0])
    with pytest.raises(ModelError, match=r"weight is float32 \[1000000, 1000000\] in the file, float32 \[4, 6\] in"):
        sipp.load(path, into=net)
