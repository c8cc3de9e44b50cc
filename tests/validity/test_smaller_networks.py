"""Simulation: certificates of networks with fewer channels are false no more often than they say."""

import warnings

import pytest
import torch
from oracles.rates import at_most
from torch import Tensor, nn

import sipp

SHARE, CONFIDENCE = 0.2, 0.8
N_CALIBRATION, N_HOLDOUT, N_NEW = 40, 60, 20_000
N_NETWORKS, N_CLAIMS = 4, 30  # claims for each network, on inputs of their own


@pytest.fixture(autouse=True)
def _few_points() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def smaller(seed: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """A network, a smaller one fitted to few inputs, and these."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4)).eval()
    calibration = torch.randn(N_CALIBRATION, 8)
    return net, sipp.shrink(net, calibration, weights=0.6, progress=False).model, calibration


def errors(net: nn.Module, small: nn.Module) -> Tensor:
    """The relative output errors on many new inputs."""
    x = torch.randn(N_NEW, 8)
    with torch.no_grad():
        dense = net(x)
        return (small(x) - dense).norm(dim=1) / dense.norm(dim=1)


def is_false(net: nn.Module, small: nn.Module, holdout: Tensor, new: Tensor) -> bool:
    made = sipp.certify(net, small, holdout, share=SHARE, confidence=CONFIDENCE, progress=False)
    return bool((new > made.epsilon).double().mean() > SHARE)


def test_certificates_are_false_as_often_as_they_may_be() -> None:
    false = 0
    for seed in range(N_NETWORKS):
        net, small, _ = smaller(seed)
        new = errors(net, small)
        false += sum(is_false(net, small, torch.randn(N_HOLDOUT, 8), new) for _ in range(N_CLAIMS))
    n = N_NETWORKS * N_CLAIMS
    assert n * (1 - CONFIDENCE) / 4 < false <= n * at_most(1 - CONFIDENCE, n)


def test_claims_on_the_inputs_that_new_weights_were_fitted_to_are_caught() -> None:
    found = [(net, small, data) for net, small, data in map(smaller, range(2 * N_NETWORKS))]
    false = sum(is_false(net, small, data, errors(net, small)) for net, small, data in found)
    assert false > len(found) * at_most(1 - CONFIDENCE, len(found))
