"""The GPU runtime's kernels and networks on the CPU. Run by test_gpu_kernels.py, with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import faster_interpreter  # noqa: F401
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import sipp
from sipp.errors import ModelError
from sipp.native import pytree
from sipp.runtime import examples, sparse_network
from sipp.runtime.gpu import linear, network, plan, recording
from sipp.runtime.gpu.kernels import few_tokens
from sipp.runtime.gpu.layouts import as_walks, int8_scales

assert os.environ.get("TRITON_INTERPRET") == "1"
ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-20}  # one of the result, and some


def agrees(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, n_lanes: int = 8, ahead: int = 2, as_int8: bool = False
) -> None:
    """The kernel's sums are those of float64, to rounding of the result, of float32 sums, and of scales."""
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    scales = int8_scales(weight) if as_int8 else None
    assert (scales is not None) == as_int8
    found = few_tokens(x, as_walks(weight, n_lanes=n_lanes, n_rows=4, scales=scales), bias, ahead=ahead)
    assert found.dtype == x.dtype and found.shape == exact.shape
    gap = (found.double() - exact).abs()
    rounding, tiny = ROUNDING[x.dtype], torch.finfo(x.dtype).tiny
    most = rounding * exact.abs() + (rounding if as_int8 else 2**-20) * size + tiny
    assert bool((gap <= most).all()), float(gap.max())


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    n_rows=st.integers(1, 6),
    n_columns=st.sampled_from([1, 3, 40, 300, 1030]),
    keep=st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0]),
    n_tokens=st.sampled_from([1, 1, 2]),
    dtype=st.sampled_from(list(ROUNDING)),
    n_lanes=st.sampled_from([8, 32]),
    ahead=st.sampled_from([1, 2, 3, 4]),
    scale=st.sampled_from([1.0, 2**-12, 2**10]),
    seed=st.integers(0, 99),
)
def test_sums_are_those_of_float64(n_rows, n_columns, keep, n_tokens, dtype, n_lanes, ahead, scale, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_rows, n_columns, generator=generator) * scale
    weight = torch.where(torch.rand(weight.shape, generator=generator) < keep, weight, 0).to(dtype)
    x = (torch.randn(n_tokens, n_columns, generator=generator) / scale).to(dtype)
    bias = torch.randn(n_rows, generator=generator).to(dtype) if seed % 2 else None
    agrees(x, weight, bias, n_lanes=n_lanes, ahead=ahead)


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_rows_of_every_length(dtype: torch.dtype) -> None:
    """Empty, full, one weight at either end, gaps that 8 bits just reach and just do not, all the same value."""
    weight = torch.zeros(11, 600, dtype=dtype)
    weight[1, 0] = weight[2, -1] = weight[3, 0] = weight[3, 255] = weight[4, 0] = weight[4, 256] = 2.0
    weight[5, ::256] = weight[6, 5::257] = 3.0
    x = torch.randn(1, 600).to(dtype)
    agrees(x, weight, torch.ones(11, dtype=dtype), n_lanes=1, ahead=1)  # one thread goes all the way
    weight[7] = torch.randn(600)
    weight[8, ::7] = 1.0
    weight[9, 300:] = -1.0
    agrees(x, weight, None, n_lanes=32, ahead=1)


@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
def test_slices_of_every_number_of_blocks(ahead: int) -> None:
    """From one block to ten, each number alone in its slice."""
    weight = torch.randn(40, 40).half()
    weight[torch.arange(40) >= 4 * torch.arange(1, 11).repeat_interleave(4)[:, None]] = 0
    agrees(torch.randn(1, 40).half(), weight, None, n_lanes=1, ahead=ahead)


@pytest.mark.parametrize(("n_tokens", "dtype"), [(1, torch.float16), (2, torch.float32), (5, torch.float16)])
def test_values_of_8_bits_with_a_scale_a_row(n_tokens: int, dtype: torch.dtype) -> None:
    levels = torch.randint(-127, 128, (6, 300)) * (torch.rand(6, 300) < 0.3)
    levels[:, 7] = -127
    agrees(torch.randn(n_tokens, 300).to(dtype), (levels * torch.rand(6, 1)).to(dtype), None, as_int8=True)


