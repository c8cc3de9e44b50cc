"""Buffers that a state_dict leaves out: part of the network that certificates and records speak of, and of no file."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.errors import OptionError
from sipp.results import hashing


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
