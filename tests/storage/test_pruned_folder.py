"""`sipp.save_folder`: the folder of `sipp prune --out`, written whole, refused where it would destroy or mislead."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sipp
from sipp.errors import DataError, OptionError
from sipp.files import RECORD_NAME, WEIGHTS_NAME
from sipp.results import hashing
from sipp.storage.tensors import read_tensors, tensors_to_bytes


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


@pytest.fixture(scope="module")
def pruned(dense: nn.Module) -> sipp.Pruned:
    return sipp.prune(dense, torch.rand(80, 8, generator=torch.Generator().manual_seed(1)), keep=0.5, repair=True)


@pytest.fixture(scope="module")
def certificate(dense: nn.Module, pruned: sipp.Pruned) -> object:
    return sipp.certify(dense, pruned.model, torch.rand(100, 8, generator=torch.Generator().manual_seed(2)))


def test_the_folder_reads_back(pruned: sipp.Pruned, tmp_path: Path) -> None:
    folder = sipp.save_folder(pruned, tmp_path / "deep" / "net")
    assert sorted(os.listdir(folder)) == [WEIGHTS_NAME, RECORD_NAME]
    record = sipp.inspect(folder)
    assert (record.pruned.kept, record.pruned.method, record.dense_hash) == (pruned.kept, "sipp-blend", None)
    state = load_file(folder / WEIGHTS_NAME)
    assert all(torch.equal(state[name], value) for name, value in pruned.model.state_dict().items())
    values = json.loads((folder / RECORD_NAME).read_text())
    assert values["repair"]["layers"] and values["model"] == "torch.nn.modules.container.Sequential"


def test_a_certificate_says_what_was_dense(
    dense: nn.Module, pruned: sipp.Pruned, certificate: object, tmp_path: Path
) -> None:
    record = sipp.inspect(sipp.save_folder(pruned, str(tmp_path / "net"), certificate=certificate))  # type: ignore[arg-type]
    assert record.dense_hash == hashing.of_model(dense) and record.certificate == certificate
    other = sipp.prune(dense, None, keep=0.2, method="magnitude")
    with pytest.raises(OptionError, match="another network"):
        sipp.save_folder(other, tmp_path / "other", certificate=certificate)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


def test_a_folder_of_sipp_is_replaced_and_other_weights_stay(
    dense: nn.Module, pruned: sipp.Pruned, tmp_path: Path
) -> None:
    folder = sipp.save_folder(pruned, tmp_path / "net")
    sipp.save_folder(sipp.prune(dense, None, keep=0.25, method="magnitude"), folder)
    assert sipp.inspect(folder).pruned.method == "magnitude"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("three years")
    sipp.save_folder(pruned, mine)
    assert (mine / "thesis.txt").read_text() == "three years" and len(os.listdir(mine)) == 3
    save_file(dense.state_dict(), mine / WEIGHTS_NAME)
    with pytest.raises(OptionError, match=r"contains a model\.safetensors that sipp did not write"):
        sipp.save_folder(pruned, mine)
    assert load_file(mine / WEIGHTS_NAME).keys() == dense.state_dict().keys()


def test_wrong_arguments(pruned: sipp.Pruned, tmp_path: Path) -> None:
    for folder in ("", "a\0b", 3, None):
        with pytest.raises(OptionError, match="not a path"):
            sipp.save_folder(pruned, folder)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="certificate must be a Certificate or AccuracyCertificate, not a str"):
        sipp.save_folder(pruned, tmp_path / "net", certificate="yes")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="is a file"):
        sipp.save_folder(pruned, tmp_path / "file")


def test_a_network_changed_after_it_was_saved_is_refused(pruned: sipp.Pruned, tmp_path: Path) -> None:
    path = sipp.save_folder(pruned, tmp_path / "net") / WEIGHTS_NAME
    state, record = read_tensors(path)
    path.write_bytes(tensors_to_bytes({name: 2 * value for name, value in state.items()}, record))
    with pytest.raises(DataError, match="its weights do not match its record"):
        sipp.inspect(path.parent)
    path.write_bytes(tensors_to_bytes(state))
    with pytest.raises(DataError, match="it has no record"):
        sipp.inspect(path.parent)