@pytest.mark.parametrize(
    ("n_tokens", "bad", "n_columns", "dtype"),
    [
        (1, float("inf"), 50, torch.float16),
        (1, float("-inf"), 51, torch.bfloat16),
        (1, float("nan"), 51, torch.float32),
        (5, float("nan"), 50, torch.float16),
        (3, float("inf"), 51, torch.float32),
    ],
)
def test_what_is_not_finite_reaches_every_sum_of_its_token(n_tokens, bad, n_columns, dtype) -> None:
    """As in torch, where a zero makes NaN of it; and no other token. The largest numbers are finite."""
    weight = torch.zeros(6, n_columns, dtype=dtype)
    weight[:, 3] = 1.0
    walks = as_walks(weight, n_lanes=8, n_rows=4)
    x = torch.randn(n_tokens, n_columns).to(dtype)
    x[:, 5] = torch.finfo(dtype).max
    assert bool(few_tokens(x, walks, None, ahead=1).isfinite().all())
    for i in range(max(2, n_tokens)):
        token, column = i % n_tokens, n_columns - 1 - i % 2
        worse = x.clone()
        worse[token, column] = bad
        found = few_tokens(worse, walks, None, ahead=1).isnan()
        assert bool(found[token].all()) and int(found.sum()) == found.shape[1]


