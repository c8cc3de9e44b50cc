"""Tensors through a file and back, with torch and without it."""

import math
from pathlib import Path

import pytest
import torch

from sipp.errors import DataError, ModelError
from sipp.results.network_hash import state_hash
from sipp.storage.files import file_hash, sha256_of
from sipp.storage.tensors import raw_hash, raw_tensors, tensors_from_bytes, tensors_to_bytes

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_torch_the_same_type_shape_hash_and_zeros(dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, -0.0, 1.0], [2.0, 0.0, 1.5]]).to(dtype)
    if dtype.is_floating_point:
        values[0, 0] = math.nan
    state = {"module.b.weight": values, "a.bias": torch.zeros(3, dtype=dtype)}
    data = tensors_to_bytes(state)
    raw = raw_tensors(data, "here")
    assert raw["module.b.weight"].dtype == str(dtype) and raw["module.b.weight"].shape == (2, 3)
    assert raw["module.b.weight"].n_nonzero() == int((values.double() != 0).sum()) and raw["a.bias"].n_nonzero() == 0
    assert raw_hash(raw) == state_hash(state)
    assert state_hash(tensors_from_bytes(data, "here")) == state_hash(state)


def test_tied_tensors_and_what_is_none() -> None:
    shared = torch.rand(4)
    found = tensors_from_bytes(tensors_to_bytes({"x": shared, "y": shared}), "here")
    assert torch.equal(found["x"], shared) and torch.equal(found["y"], shared)
    with pytest.raises(ModelError, match="extra are not tensors"):
        tensors_to_bytes({"extra": 3})


@pytest.mark.parametrize("data", [b"", b"\x80\x04cos\nsystem\n.", b"\xff" * 64], ids=["empty", "pickle", "header"])
def test_what_is_no_file_of_tensors_is_refused_by_its_place(data: bytes) -> None:
    for read in (raw_tensors, tensors_from_bytes):
        with pytest.raises(DataError, match=r"net/model\.safetensors: not a safetensors file"):
            read(data, "net/model.safetensors")


def test_one_hash_of_bytes_and_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"ab" * 2**20)
    assert file_hash(path) == sha256_of(b"ab" * 2**20) == sha256_of(b"a", memoryview(b"b" + b"ab" * (2**20 - 1)))
