"""`sipp.sparse` on a CUDA GPU: random networks against torch. Skipped where there is none."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from torch import nn

import sipp
from sipp.runtime.gpu import kernels, linear, plan, recording
from sipp.runtime.gpu.layouts import as_walks, int8_scales

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

    monkeypatch.setattr(plan, "time_kernel", seconds)
    monkeypatch.setattr(linear, "FEW_TOKEN_SHAPES", linear.FEW_TOKEN_SHAPES[:1])  # each is compiled per layer
    monkeypatch.setattr(plan, "MOST_BYTES", 99.0)
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
    n_tokens = (1, 2, 3, 7, 8)[seed % 5]
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


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize(
    ("n_columns", "n_lanes", "ahead"), [(512, 32, 2), (515, 16, 3), (516, 16, 2), (4096, 8, 4), (30000, 32, 1)]
)
@torch.no_grad()
def test_sums_with_the_input_in_shared_memory_and_without(dtype, n_tokens, n_columns, n_lanes, ahead) -> None:
    """Whatever is not in shared memory, because it is too large or no whole words, is read from where it is."""
    torch.manual_seed(n_columns)
    levels = torch.randint(-127, 128, (70, n_columns)) * (torch.rand(70, n_columns) < 0.2)
    levels[:, 5], levels[3] = 127, 0
    weight = (levels * torch.rand(70, 1) / 100).to("cuda", dtype)
    x = torch.randn(n_tokens, n_columns).to("cuda", dtype)
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    for scales in (None, int8_scales(weight)):
        walks = as_walks(weight, n_lanes=n_lanes, n_rows=8 * 32 // n_lanes, scales=scales)
        gap = (kernels.few_tokens(x, walks, None, ahead=ahead).double() - exact).abs()
        own = 2**-20 if scales is None else torch.finfo(dtype).eps
        assert bool((gap <= torch.finfo(dtype).eps * exact.abs() + own * size).all())
        bad = x.clone()
        bad[-1, -1] = float("-inf")
        found = kernels.few_tokens(bad, walks, None, ahead=ahead)
        assert bool(found[-1].isnan().all()) and bool(found[:-1].isfinite().all())


class Shifted(nn.Module):
    """A linear layer, and numbers that are computed once: they are no parameter or buffer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.arange(512, device=x.device, dtype=x.dtype) / 512


@pytest.mark.usefixtures("sparse_wins")
@torch.no_grad()
def test_what_was_computed_once_is_not_freed() -> None:
    torch.manual_seed(0)
    model, x = Shifted().cuda().eval(), torch.randn(2, 512, device="cuda")
    model.linear.weight.data[torch.rand_like(model.linear.weight) < 0.8] = 0
    fast = sipp.sparse(model, x)
    assert any(step.held for step in fast.steps)
    gc.collect()
    taken = [torch.full((n,), 1e6, device="cuda") for n in (64, 512, 1024, 4096) for _ in range(200)]
    assert float((fast(x) - model(x)).abs().max()) <= 1e-4 and len(taken) == 800


@torch.no_grad()
def test_a_plan_runs_on_any_stream() -> None:
    model, x = random_network(2, torch.float16)
    fast = sipp.sparse(model, x)
    first = fast(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        second = fast(x)
    torch.cuda.synchronize()
    assert torch.equal(first, second)
    fast(torch.randn_like(x))
    assert torch.equal(first, second)  # the caller's own
