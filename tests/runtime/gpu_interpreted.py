"""The GPU runtime's kernels and networks on the CPU. Run by test_gpu_kernels.py, with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sipp.native import pytree
from sipp.runtime.gpu import linear, network, plan, recording
from sipp.runtime.gpu.kernels import few_tokens
from sipp.runtime.gpu.layouts import with_places

assert os.environ.get("TRITON_INTERPRET") == "1"
ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-20}  # one of the result, and some


def agrees(x: Tensor, weight: Tensor, bias: Tensor | None, *, bits: int, depth: int = 8, ahead: int = 1) -> None:
    """The kernel's sums are those of float64, to rounding of the result and of float32 sums."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    found = few_tokens(x, with_places(weight, bits=bits, depth=depth), bias, ahead=ahead)
    assert found.dtype == x.dtype and found.shape == exact.shape
    gap = (found.double() - exact).abs()
    tiny = torch.finfo(x.dtype).tiny
    assert bool((gap <= ROUNDING[x.dtype] * exact.abs() + 2**-20 * size + tiny).all()), float(gap.max())


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    n_rows=st.integers(1, 6),
    n_columns=st.sampled_from([1, 3, 40, 300, 1030]),
    keep=st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0]),
    n_tokens=st.sampled_from([1, 1, 2]),
    dtype=st.sampled_from(list(ROUNDING)),
    layout=st.sampled_from([(8, 8, 1), (8, 2, 2), (8, 2, 1), (16, 2, 2)]),
    scale=st.sampled_from([1.0, 2**-12, 2**10]),
    seed=st.integers(0, 99),
)
def test_sums_are_those_of_float64(n_rows, n_columns, keep, n_tokens, dtype, layout, scale, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_rows, n_columns, generator=generator) * scale
    weight = torch.where(torch.rand(weight.shape, generator=generator) < keep, weight, 0).to(dtype)
    x = (torch.randn(n_tokens, n_columns, generator=generator) / scale).to(dtype)
    bias = torch.randn(n_rows, generator=generator).to(dtype) if seed % 2 else None
    agrees(x, weight, bias, bits=layout[0], depth=layout[1], ahead=layout[2])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_rows_of_every_length(bits: int, dtype: torch.dtype) -> None:
    """Empty, full, one weight at either end, gaps that 8 bits just reach and just do not, all the same value."""
    weight = torch.zeros(11, 600)
    weight[1] = torch.randn(600)
    weight[2, 0] = weight[3, -1] = weight[4, 0] = weight[4, 255] = weight[5, 0] = weight[5, 256] = 2.0
    weight[6, ::7] = 1.0
    weight[7, 300:] = -1.0
    weight[8, ::256] = weight[9, 5::257] = 3.0
    x = torch.randn(1, 600)
    agrees(x.to(dtype), weight.to(dtype), torch.ones(11, dtype=dtype), bits=bits)


@pytest.mark.parametrize(("n_tokens", "bad"), [(1, float("inf")), (5, float("nan"))])
def test_what_is_not_finite_reaches_every_sum_of_its_token(n_tokens: int, bad: float) -> None:
    """As in torch, where a zero makes NaN of it; and no other token."""
    weight = torch.zeros(6, 50)
    weight[:, 3] = 1.0
    x = torch.randn(n_tokens, 50)
    x[-1, 49] = bad
    for bits in (8, 16):
        found = few_tokens(x, with_places(weight, bits=bits), None, ahead=2)
        assert bool(found[-1].isnan().all()) and bool(found[:-1].isfinite().all())


