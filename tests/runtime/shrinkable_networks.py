"""Random networks with dead rows and unread channels: a seed in, a network and an input out.

Values are images N x C x H x W until they are flattened. Every part says how many channels it gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (4, 6, 8)


class Part(nn.Module):
    """A function of a value and of the modules and parameters that it is made with."""

    def __init__(self, forward: Callable[..., Tensor], *held: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = forward
        self.modules_held = nn.ModuleList([one for one in held if isinstance(one, nn.Module)])
        self.tensors_held = nn.ParameterList([one for one in held if isinstance(one, nn.Parameter)])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.modules_held, *self.tensors_held)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 2)


def conv(rng: random.Random, n_in: int, n_out: int, kernel: int = 3, groups: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size of images."""
    mode = rng.choice(["zeros"] * 4 + ["circular", "reflect"])
    is_biased, padding = rng.random() < 0.6, rng.choice([kernel // 2, "same"])
    return nn.Conv2d(n_in, n_out, kernel, padding=padding, groups=groups, bias=is_biased, padding_mode=mode)


def act(rng: random.Random, n: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        nn.ReLU, nn.ReLU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Hardswish, lambda: nn.PReLU(n), nn.PReLU, nn.Dropout,
        nn.Identity,
    ]  # fmt: skip
    return rng.choice(kinds)()


def norm(rng: random.Random, n: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.BatchNorm2d(n), lambda: nn.BatchNorm2d(n), lambda: nn.BatchNorm2d(n, affine=False),
        lambda: nn.GroupNorm(2 - n % 2, n), nn.Identity, lambda: nn.InstanceNorm2d(n),
        lambda: nn.BatchNorm2d(n, track_running_stats=False),
    ]  # fmt: skip
    return rng.choice(kinds)()


def block(rng: random.Random, n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(conv(rng, n_in, n_out), norm(rng, n_out), act(rng, n_out))


def _residual(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    inner = nn.Sequential(block(rng, n, 6), conv(rng, 6, n), norm(rng, n))
    return Part(lambda x, f, g: g(x + f(x)), inner, act(rng, n)), n


def _projected(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    wide = rng.choice(WIDTHS)
    inner = nn.Sequential(block(rng, n, 5), conv(rng, 5, wide))
    return Part(lambda x, f, g: F.relu(f(x) + g(x)), inner, conv(rng, n, wide, 1)), wide


def _joined(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    return Part(lambda x, f, g: torch.cat((f(x), x, g(x)), 1), block(rng, n, 3), conv(rng, n, 2, 1)), n + 5


def _grouped(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    return nn.Sequential(conv(rng, n, 8, 1), act(rng, 8), conv(rng, 8, 12, 3, groups=4), act(rng, 12)), 12


def _depthwise(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    times = rng.choice([1, 2])
    return nn.Sequential(conv(rng, n, 6, 1), norm(rng, 6), act(rng, 6), conv(rng, 6, 6 * times, 3, groups=6)), 6 * times


def _gate(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    inner = nn.Sequential(nn.Conv2d(n, 3, 1), nn.ReLU(), nn.Conv2d(3, n, 1), nn.Sigmoid())
    return Part(lambda x, f: x * f(F.adaptive_avg_pool2d(x, 1)), inner), n


def _squeezed(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    inner = nn.Sequential(nn.Linear(n, 4), nn.ReLU(), nn.Linear(4, n))
    return Part(lambda x, f: x + f(x.mean((2, 3)))[:, :, None, None], inner), n


def _twice(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    return nn.Sequential(*[conv(rng, n, n)] * 2, act(rng, n)), n


def _tied(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    first, second = nn.Conv2d(n, n, 1), nn.Conv2d(n, n, 1)
    second.weight = first.weight
    return nn.Sequential(first, act(rng, n), second), n


def _functional(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    wide = rng.choice(WIDTHS)
    if rng.random() < 0.5:
        return Part(lambda x, w: F.conv2d(x, w, padding=1), parameter(wide, n, 3, 3)), wide
    return Part(lambda x, w, b: F.conv2d(x, w, b), parameter(wide, n, 1, 1), parameter(wide)), wide


def _scaled(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    shape = rng.choice([(n, 1, 1), (1, n, 1, 1), (1,), (1, 1, 1, 1)])
    return Part(lambda x, s, b: x * s + b, parameter(*shape), parameter(*shape)), n


def _pooled(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    pools = [nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)]
    return rng.choice([*pools, nn.Upsample(scale_factor=2), nn.ZeroPad2d(1), nn.ReflectionPad2d(1)]), n


def _transposed(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    return nn.Sequential(nn.ConvTranspose2d(n, 6, 2, 2, bias=rng.random() < 0.5), act(rng, 6)), 6


def _padded(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    return Part(lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))), n + 3


def _left(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    """Operations that need all of their channels."""
    return rng.choice([
        Part(lambda x: x.flip(1)), Part(lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
        Part(lambda x: x - x.mean(1, True)), Part(lambda x: F.relu(x, inplace=True)),
        Part(lambda x: x.softmax(1)), Part(lambda x: x / (x.shape[2] + 1)),
        Part(lambda x, f: f(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), nn.LayerNorm(n)),
    ]), n  # fmt: skip


def _plain(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    wide = rng.choice(WIDTHS)
    return block(rng, n, wide), wide


def _activated(rng: random.Random, n: int) -> tuple[nn.Module, int]:
    return nn.Sequential(norm(rng, n), act(rng, n)), n


PARTS = [
    _plain, _plain, _plain, _residual, _residual, _projected, _joined, _grouped, _depthwise, _gate, _squeezed, _twice,
    _tied, _functional, _scaled, _pooled, _transposed, _padded, _left, _activated, _activated,
]  # fmt: skip


def _head(rng: random.Random, n: int) -> nn.Module:
    """Flat points of the images, through a few linear layers."""
    ends: list[tuple[nn.Module, int]] = [
        (nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()), 4 * n),
        (Part(lambda x: F.adaptive_max_pool2d(x, 2).reshape(x.shape[0], -1)), 4 * n),
        (Part(lambda x: x.mean((2, 3))), n),
        (Part(lambda x: x.amax(3).sum(2)), n),
        (Part(lambda x: F.adaptive_avg_pool2d(x, 1).view(-1, n)), n),  # the number of channels stands in the code
    ]
    end, width = rng.choice(ends)
    hidden = rng.choice((5, 9))
    layers = [nn.Linear(width, hidden, bias=rng.random() < 0.7), nn.BatchNorm1d(hidden), act(rng, hidden)]
    if rng.random() < 0.3:
        layers[1] = nn.LayerNorm(hidden)
    return nn.Sequential(end, *layers, nn.Linear(hidden, 3))


def network(seed: int, most_parts: int = 4) -> tuple[nn.Module, Tensor]:
    """The network of this seed, with dead rows and channels, and an input."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    parts: list[Any] = [block(rng, 3, 6)]
    n = 6
    for _ in range(rng.randint(1, most_parts)):
        part, n = rng.choice(PARTS)(rng, n)
        parts.append(part)
    net = nn.Sequential(*parts, _head(rng, n)).eval()
    kill(net, rng)
    return net, torch.randn(2, 3, 8, 8)


def kill(net: nn.Module, rng: random.Random) -> None:
    """Zeroes rows, columns and single weights, and a few of a norm's; norms have seen data."""
    shares = [rng.choice([0.1, 0.3, 0.6]) for _ in range(3)]
    with torch.no_grad():
        for weight in net.parameters():
            if weight.ndim > 1:
                each = [1] * (weight.ndim - 2)
                weight *= torch.rand(weight.shape[0], 1, *each) > shares[0]
                weight *= torch.rand(1, weight.shape[1], *each) > shares[1]
                weight *= torch.rand(weight.shape) > shares[2]
            else:
                weight += 0.3 * torch.randn(weight.shape)
                weight *= torch.rand(weight.shape) > 0.1
        for module in net.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.copy_(0.3 * torch.randn(module.running_mean.shape))
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape))