class Plain:
    """What Recorded does, without a GPU: results lie in memory that the next call writes to."""

    def __init__(self, function, inputs) -> None:
        self.function, self.found = function, function(inputs)

    def __call__(self, inputs):
        pytree.tree_map(lambda own, new: own.copy_(new), self.found, self.function(inputs))
        return examples.cloned(self.found)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which sparse kernels take half of the time, that is the CPU."""

    def seconds(way, x, n_copies):
        return 1.0 if way.name == "dense" else 0.5

    monkeypatch.setattr(network, "DEVICE", "cpu")
    monkeypatch.setattr(sparse_network, "CpuNetwork", network.GpuNetwork)
    monkeypatch.setattr(recording, "Recorded", Plain)
    monkeypatch.setattr(recording, "race", lambda calls: [1.0, 1.0, 0.5][: len(calls)])
    monkeypatch.setattr(plan, "time_kernel", seconds)
    monkeypatch.setattr(plan, "MOST_BYTES", 99.0)
    monkeypatch.setattr(linear, "FEW_TOKEN_SHAPES", ((8, 8, 1),))  # the interpreter takes its time
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
    fast = sipp.sparse(model, x)
    kernels = {step.name: step.kernel or step.by for step in fast.steps}
    assert kernels["q"] == "walks, 32-bit values" and kernels["k"] == "with q" and kernels["o"].startswith("walks")
    assert kernels["full"] == "dense" and kernels["few"] == kernels["conv1d"] == "torch"
    assert "no zeros" in str(fast) and not fast.latest.is_dense and fast.n_bytes > fast.n_dense_bytes
    for other in (torch.randn(1, 2, 24), torch.randn(1, 1, 24)):
        found, expected = fast(other), model(other)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    again = fast(x)
    before = {name: value.clone() for name, value in again.items()}
    fast(torch.randn(1, 2, 24))
    assert all(torch.equal(again[name], before[name]) for name in before)  # the caller's own


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else -x


@pytest.mark.usefixtures("on_cpu")
def test_what_cannot_be_traced_is_run_as_called() -> None:
    model, x = Branches(24, 24).eval(), torch.ones(2, 24)
    fast = sipp.sparse(model, x)
    for inputs in (x, -x, x[:1], -x[:1]):  # nothing of the first branch is recorded
        assert torch.equal(fast(inputs), model(inputs))
        assert fast.latest.how.startswith(f"{network.AS_CALLED} (torch.export cannot trace it")
    with pytest.raises(ModelError, match="changes input"):
        sipp.sparse(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(24, 24)).eval(), x)


@pytest.mark.usefixtures("on_cpu")
def test_torch_runs_what_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net().eval(), torch.randn(1, 1, 24)
    monkeypatch.setattr(recording, "race", lambda calls: [1.0, 0.9, 0.87][: len(calls)])  # less than 5 % faster
    fast = sipp.sparse(model, x)
    assert fast.latest.how.startswith(network.RECORDED) and not any(step.held for step in fast.steps)
    assert torch.equal(fast(x)["a"], model(x)["a"])
    anyway = sipp.sparse(model, x, always=True)
    assert anyway.latest.how.startswith(network.BY_STEPS) and not anyway.latest.is_dense
    torch.testing.assert_close(anyway(x)["a"], model(x)["a"], rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(plan, "time_kernel", lambda way, x, n_copies: 1.0 if way.name == "dense" else 2.0)
    slow = sipp.sparse(model, x)
    assert {step.note for step in slow.steps if step.name in "qko"} == {"dense is as fast"}
    assert slow.latest.is_dense


@pytest.mark.usefixtures("on_cpu")
def test_many_tokens_and_other_reasons_are_said() -> None:
    model = nn.Sequential(nn.Linear(24, 20)).eval()
    model[0].weight.data[:, ::2] = 0
    many = sipp.sparse(model, torch.randn(40, 24))
    assert "2:4 needs fp16 or bf16" in many.steps[0].note
    model[0].weight.data[0, :3] = 1.0
    many = sipp.sparse(model, torch.randn(40, 24))
    assert "40 tokens" in many.steps[0].note
    alone = torch.randn(24)  # a token without a dimension of tokens
    fast = sipp.sparse(model, alone)
    assert fast.steps[0].kernel == "walks, 32-bit values"
    torch.testing.assert_close(fast(alone), model(alone), rtol=1e-5, atol=1e-6)
    sums = sipp.sparse(model.double(), torch.randn(1, 24).double())
    assert "float64" in sums.steps[0].note


@pytest.mark.parametrize("n_right", [0, 3])
@pytest.mark.usefixtures("on_cpu")
def test_a_kernel_that_is_off_is_not_taken(n_right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a layer whose kind has been timed: all layers are compared with torch."""
    real, calls = linear.as_walks, []

    def wrong(weight: Tensor, *, n_lanes: int, n_rows: int, scales: Tensor | None):
        calls.append(weight)
        weight = weight.clone()
        weight[0] *= 1.0 if len(calls) <= n_right else 1.5
        return real(weight, n_lanes=n_lanes, n_rows=n_rows, scales=scales)

    monkeypatch.setattr(linear, "as_walks", wrong)
    model, x = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3))).eval(), torch.randn(1, 24)
    for layer in model:
        layer.weight.data[:, 5:] = 0
    fast = sipp.sparse(model, x)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
    is_off = ["off on the example" in step.note for step in fast.steps]
    assert is_off == ([True] * 3 if n_right == 0 else [False, False, True])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("on_cpu")
def test_a_network_may_be_off_by_its_rounding_and_no_more(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the outputs is no rounding, not even in bfloat16; every layer by itself is right."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)).eval().to(dtype),
        torch.randn(1, 24, dtype=dtype),
    )
    for layer in (model[0], model[2]):
        layer.weight.data[torch.rand_like(layer.weight) < 0.7] = 0
    fast = sipp.sparse(model, x, always=True)
    assert not fast.latest.is_dense
    real = recording.Recorded

    class Off(real):
        def __call__(self, inputs):
            return super().__call__(inputs) * (1.1 if self.is_steps else 1.0)

        def __init__(self, function, inputs):
            self.is_steps = function.__name__ == "by_steps"
            super().__init__(function, inputs)

    monkeypatch.setattr(recording, "Recorded", Off)
    fast = sipp.sparse(model, x, always=True)
    assert fast.latest.is_dense and "off on the example" in fast.latest.how
    torch.testing.assert_close(fast(x), model(x))