class Plain:
    """What Recorded does, without a GPU: results lie in memory that the next call writes to."""

    def __init__(self, function, inputs) -> None:
        self.function, self.found = function, function(inputs)

    def __call__(self, inputs):
        pytree.tree_map(lambda own, new: own.copy_(new), self.found, self.function(inputs))
        return recording.own_results(self.found)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which sparse kernels take half of the time, that is the CPU."""

    def seconds(way, x, n_copies):
        return 1.0 if way.name == "dense" else 0.5

    monkeypatch.setattr(network, "DEVICE", "cpu")
    monkeypatch.setattr(recording, "Recorded", Plain)
    monkeypatch.setattr(recording, "race", lambda calls: [1.0, 1.0, 0.5][: len(calls)])
    monkeypatch.setattr(linear, "seconds_of", seconds)
    monkeypatch.setattr(plan, "seconds_of", seconds)
    monkeypatch.setattr(linear, "MOST_BYTES", 99.0)
    monkeypatch.setattr(linear, "FEW_WAYS", ((8, 2),))  # the interpreter takes its time
    monkeypatch.setattr(plan, "LEAST_WEIGHTS", 16)


class Net(nn.Module):
    """Two layers with one input, a layer without zeros, a convolution, a layer of few weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.q, self.k = nn.LayerNorm(24), nn.Linear(24, 20), nn.Linear(24, 12)
        self.o, self.full, self.few, self.conv = (
            nn.Linear(20, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 1), nn.Conv1d(1, 2, 3),
        )  # fmt: skip
        for layer in (self.q, self.k, self.o):
            layer.weight.data[torch.rand_like(layer.weight) < 0.8] = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.norm(x)
        hidden = self.full(self.o(torch.relu(self.q(y))))
        return {"a": self.few(hidden), "b": self.k(y).sum(-1), "c": self.conv(hidden.flatten(0, -2)[:, None])}


@pytest.mark.usefixtures("on_cpu")
def test_a_network_gives_what_torch_gives() -> None:
    model, x = Net().eval(), torch.randn(1, 2, 24)
    fast = network.SparseOnGpu(model, (x,), {})
    kernels = {step.name: step.kernel for step in fast.steps}
    assert kernels["q"] == "places of 8 bits" and kernels["k"] == "with q" and kernels["o"].startswith("places")
    assert kernels["full"] == "dense" and kernels["few"] == kernels["conv1d"] == "torch"
    assert "no zeros" in str(fast) and not fast.latest.is_dense and fast.n_bytes > fast.n_dense_bytes
    for other in (x, torch.randn(1, 2, 24), torch.randn(1, 1, 24)):
        found, expected = fast(other), model(other)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    again = fast(x)
    before = {name: value.clone() for name, value in again.items()}
    fast(torch.randn(1, 2, 24))
    assert all(torch.equal(again[name], before[name]) for name in before)  # the caller's own


@pytest.mark.usefixtures("on_cpu")
def test_torch_runs_what_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net().eval(), torch.randn(1, 1, 24)
    monkeypatch.setattr(recording, "race", lambda calls: [1.0, 0.9, 0.87][: len(calls)])  # less than 5 % faster
    fast = network.SparseOnGpu(model, (x,), {})
    assert fast.latest.how == network.RECORDED and not any(step.held for step in fast.steps)
    assert torch.equal(fast(x)["a"], model(x)["a"])
    for room in (linear, plan):
        monkeypatch.setattr(room, "seconds_of", lambda way, x, n_copies: 1.0 if way.name == "dense" else 2.0)
    slow = network.SparseOnGpu(model, (x,), {})
    assert {step.note for step in slow.steps if step.name in "qko"} == {"dense is as fast"}
    assert slow.latest.is_dense


@pytest.mark.usefixtures("on_cpu")
def test_many_tokens_and_other_reasons_are_said() -> None:
    model = nn.Sequential(nn.Linear(24, 20)).eval()
    model[0].weight.data[:, ::2] = 0
    many = network.SparseOnGpu(model, (torch.randn(40, 24),), {})
    assert "2:4 needs fp16 or bf16" in many.steps[0].note
    model[0].weight.data[0, :3] = 1.0
    many = network.SparseOnGpu(model, (torch.randn(40, 24),), {})
    assert "40 tokens" in many.steps[0].note
    alone = torch.randn(24)  # a token without a dimension of tokens
    fast = network.SparseOnGpu(model, (alone,), {})
    assert fast.steps[0].kernel == "places of 8 bits"
    torch.testing.assert_close(fast(alone), model(alone), rtol=1e-5, atol=1e-6)
    sums = network.SparseOnGpu(model.double(), (torch.randn(1, 24).double(),), {})
    assert "float64" in sums.steps[0].note


@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_that_is_off_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    real = linear.with_places

    def wrong(weight: Tensor, *, bits: int):
        weight = weight.clone()
        weight[0] *= 1.5
        return real(weight, bits=bits)

    monkeypatch.setattr(linear, "with_places", wrong)
    model, x = Net().eval(), torch.randn(1, 1, 24)
    fast = network.SparseOnGpu(model, (x,), {})
    assert fast.latest.is_dense and all("off on the example" in step.note for step in fast.steps if step.name in "qko")
