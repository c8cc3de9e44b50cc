"""Every generated loop against its slow definition, as a network runs it; of any size: `test_generated_loops.py`."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles import runtime as oracle
from runtime.nets import is_close, kernels, thin
from torch import nn

import sipp
from sipp.runtime import products, steps


def close(fast, wanted):
    return is_close(fast, torch.from_numpy(np.asarray(wanted, np.float32)))


@pytest.mark.parametrize(("n", "groups", "keep"), [(1, 1, 0.6), (17, 2, 0.1)])
def test_convolution_equals_the_definition(never_dense, n, groups, keep):
    kernel, stride, padding, dilation, side = (2, 5), (1, 3), (2, 1), (2, 1), 6
    torch.manual_seed(n)
    conv = thin(nn.Conv2d(4, 6, kernel, stride, padding, dilation, groups), keep)
    x = torch.randn(n, 4, side, side + 1)
    fast = sipp.sparse(conv, x)
    assert kernels(fast)[0].startswith("sparse")
    wanted = oracle.convolution(
        x.numpy(), conv.weight.detach().numpy(), conv.bias.detach().numpy(), stride, padding, dilation, groups
    )
    assert close(fast(x), wanted)


@pytest.mark.parametrize("n", [1, 9])
def test_linear_equals_the_definition(never_dense, n):
    layer = thin(nn.Linear(37, 21), 0.15)
    x = torch.randn(n, 37)
    fast = sipp.sparse(layer, x)
    assert kernels(fast)[0].startswith("sparse")
    assert close(fast(x), oracle.linear(x.numpy(), layer.weight.detach().numpy(), layer.bias.detach().numpy()))


@pytest.mark.parametrize(("n", "kernel", "stride", "padding"), [(1, 3, 2, 1), (21, 2, 2, 0)])
@pytest.mark.parametrize("is_max", [True, False])
def test_pooling_equals_the_definition(never_dense, n, kernel, stride, padding, is_max):
    pool = (nn.MaxPool2d if is_max else nn.AvgPool2d)(kernel, stride, padding)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), pool)
    x = torch.randn(n, 3, 7, 6)
    fast = sipp.sparse(net, x)
    assert kernels(fast)[1] == ("max of windows" if is_max else "mean of windows")
    before = net[0](x).detach().numpy()
    assert close(fast(x), oracle.pooling(before, kernel, stride, padding, is_max))


@pytest.mark.parametrize("shape", [(5, 7), (2, 8, 24), (3, 2, 4, 9)])
def test_layer_norm_equals_the_definition(never_dense, shape):
    norm = thin(nn.LayerNorm(shape[-1], eps=1e-3), 1.0)
    x = 3 * torch.randn(shape) + 1
    fast = sipp.sparse(norm, x)
    assert kernels(fast) == ["norm of tokens"]
    assert close(fast(x), oracle.layer_norm(x.numpy(), norm.weight.detach().numpy(), norm.bias.detach().numpy(), 1e-3))


def test_lstm_equals_the_definition(never_dense):
    net = thin(nn.LSTM(3, 11, batch_first=True), 0.3)
    x = torch.randn(2, 6, 3)
    fast = sipp.sparse(net, x)
    assert any(kernel.startswith("sparse LSTM") for kernel in kernels(fast))
    bias = (net.bias_ih_l0 + net.bias_hh_l0).detach().numpy()
    weights = [weight.detach().numpy() for weight in (net.weight_ih_l0, net.weight_hh_l0)]
    assert close(fast(x)[0], [oracle.lstm(line, *weights, bias) for line in x.numpy()])


@pytest.mark.parametrize(
    ("name", "module", "n_tokens"),
    [
        ("relu", nn.ReLU(), 960), ("relu6", nn.ReLU6(), 960), ("sigmoid", nn.Sigmoid(), 960), ("tanh", nn.Tanh(), 960),
        ("silu", nn.SiLU(), 960), ("gelu", nn.GELU(), 960), ("gelu_tanh", nn.GELU(approximate="tanh"), 960),
        ("gelu", nn.GELU(), 1),
    ],
)  # fmt: skip
def test_activations_become_tails(never_dense, name, module, n_tokens):
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    x = torch.linspace(-1.3 if n_tokens == 1 else -12, 12, n_tokens).reshape(n_tokens, 1)
    fast = sipp.sparse(nn.Sequential(layer, module), x)
    assert len(fast.steps) == 1
    wanted = np.vectorize(oracle.ACTIVATIONS[name])(x.double().numpy())
    assert np.allclose(fast(x).numpy(), wanted, atol=1e-6, rtol=1e-5)


def test_a_convolution_with_a_weight_far_away(never_dense):
    """Places that are more than 16 bits apart are bridged."""
    conv = nn.Conv2d(3, 1, 1, bias=False)
    conv.weight.data.copy_(torch.tensor([1.0, 0.0, -2.0]).reshape(1, 3, 1, 1))
    x = torch.randn(1, 3, 300, 260)
    assert torch.allclose(sipp.sparse(conv, x)(x), F.conv2d(x, conv.weight), atol=1e-6)


@pytest.mark.parametrize("n", [1, 8, 16])
@pytest.mark.parametrize("n_rounds", [2, 3])
def test_rounds_over_the_channels(never_dense, monkeypatch, n, n_rounds):
    monkeypatch.setattr(products, "_rounds", lambda *given: [n_rounds])
    net = thin(nn.Sequential(nn.Conv2d(5, 6, 3, padding=1), nn.ReLU()), 0.4)
    x = torch.randn(n, 5, 6, 8 if n == 1 else 7)  # whole strips: sums of rounds must not overlap
    fast = sipp.sparse(net, x)
    assert kernels(fast)[0].endswith(f"{n_rounds} rounds")
    weight, bias = net[0].weight.detach().numpy(), net[0].bias.detach().numpy()
    assert close(fast(x), oracle.convolution(x.numpy(), weight, bias, (1, 1), (1, 1), (1, 1), 1).clip(0))


def test_two_threads_give_the_same(never_dense, monkeypatch):
    monkeypatch.setattr(steps, "SHARED_SECONDS", 0.0)
    net = thin(
        nn.Sequential(nn.Conv2d(5, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(576, 9)), 0.3
    )
    n_threads = torch.get_num_threads()
    for n in (1, 16):
        x = torch.randn(n, 5, 12, 12)
        fast = sipp.sparse(net, x)
        try:
            torch.set_num_threads(1)
            alone = fast(x)
            torch.set_num_threads(3)
            assert torch.equal(fast(x), alone)
        finally:
            torch.set_num_threads(n_threads)
