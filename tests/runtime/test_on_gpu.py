"""`sipp.sparse` on a CUDA GPU: random networks against torch. Skipped where there is none."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import sipp
from sipp.runtime.gpu import linear, plan, recording

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here"),
]
# of the largest output, by dtype: a few layers' rounding
CLOSE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-4}


@pytest.fixture
def sparse_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse kernels are taken whatever they take, so that they are what is tested."""

    def seconds(way, x, n_copies):
        return 1.0 if way.name == "dense" else 0.5

    monkeypatch.setattr(linear, "seconds_of", seconds)
    monkeypatch.setattr(plan, "seconds_of", seconds)
    monkeypatch.setattr(linear, "MOST_BYTES", 99.0)
    monkeypatch.setattr(plan, "LEAST_WEIGHTS", 16)
    monkeypatch.setattr(recording, "race", lambda calls: [1.0, 1.0, 0.5][: len(calls)])


def random_network(seed: int, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    widths = [int(n) for n in torch.randint(5, 700, (4,))]
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(widths):
        layer = nn.Linear(n_in, n_out, bias=seed % 2 == 0)
        layer.weight.data[torch.rand_like(layer.weight) < (0.3, 0.7, 0.95)[seed % 3]] = 0
        layer.weight.data[seed % n_out] = 0
        layers += [layer, nn.GELU() if seed % 3 else nn.LayerNorm(n_out)]
    n_tokens = (1, 2, 3, 7, 16)[seed % 5]
    return nn.Sequential(*layers).to("cuda", dtype).eval(), torch.randn(n_tokens, widths[0]).to("cuda", dtype)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.usefixtures("sparse_wins")
@torch.no_grad()
def test_random_networks_are_equal(seed: int, dtype: torch.dtype) -> None:
    model, x = random_network(seed, dtype)
    fast = sipp.sparse(model, x)
    assert any(step.held for step in fast.steps)
    for given in (x, torch.randn_like(x), x * 4):
        expected, found = model(given).double(), fast(given).double()
        assert float((found - expected).abs().max()) <= CLOSE[dtype] * float(expected.abs().max())


@pytest.mark.usefixtures("sparse_wins")
@torch.no_grad()
def test_what_is_not_finite_in_torch_is_not_finite_here() -> None:
    model, x = random_network(1, torch.float16)
    fast, bad = sipp.sparse(model, x), x.clone()
    bad[-1, 0] = float("inf")
    assert torch.equal(fast(bad).isfinite(), model(bad).isfinite())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("sparse_wins")
@torch.no_grad()
def test_two_of_four(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128, bias=False)).to("cuda", dtype)
    for layer in (model[0], model[2]):
        by_four = layer.weight.data.view(len(layer.weight), -1, 4)
        by_four[..., 1::2] = 0
    x = torch.randn(2, 32, 256).to("cuda", dtype)
    fast = sipp.sparse(model, x)
    assert all(step.kernel.startswith("2:4") for step in fast.steps if step.keep is not None)
    expected = model(x).double()
    assert float((fast(x).double() - expected).abs().max()) <= CLOSE[dtype] * float(expected.abs().max())


@torch.no_grad()
def test_as_it_is_measured_and_on_another_stream() -> None:
    model, x = random_network(2, torch.float16)
    fast = sipp.sparse(model, x)
    assert fast.latest.seconds <= 1.05 * fast.latest.dense_seconds or fast.latest.is_dense
    first = fast(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        second = fast(x)
    torch.cuda.synchronize()
    assert torch.equal(first, second)
    fast(torch.randn_like(x))
    assert torch.equal(first, second)  # the caller's own
