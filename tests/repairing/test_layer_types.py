"""Every layer type: the refitted rows are those of the oracle on that layer's own inputs."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles.joint import refit
from oracles.refit import Array, conv_patches, refit_row
from repairing.fit_points import f64, fit_points
from torch import Tensor, nn

import sipp
from sipp.results.pruned import Pruned


def alike(*shape: int, axis: int = -1) -> Tensor:
    """Points whose neighbouring features are alike and not centred, so that one makes up for another."""
    noise = torch.randn(*shape)
    return noise + 0.9 * noise.roll(1, axis) + 0.5


def repaired(net: nn.Module, points: Any, *, keep: float = 0.5) -> tuple[Pruned, Pruned]:
    pruned = sipp.prune(net, None, keep=keep, method="magnitude")
    return pruned, sipp.repair(net, pruned, points)


def check_rows(
    before: Pruned, after: Pruned, name: str, dense: Tensor, x_dense: Array, x_pruned: Array, rows: slice = slice(None)
) -> Array:
    """Asserts that these rows (F x K) are the oracle's; gives the intercepts that belong to them."""
    assert after.repair is not None
    layer = next(one for one in after.repair.layers if one.name == name)
    assert not layer.left_alone and layer.ridge is not None
    flat = [
        f64(t).reshape(len(t), -1)[rows] for t in (before.model.get_parameter(name), after.model.get_parameter(name))
    ]
    mask = before.masks[name].flatten(1)[rows].numpy()
    target = x_dense @ f64(dense).reshape(len(dense), -1)[rows].T
    expected, shifts = refit(x_pruned, target, flat[0], mask, layer.ridge, layer.intercept != "none")
    assert np.allclose(flat[1], expected, rtol=2e-4, atol=2e-5)
    return shifts


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1), (9,)),
        (nn.Conv2d(4, 6, 3, groups=2, padding=1), (5, 4)),
        (nn.Conv2d(3, 5, (2, 3), stride=(1, 2), dilation=(2, 1), bias=False), (6, 7)),
        (nn.Conv2d(4, 4, 3, groups=4), (5, 5)),
        (nn.Conv3d(2, 3, 2, padding=1), (2, 3, 3)),
    ],
    ids=["1d", "groups", "dilated, no bias", "depthwise", "3d"],
)
def test_convolutions(conv: Any, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    conv.reset_parameters()
    points = alike(120, conv.in_channels, *size)
    pruned, fixed = repaired(conv, points)
    per_group = conv.in_channels // conv.groups
    geometry = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    for g in range(conv.groups):
        channels = f64(fit_points(points))[:, g * per_group : (g + 1) * per_group]
        x = np.concatenate([conv_patches(image, *geometry) for image in channels])
        per = conv.out_channels // conv.groups
        check_rows(pruned, fixed, "weight", conv.weight, x, x, slice(g * per, (g + 1) * per))
    assert fixed.repair is not None and fixed.repair.layers[0].intercept == (
        "bias" if conv.bias is not None else "none"
    )


def test_transformers_conv1d_stores_rows_last() -> None:
    layers = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    net = layers.Conv1D(5, 8)
    points = alike(60, 8)
    pruned = sipp.prune(net, None, keep=0.5, method="magnitude")
    fixed = sipp.repair(net, pruned, points)
    linear = nn.Linear(8, 5)
    linear.load_state_dict({"weight": net.weight.T.detach(), "bias": net.bias.detach()})
    _, expected = repaired(linear, points)
    assert torch.allclose(fixed.model.weight.T, expected.model.weight, atol=1e-6)


class Last(nn.Module):
    """The last step of a recurrent layer, or of a cell run over the steps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.layer, nn.RNNCellBase):
            output: Tensor = self.layer(x)[0]
            return output[:, -1]
        state = None
        for step in x.unbind(1):
            state = self.layer(step, state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


RECURRENT = {
    "rnn": lambda: nn.RNN(4, 6, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 6, batch_first=True, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(4, 6, batch_first=True),
    "projected": lambda: nn.LSTM(4, 6, batch_first=True, proj_size=3),
    "no bias": lambda: nn.LSTM(4, 6, batch_first=True, bias=False),
    "rnn cell": lambda: nn.RNNCell(4, 6),
    "lstm cell": lambda: nn.LSTMCell(4, 6),
    "gru cell": lambda: nn.GRUCell(4, 6),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers(kind: str) -> None:
    torch.manual_seed(1)
    net = Last(RECURRENT[kind]())
    for parameter in net.parameters():
        parameter.data *= 2
    points = alike(300, 5, 4)
    pruned, fixed = repaired(net, points)
    name = "layer.weight_ih" + ("" if "cell" in kind else "_l0")
    x = f64(fit_points(points).flatten(0, 1))
    shift = check_rows(pruned, fixed, name, net.get_parameter(name), x, x)
    if kind != "no bias":
        bias = name.replace("weight", "bias")
        assert np.allclose(f64(fixed.model.get_parameter(bias) - net.get_parameter(bias)), shift, atol=1e-5)
    assert fixed.repair is not None and fixed.repair.output_after < fixed.repair.output_before  # type: ignore[operator]
    assert all(bool((fixed.model.get_parameter(n)[~mask] == 0).all()) for n, mask in fixed.masks.items())


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output: Tensor = self.mix(x, y, y)[0]
        return output


@pytest.mark.parametrize(
    "options", [{}, {"kdim": 6, "vdim": 6}, {"bias": False}], ids=["packed", "separate", "no bias"]
)
def test_attention(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Attends(**options)
    n_keys = options.get("kdim", 8)
    query, other = alike(150, 5, 8), alike(150, 7, n_keys)
    pruned, fixed = repaired(net, [((query, other), None)])
    for i, (letter, given) in enumerate(zip("qkv", (query, other, other))):
        x = f64(fit_points(given).flatten(0, 1))
        if n_keys == 8:
            shift = check_rows(
                pruned, fixed, "mix.in_proj_weight", net.mix.in_proj_weight, x, x, slice(8 * i, 8 * i + 8)
            )
        else:
            name = f"mix.{letter}_proj_weight"
            shift = check_rows(pruned, fixed, name, net.get_parameter(name), x, x)
        if "bias" not in options:
            bias, old = fixed.model.mix.in_proj_bias, net.mix.in_proj_bias
            assert np.allclose(f64(bias - old)[8 * i : 8 * i + 8], shift, atol=1e-5)
    assert fixed.repair is not None and fixed.repair.output_after < fixed.repair.output_before  # type: ignore[operator]


class Twice(nn.Module):
    """One layer used twice, or two layers that share their weight."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6) if is_tied else self.one
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.relu(self.one(x)))


