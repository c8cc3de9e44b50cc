"""Buffers that a state_dict leaves out: part of the network that certificates and records speak of, and of no file."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import OptionError
from sipp.results import hashing
from sipp.storage.pruned_folder import read_pruned


class Scaled(nn.Module):
    """A network with a number that only its buffer knows."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale


@pytest.fixture(scope="module")
def dense() -> Scaled:
    torch.manual_seed(0)
    return Scaled().eval()


@pytest.fixture(scope="module")
def pruned(dense: Scaled) -> sipp.Pruned:
    return sipp.prune(dense, None, keep=0.5, method="magnitude")


def with_scale(model: nn.Module, scale: float) -> Scaled:
    made = Scaled(scale).eval()
    made.load_state_dict(model.state_dict())
    return made


def test_the_hash_is_that_of_the_state_dict_where_that_holds_all() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    assert hashing.of_model(net) == hashing.of_state(net.state_dict())


def test_the_hash_sees_values_names_and_dtypes_and_no_wrapper(dense: Scaled) -> None:
    base = hashing.of_model(dense)
    assert hashing.of_model(with_scale(dense, 2.0)) == base == hashing.of_model(nn.DataParallel(dense))
    renamed = with_scale(dense, 2.0)
    renamed.register_buffer("other", renamed.scale, persistent=False)
    double = with_scale(dense, 2.0)
    double.scale = double.scale.double()
    without = with_scale(dense, 2.0)
    del without.scale
    others = [hashing.of_model(one) for one in (with_scale(dense, 3.0), renamed, double, without)]
    assert base not in others and len(set(others)) == 4
    assert others[-1] == hashing.of_state(dense.state_dict())


def test_a_certificate_is_about_the_network_with_its_buffers(
    dense: Scaled, pruned: sipp.Pruned, tmp_path: Path
) -> None:
    holdout = torch.rand(200, 8, generator=torch.Generator().manual_seed(1))
    certificate = sipp.certify(dense, pruned, holdout)
    other = sipp.certify(dense, with_scale(pruned.model, 2.5), holdout)
    assert other.pruned_hash != certificate.pruned_hash
    path = tmp_path / "net.safetensors"
    with pytest.raises(OptionError, match="another network"):
        sipp.save(with_scale(pruned.model, 2.5), path, certificate=certificate)
    for values in ("fp32", "int8"):
        contents = sipp.save(pruned, path, values=values, certificate=certificate)  # type: ignore[arg-type]
        about = "stored values" if values == "fp32" else "values before rounding"
        assert contents.certificate_about == sipp.inspect(path).certificate_about == about
    sipp.save(pruned, path, certificate=certificate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hashing.of_model(sipp.load(path, into=Scaled())) == certificate.pruned_hash
    with pytest.warns(UserWarning, match="buffers that are not part of a state_dict"):
        sipp.load(path, into=Scaled(3.0))


def test_a_folder_is_about_the_network_with_its_buffers(dense: Scaled, pruned: sipp.Pruned, tmp_path: Path) -> None:
    folder = sipp.save_folder(pruned, tmp_path / "net")
    record = read_pruned(folder)
    assert record.identity.pruned_hash == hashing.of_model(pruned.model) and not record.note


def test_statements_vanish_when_a_buffer_changes(dense: Scaled) -> None:
    data = torch.rand(60, 8, generator=torch.Generator().manual_seed(2))
    pruned = sipp.prune(dense, data, keep=0.5)
    assert "changed after pruning" not in str(pruned)
    pruned.model.scale.fill_(5.0)  # type: ignore[union-attr, operator]
    assert "changed after pruning" in pruned.details


def test_masks_that_are_held_are_no_part_of_it(dense: Scaled, pruned: sipp.Pruned) -> None:
    base = hashing.of_model(pruned.model)
    sipp.hold(pruned.model, pruned)
    try:
        assert hashing.of_model(pruned.model) == base and "changed after pruning" not in pruned.details
    finally:
        sipp.release(pruned.model)
    assert hashing.of_model(pruned.model) == base


def test_a_file_without_a_certificate_tells_of_other_buffers_too(pruned: sipp.Pruned, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    sipp.save(pruned, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sipp.load(path, into=Scaled())
    with pytest.warns(UserWarning, match="buffers that are not part of a state_dict"):
        sipp.load(path, into=Scaled(3.0))
