"""Random networks of what people put in one: a seed in, a network and its inputs out.

Three forms of value go through a network: images N x C x H x W, sequences N x T x F, and flat inputs N x F. A part
takes one form and gives it back, with as many channels or features as it says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from runtime.shrinkable_networks import Part
from torch import Tensor, nn

WIDTHS = (4, 6, 8, 12)
ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU, nn.ReLU6, nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU,
    nn.Mish, nn.Softplus, nn.Hardswish, nn.PReLU, lambda: nn.Softmax(-1),
]  # fmt: skip
# Functions of a value of any form that keep its shape; the first take a number from the size of the batch
ANYWHERE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * (1 / x.shape[0]),
    lambda x: F.leaky_relu(x, 1 / x.shape[0]),
    lambda x: x + torch.full((x.shape[1],) + (1,) * (x.ndim - 2), 1 / x.shape[0]),
    lambda x: F.pad(x, (x.shape[0] % 3, 0))[..., x.shape[0] % 3 :],
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: F.normalize(x, dim=1),
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: x.contiguous().view(x.shape[0], -1).view(x.shape),
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda x: x + x,
    lambda x: x.as_strided(x.shape, x.stride()) * 2,
    lambda x: x.clone().mul_(2).add_(1),
    lambda x: (x.sigmoid() + 1e-6).log(),
    lambda x: x - x.amin(1, keepdim=True) + x.amax(-1, keepdim=True),
]
N_OF_BATCH = 4


class Chain(nn.Module):
    """Parts one after the other; gives the last value, or it and one on the way."""

    def __init__(self, parts: list[nn.Module], kind: str, tap: int) -> None:
        super().__init__()
        self.parts, self.kind, self.tap = nn.ModuleList(parts), kind, tap

    def forward(self, x: Tensor) -> Any:
        tap = x
        for i, part in enumerate(self.parts):
            x = part(x)
            tap = x if i == self.tap else tap
        return {"plain": x, "pair": (x, tap), "dict": {"out": x, "tap": [tap, 3]}}[self.kind]


Made = tuple[nn.Module, int]  # a part, and how many channels or features it gives


def _activation(rng: random.Random) -> nn.Module:
    return rng.choice(ACTIVATIONS)()


def _conv(rng: random.Random, channels: int, wide: int, *, is_same: bool = False) -> nn.Module:
    groups = rng.choice([g for g in (1, 1, 2, 4) if channels % g == 0 and wide % g == 0])
    kernel = rng.choice([(1, 1), (3, 3), (3, 3), (5, 5), (3, 1), (1, 5)])
    dilation = rng.choice([1, 1, 2]) if kernel != (5, 5) else 1
    padding = tuple(dilation * (k - 1) // 2 for k in kernel)
    stride: Any = 1 if is_same else rng.choice([1, 1, 2, (1, 2), 3])
    if not is_same:
        padding = rng.choice([padding, tuple(p + 1 for p in padding)])
    mode = rng.choice(["zeros"] * 5 + ["circular", "reflect"])
    return nn.Conv2d(channels, wide, kernel, stride, padding, dilation, groups, rng.random() < 0.8, mode)


def _image_norm(rng: random.Random, channels: int) -> nn.Module:
    others = [nn.GroupNorm(1, channels), nn.InstanceNorm2d(channels, affine=True, eps=1e-2)]
    return rng.choice([nn.BatchNorm2d(channels, affine=rng.random() < 0.8)] * 4 + others)


def image_part(rng: random.Random, channels: int) -> Made:
    wide = rng.choice(WIDTHS)
    squeeze = nn.Sequential(nn.Linear(channels, 3), nn.ReLU(), nn.Linear(3, channels), nn.Sigmoid())
    pools = [
        nn.MaxPool2d(2, 2, ceil_mode=True), nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(3, 2, 1, 2),
        nn.AdaptiveAvgPool2d((3, 2)), nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        nn.AvgPool2d(3, 2, 1, divisor_override=4),
    ]  # fmt: skip
    same = _conv(rng, channels, channels, is_same=True)
    residual = nn.Sequential(same, _image_norm(rng, channels), _activation(rng), nn.Conv2d(channels, channels, 1))
    return rng.choice([
        *[(_conv(rng, channels, wide), wide)] * 5,
        *[(_image_norm(rng, channels), channels), (_activation(rng), channels), (rng.choice(pools), channels)] * 2,
        *[(Part(lambda x, f, act: act(x + f(x)), residual, _activation(rng)), channels)] * 3,
        *[(Part(lambda x, f: torch.cat((x, f(x)), 1), nn.Conv2d(channels, wide, 3, padding=1)), channels + wide)] * 2,
        *[(Part(rng.choice(ANYWHERE)), channels)] * 3,
        (Part(lambda x, f: x * f(x).sigmoid(), same), channels),
        (Part(lambda x, f: x * f(x.mean((2, 3)))[:, :, None, None], squeeze), channels),
        (nn.ConvTranspose2d(channels, wide, 2, 2), wide),
    ])  # fmt: skip


def _heads(rng: random.Random, width: int) -> nn.Module:
    n_heads, is_causal = rng.choice([1, 2]), rng.random() < 0.5

    def attend(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module, out: nn.Module) -> Tensor:
        parts = (f(x).unflatten(-1, (n_heads, -1)).transpose(1, 2) for f in (q, k, v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if is_causal else None
        return out(F.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2).flatten(2))

    return Part(attend, *(nn.Linear(width, width) for _ in range(4)))


def sequence_part(rng: random.Random, width: int) -> Made:
    wide, two_ways = rng.choice(WIDTHS), rng.random() < 0.4
    lstm = nn.LSTM(width, wide, rng.choice([1, 2]), batch_first=True, bidirectional=two_ways, bias=rng.random() < 0.8)
    residual = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), _activation(rng), nn.Linear(wide, width))
    encoder = nn.TransformerEncoderLayer(width, 2, wide, batch_first=True, norm_first=rng.random() < 0.5)
    norm = nn.LayerNorm(width, elementwise_affine=rng.random() < 0.8, eps=rng.choice([1e-5, 1e-2]))
    return rng.choice([
        *[(nn.Linear(width, wide, bias=rng.random() < 0.8), wide)] * 3,
        *[(_activation(rng), width), (norm, width), (Part(rng.choice(ANYWHERE)), width)] * 2,
        *[(_heads(rng, width), width), (Part(lambda x, f: x + f(x), residual), width)] * 2,
        *[(Part(lambda x, f: f(x)[0], lstm), wide * (1 + two_ways))] * 2,
        (encoder, width),
        (Part(lambda x, f: f(x)[0], nn.GRU(width, wide, batch_first=True)), wide),
        (Part(lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), nn.Conv1d(width, wide, 3, padding=2)), wide),
        (Part(lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), nn.BatchNorm1d(width)), width),
        (Part(lambda x: x.cumsum(1) / x.shape[1]), width),
    ])  # fmt: skip


def flat_part(rng: random.Random, width: int) -> Made:
    wide = rng.choice((3, 5, 10, 16, 24))
    normed = nn.Sequential(nn.Linear(width, wide), nn.BatchNorm1d(wide), _activation(rng))
    residual = nn.Sequential(nn.Linear(width, wide), _activation(rng), nn.Linear(wide, width))
    return rng.choice([
        *[(nn.Linear(width, wide, bias=rng.random() < 0.8), wide), (normed, wide)] * 3,
        *[(_activation(rng), width), (Part(rng.choice(ANYWHERE)), width)] * 3,
        (nn.LayerNorm(width), width),
        (Part(lambda x, f, act: act(f(x) + x), residual, _activation(rng)), width),
        (Part(lambda x, f: torch.cat((f(x), x), 1), nn.Linear(width, wide)), width + wide),
        (Part(lambda x: torch.softmax(x @ x.T / x.shape[1], -1) @ x), width),  # inputs meet
        (Part(lambda x, f: F.linear(f(x), f.weight.T.contiguous()), nn.Linear(width, wide)), width),
    ])  # fmt: skip


def lone_part(rng: random.Random, form: str, width: int) -> Made:
    """A part that treats each input by itself, and may take a number from the size of the batch."""
    wide = rng.choice(WIDTHS)

    def product(n_out: int) -> nn.Module:
        return nn.Linear(width, n_out) if form == "flat" else nn.Conv2d(width, n_out, 3, padding=1)

    return rng.choice([
        *[(product(wide), wide), (Part(rng.choice(ANYWHERE[:N_OF_BATCH])), width)] * 2,
        (Part(lambda x, f: (x + f(x)).relu(), product(width)), width),
        (Part(lambda x, f: torch.cat((x, f(x)), 1), product(wide)), width + wide),
        (rng.choice((nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.LeakyReLU, nn.ELU))(), width),
    ])  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """A network, and the inputs it is called with, in turn."""

    net: nn.Module
    inputs: list[Tensor]
    scale: float


def trial(seed: int, *, most_parts: int = 5) -> Trial:
    """The network of this seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    form = rng.choice(["image", "image", "sequence", "flat"])
    is_lone = seed % 4 == 3 and form != "sequence"  # networks that go through in chunks
    width = first = rng.choice((3, 4, 8)) if form == "image" else rng.choice(WIDTHS)
    make = {"image": image_part, "sequence": sequence_part, "flat": flat_part}[form]
    parts = []
    for _ in range(rng.randint(1, most_parts)):
        part, width = lone_part(rng, form, width) if is_lone else make(rng, width)
        parts.append(part)
    if form != "flat" and not is_lone and rng.random() < 0.7:
        over: Any = (2, 3) if form == "image" else 1
        parts += [Part(lambda x: x.mean(over)), flat_part(rng, width)[0]]
    net = Chain(parts, rng.choice(["plain", "plain", "plain", "pair", "dict"]), rng.randrange(len(parts)))
    _thin(net, rng.choice([1.0, 0.6, 0.3, 0.1, 0.05, 0.02]))
    scale = rng.choice([1.0] * 6 + [1e-4, 1e-6, 1e3, 1e20, 1e38])
    sizes = [rng.choice([32, 48, 64] if is_lone else [1, 2, 3, 5, 7, 8, 13, 16, 32]) for _ in range(rng.choice([1, 2]))]
    return Trial(net.eval(), [_input(rng, form, first, n, scale) for n in [*sizes, sizes[0]]], scale)


def _input(rng: random.Random, form: str, width: int, n: int, scale: float) -> Tensor:
    shape = {
        "image": (n, width, rng.choice([5, 7, 8]), rng.choice([5, 6, 8, 11])),
        "sequence": (n, rng.choice([1, 2, 5, 8, 16, 20]), width),
        "flat": (n, width),
    }[form]
    x = (torch.randn(shape) * scale).clamp(-3e38, 3e38)
    return x.contiguous(memory_format=torch.channels_last) if form == "image" and rng.random() < 0.2 else x


def _thin(net: nn.Module, keep: float) -> None:
    """Keeps about this share of the weights, at random places; norms have seen data."""
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand(parameter.shape) < keep)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        for module in net.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.copy_(0.3 * torch.randn(module.running_mean.shape))
                module.running_var.copy_(0.5 + torch.rand(module.running_var.shape))