@pytest.mark.parametrize("is_tied", [True, False])
def test_all_uses_of_a_weight_count(is_tied: bool) -> None:
    torch.manual_seed(0)
    net, points = Twice(is_tied), alike(100, 6)
    pruned, fixed = repaired(net, points)
    x = fit_points(points)
    meets = [np.concatenate([f64(x), f64(F.relu(m.one(x)))]) for m in (net, pruned.model)]
    check_rows(pruned, fixed, "one.weight", net.one.weight, *meets)
    assert fixed.repair is not None and fixed.repair.layers[0].intercept == ("none" if is_tied else "bias")
    assert fixed.model.two.weight is fixed.model.one.weight


class Normed(nn.Module):
    """A convolution in front of a BatchNorm that alone reads it, or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.norm, self.kind = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), kind

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        z = self.norm(y)
        if self.kind == "read twice":
            return z + y
        if self.kind == "norm used twice":
            return self.norm(z)
        return (z, y) if self.kind == "shown" else z


@pytest.mark.parametrize("kind", ["alone", "read twice", "norm used twice", "shown"])
def test_an_intercept_goes_into_the_norm_only_where_that_is_the_same(kind: str) -> None:
    torch.manual_seed(0)
    net, points = Normed(kind).eval(), alike(40, 3, 6, 6)
    net.norm.running_mean += torch.randn(4)
    pruned, fixed = repaired(net, points)
    assert fixed.repair is not None
    assert fixed.repair.layers[0].intercept == ("norm" if kind == "alone" else "none")
    x = np.concatenate([conv_patches(i, (3, 3), (1, 1), (0, 0), (1, 1)) for i in f64(fit_points(points))])
    shift = check_rows(pruned, fixed, "conv.weight", net.conv.weight, x, x)
    moved = f64(fixed.model.norm.running_mean - net.norm.running_mean)
    assert np.allclose(moved, -shift if kind == "alone" else 0, atol=1e-5)


def test_many_windows_are_thinned_out_and_the_fit_is_as_good() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Conv2d(3, 2, 2))
    points = alike(40, 1, 20, 20)
    pruned, fixed = repaired(net, points)
    x = np.concatenate([conv_patches(i, (2, 2), (1, 1), (0, 0), (1, 1)) for i in f64(fit_points(points))])
    assert len(x) > 2 * 128 * 4  # more than are looked at
    old, new = (f64(m[0].weight).reshape(3, -1) for m in (pruned.model, fixed.model))
    gap = x @ (f64(net[0].weight).reshape(3, -1) - old).T
    for row in range(3):
        best, shift = refit_row(x, gap[:, row], pruned.masks["0.weight"][row].flatten().numpy(), 1e-8, True)
        least = np.square(gap[:, row] - x @ best - shift).mean()
        moved = float(fixed.model[0].bias[row] - net[0].bias[row])
        assert np.square(gap[:, row] - x @ (new - old)[row] - moved).mean() <= 1.1 * least + 1e-9
