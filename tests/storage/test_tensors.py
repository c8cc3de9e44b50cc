"""Tensors through a file and back."""

from pathlib import Path

import pytest
import torch

from sipp.errors import DataError, ModelError
from sipp.files import file_hash, metadata_of, sha256_of
from sipp.storage.tensors import read_tensors, tensors_to_bytes


def test_tied_tensors_and_what_is_none(tmp_path: Path) -> None:
    shared, path = torch.rand(4), tmp_path / "net"
    path.write_bytes(tensors_to_bytes({"x": shared, "y": shared}, {"about": "it"}))
    found, metadata = read_tensors(path)
    assert torch.equal(found["x"], shared) and torch.equal(found["y"], shared) and metadata == {"about": "it"}
    assert metadata_of(path) == metadata
    with pytest.raises(ModelError, match="extra are not tensors"):
        tensors_to_bytes({"extra": 3})


@pytest.mark.parametrize("data", [b"", b"\x80\x04cos\nsystem\n.", b"\xff" * 64], ids=["empty", "pickle", "header"])
def test_what_is_no_file_of_tensors_is_refused_by_its_place(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"model\.safetensors: is not a whole safetensors file"):
        read_tensors(path)
    assert metadata_of(path) == {}


def test_one_hash_of_bytes_and_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"ab" * 2**20)
    assert file_hash(path) == sha256_of(b"ab" * 2**20) == sha256_of(b"a", memoryview(b"b" + b"ab" * (2**20 - 1)))
