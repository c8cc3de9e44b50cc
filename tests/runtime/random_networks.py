"""Random networks of everything people put in one: a seed in, a network, its inputs and what is done to it out.

Three forms of value go through a network: images N x C x H x W, sequences N x T x F, and flat points N x F. A part
takes one form and gives one; parts hold for every batch size, those of images and sequences for every size of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (4, 6, 8, 12)
ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU, nn.ReLU6, nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU,
    nn.SELU, nn.CELU, nn.Mish, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Tanhshrink,
    nn.LogSigmoid, nn.Softshrink, nn.PReLU, lambda: nn.Softmax(-1), lambda: nn.LogSoftmax(1),
]  # fmt: skip


class Part(nn.Module):
    """A function of the modules it is made with and a value."""

    def __init__(self, name: str, forward: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.name, self.function, self.inner = name, forward, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.inner)

    def extra_repr(self) -> str:
        return self.name


class Held(nn.Module):
    """A parameter as a module."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape))


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


# Numbers that a forward pass takes from shapes: each is a function of a value of any form
NUMBERS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("x / n", lambda x: x * (1 / x.shape[0])),
    ("alpha of n", lambda x: torch.add(x, x.tanh(), alpha=1 / x.shape[0])),
    ("sub alpha of n", lambda x: torch.sub(x, x.sigmoid(), alpha=x.shape[0] / 8)),
    ("slope of n", lambda x: F.leaky_relu(x, 1 / x.shape[0])),
    ("clip at n", lambda x: F.hardtanh(x, -8 / x.shape[0], 8 / x.shape[0])),
    ("clamp at n", lambda x: x.clamp(-8 / x.shape[0], 2)),
    ("elu of n", lambda x: F.elu(x, 4 / x.shape[0])),
    ("first of n", lambda x: torch.cat((x[:, : 1 + x.shape[0] % 3], x), 1)[:, 1 + x.shape[0] % 3 :]),
    ("pad by n", lambda x: F.pad(x, (x.shape[0] % 3, 0))[..., x.shape[0] % 3 :]),
    ("over the root of the last size", lambda x: x / x.shape[-1] ** 0.5),
    ("full of n", lambda x: x + torch.full((x.shape[1],) + (1,) * (x.ndim - 2), 1 / x.shape[0])),
    ("tensor of n", lambda x: x * torch.tensor(2.0 / x.shape[0])),
    ("number of values", lambda x: x * (x.numel() % 5 - 1.5)),
]
# Functions of a value of any form that keep its shape
SAME: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("minus the mean of points", lambda x: x - x.mean(0, keepdim=True)),
    ("normalised", lambda x: F.normalize(x, dim=1)),
    ("turned", lambda x: x.flip(-1)),
    ("rolled", lambda x: torch.roll(x, 1, 1)),
    ("cut and joined", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1)),
    ("viewed", lambda x: x.contiguous().view(x.shape[0], -1).view(x.shape)),
    ("reshaped", lambda x: x.reshape(-1).reshape(x.shape)),
    ("turned around and back", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    ("squared", lambda x: x * x * 0.1),
    ("plus itself", lambda x: x + x),
    ("times its gate", lambda x: x * x.sigmoid()),
    ("as it lies", lambda x: x.as_strided(x.shape, x.stride()) * 2),
    ("every point but the first twice", lambda x: torch.where(x > 0, x, 0.5 * x)),
    ("written in place", lambda x: x.clone().mul_(2).add_(1)),
    ("max of both", lambda x: torch.maximum(x, -0.3 * x)),
    ("log of sigmoid", lambda x: (x.sigmoid() + 1e-6).log()),
    ("smallest and largest", lambda x: x - x.amin(1, keepdim=True) + x.amax(-1, keepdim=True)),
    ("stacked", lambda x: torch.stack((x, x.relu())).sum(0)),
]


def _pick(rng: random.Random, table: list[tuple[str, Callable[[Tensor], Tensor]]]) -> Part:
    return Part(*rng.choice(table))


def _activation(rng: random.Random) -> nn.Module:
    return rng.choice(ACTIVATIONS)()


def _conv(rng: random.Random, channels: int, wide: int, *, is_same: bool = False) -> nn.Module:
    groups = rng.choice([g for g in (1, 1, 2, 4) if channels % g == 0 and wide % g == 0])
    kernel = rng.choice([(1, 1), (3, 3), (3, 3), (5, 5), (3, 1), (1, 5)])
    dilation = rng.choice([1, 1, 2]) if kernel != (5, 5) else 1
    padding: Any = tuple(dilation * (k - 1) // 2 for k in kernel)
    stride: Any = 1
    if not is_same:
        stride = rng.choice([1, 1, 2, (1, 2), 3])
        padding = rng.choice([padding, tuple(p + 1 for p in padding)])
        if stride == 1 and rng.random() < 0.2:
            padding = "same"
    mode = rng.choice(["zeros"] * 5 + ["circular", "reflect", "replicate"])
    return nn.Conv2d(channels, wide, kernel, stride, padding, dilation, groups, rng.random() < 0.8, mode)


def _standardised(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """A convolution whose weights are standardised in the forward pass."""
    rows = conv.weight.view(conv.weight.shape[0], -1)
    weight = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 0.1)
    return F.conv2d(x, weight.view(conv.weight.shape), conv.bias, padding=1)


def _image_norm(rng: random.Random, channels: int) -> nn.Module:
    kind = rng.choice(["batch"] * 4 + ["group", "instance", "layer", "response"])
    if kind == "batch":
        return nn.BatchNorm2d(channels, affine=rng.random() < 0.8, eps=rng.choice([1e-5, 1e-3]))
    if kind == "group":
        return nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)
    if kind == "instance":
        return nn.InstanceNorm2d(channels, affine=True, track_running_stats=rng.random() < 0.5, eps=1e-2)
    if kind == "response":
        return nn.LocalResponseNorm(2)
    return Part("layer norm of channels", lambda x, norm: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
                nn.LayerNorm(channels))  # fmt: skip


def image_part(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    """A part that takes images of so many channels and gives images; and how many channels these have."""
    wide = rng.choice(WIDTHS)
    kind = rng.choice(
        ["conv"] * 6 + ["norm"] * 3 + ["act"] * 4 + ["residual"] * 3 + ["cat", "cat", "gate", "squeeze", "pool", "pool"]
        + ["number", "number", "same", "same", "broadcast", "standard", "up", "turn", "transposed", "shuffle"]
    )  # fmt: skip
    if kind == "conv":
        return _conv(rng, channels, wide), wide
    if kind == "residual":
        first, second = _conv(rng, channels, wide, is_same=True), _conv(rng, wide, channels, is_same=True)
        inner = nn.Sequential(first, _image_norm(rng, wide), _activation(rng), second, _image_norm(rng, channels))
        after = _activation(rng)
        return Part("residual", lambda x, f, act: act(x + f(x)), inner, after), channels
    if kind == "cat":
        return Part(
            "cat", lambda x, f: torch.cat((x, f(x)), 1), _conv(rng, channels, wide, is_same=True)
        ), channels + wide
    if kind == "standard":
        return Part("standardised", _standardised, nn.Conv2d(channels, wide, 3)), wide
    if kind == "transposed":
        return nn.ConvTranspose2d(channels, wide, 2, 2), wide
    if kind == "shuffle" and channels % 4 == 0:
        return nn.PixelShuffle(2), channels // 4
    return _image_keeper(rng, kind, channels), channels


def _image_keeper(rng: random.Random, kind: str, channels: int) -> nn.Module:
    """A part that keeps the number of channels."""
    if kind == "norm":
        return _image_norm(rng, channels)
    if kind == "gate":
        return Part("gate", lambda x, f: x * f(x).sigmoid(), _conv(rng, channels, channels, is_same=True))
    if kind == "squeeze":
        inner = nn.Sequential(nn.Linear(channels, 3), nn.ReLU(), nn.Linear(3, channels), nn.Sigmoid())
        return Part("squeeze", lambda x, f: x * f(x.mean((2, 3)))[:, :, None, None], inner)
    if kind == "pool":
        return rng.choice([
            nn.MaxPool2d(2, 2, ceil_mode=True), nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(3, 2, 1, 2),
            nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d((3, 2)),
            nn.AdaptiveMaxPool2d(3), nn.AvgPool2d(3, 2, 1, divisor_override=4),
        ])  # fmt: skip
    if kind == "broadcast":
        shape = rng.choice([(), (channels, 1, 1), (1, channels, 1, 1), (1, 1, 1)])
        return Part("plus", lambda x, p: x + p.value, Held(*shape))
    if kind == "up":
        mode = rng.choice(["nearest", "bilinear"])
        return Part("up", lambda x: F.interpolate(x, scale_factor=2, mode=mode))
    if kind == "turn":
        return Part("turned around", lambda x: x.transpose(2, 3))
    table = {"number": NUMBERS, "same": SAME}.get(kind)
    return _activation(rng) if table is None else _pick(rng, table)


def _rotary(x: Tensor, linear: nn.Linear) -> Tensor:
    """Rotary embeddings as most people write them."""
    y = linear(x)
    pairs = torch.view_as_complex(y.float().reshape(*y.shape[:-1], -1, 2)) if y.dtype == torch.float32 else (
        torch.view_as_complex(y.reshape(*y.shape[:-1], -1, 2)))  # fmt: skip
    n_tokens, n_pairs = pairs.shape[1:]
    angle = torch.outer(torch.arange(n_tokens, dtype=y.dtype), torch.arange(1, n_pairs + 1, dtype=y.dtype) / n_pairs)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(2)


def _heads(rng: random.Random, width: int) -> Part:
    n_heads, is_causal = rng.choice([1, 2]), rng.random() < 0.5
    scale = rng.choice([None, 0.3])

    def attend(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module, out: nn.Module) -> Tensor:
        parts = (f(x).unflatten(-1, (n_heads, -1)).transpose(1, 2) for f in (q, k, v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if is_causal else None
        return out(F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale).transpose(1, 2).flatten(2))

    return Part("heads", attend, *(nn.Linear(width, width) for _ in range(4)))


def sequence_part(rng: random.Random, width: int) -> tuple[nn.Module, int]:
    """A part that takes sequences of so many features and gives sequences; and how many features these have."""
    wide = rng.choice(WIDTHS)
    kind = rng.choice(
        ["linear"] * 4 + ["act"] * 3 + ["norm"] * 2 + ["residual"] * 2 + ["encoder", "heads", "heads", "lstm", "lstm"]
        + ["gru", "conv", "conv", "rotary", "number", "number", "same", "same", "glu", "sum", "place", "batch"]
    )  # fmt: skip
    if kind == "linear":
        return nn.Linear(width, wide, bias=rng.random() < 0.8), wide
    if kind == "residual":
        inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), _activation(rng), nn.Linear(wide, width))
        return Part("residual", lambda x, f: x + f(x), inner), width
    if kind == "encoder":
        act = rng.choice(["relu", "gelu"])
        return nn.TransformerEncoderLayer(
            width, 2, wide, activation=act, batch_first=True, norm_first=rng.random() < 0.5
        ), width
    if kind in ("lstm", "gru"):
        two_ways = rng.random() < 0.4
        layer = (nn.LSTM if kind == "lstm" else nn.GRU)(
            width, wide, rng.choice([1, 2]), batch_first=True, bidirectional=two_ways, bias=rng.random() < 0.8
        )
        return Part(kind, lambda x, f: f(x)[0], layer), wide * (2 if two_ways else 1)
    if kind == "conv":
        groups = rng.choice([g for g in (1, 1, 2) if width % g == 0 and wide % g == 0])
        mode = rng.choice(["zeros", "zeros", "circular", "replicate"])
        conv = nn.Conv1d(width, wide, 3, rng.choice([1, 1, 2]), 2, rng.choice([1, 2]), groups, padding_mode=mode)
        return Part("conv", lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), conv), wide
    if kind == "rotary":
        return Part("rotary", _rotary, nn.Linear(width, width - width % 2)), width - width % 2
    if kind == "glu":
        return Part("glu", lambda x, f: F.glu(f(x)), nn.Linear(width, 2 * wide)), wide
    return _sequence_keeper(rng, kind, width), width


def _sequence_keeper(rng: random.Random, kind: str, width: int) -> nn.Module:
    """A part that keeps the number of features."""
    if kind == "norm":
        return nn.LayerNorm(width, elementwise_affine=rng.random() < 0.8, eps=rng.choice([1e-5, 1e-2]))
    if kind == "heads":
        return _heads(rng, width)
    if kind == "sum":
        return Part("sum so far", lambda x: x.cumsum(1) / x.shape[1])
    if kind == "place":
        return Part("place", lambda x, p: x + p.value[: x.shape[1]], Held(64, width))
    if kind == "batch":
        return Part("batch norm", lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), nn.BatchNorm1d(width))
    table = {"number": NUMBERS, "same": SAME}.get(kind)
    return _activation(rng) if table is None else _pick(rng, table)


def flat_part(rng: random.Random, width: int) -> tuple[nn.Module, int]:
    """A part that takes flat points of so many features and gives such."""
    wide = rng.choice((3, 5, 10, 16, 24))
    kind = rng.choice(
        ["linear"] * 5 + ["act"] * 3 + ["batch"] * 3 + ["norm", "residual", "cat", "number", "number", "same", "same"]
        + ["outer", "points", "shared"]
    )  # fmt: skip
    if kind == "linear":
        return nn.Linear(width, wide, bias=rng.random() < 0.8), wide
    if kind == "batch":
        return nn.Sequential(nn.Linear(width, wide), nn.BatchNorm1d(wide), _activation(rng)), wide
    if kind == "cat":
        return Part("cat", lambda x, f: torch.cat((f(x), x), 1), nn.Linear(width, wide)), width + wide
    if kind == "outer":
        return Part("outer", lambda x, f: (f(x)[:, :, None] * x[:, None, :3]).flatten(1), nn.Linear(width, 3)), 3 * min(
            3, width
        )
    return _flat_keeper(rng, kind, width, wide), width


def _flat_keeper(rng: random.Random, kind: str, width: int, wide: int) -> nn.Module:
    if kind == "norm":
        return nn.LayerNorm(width)
    if kind == "residual":
        inner = nn.Sequential(nn.Linear(width, wide), _activation(rng), nn.Linear(wide, width))
        return Part("residual", lambda x, f, act: act(f(x) + x), inner, _activation(rng))
    if kind == "points":
        return Part("points meet", lambda x: torch.softmax(x @ x.T / x.shape[1], -1) @ x)
    if kind == "shared":
        return Part("shared", lambda x, f: F.linear(f(x), f.weight.T.contiguous()), nn.Linear(width, wide))
    table = {"number": NUMBERS, "same": SAME}.get(kind)
    return _activation(rng) if table is None else _pick(rng, table)


def lone_part(rng: random.Random, form: str, width: int) -> tuple[nn.Module, int]:
    """A part that treats each point on its own, and may take a number from the size of the batch."""
    wide = rng.choice(WIDTHS)
    kind = rng.choice(["product", "product", "act", "residual", "cat", "number", "number"])

    def product(n_out: int) -> nn.Module:
        return nn.Linear(width, n_out) if form == "flat" else nn.Conv2d(width, n_out, 3, padding=1)

    if kind == "product":
        return product(wide), wide
    if kind == "residual":
        return Part("residual", lambda x, f: (x + f(x)).relu(), product(width)), width
    if kind == "cat":
        return Part("cat", lambda x, f: torch.cat((x, f(x)), 1), product(wide)), width + wide
    if kind == "number":
        return Part(*rng.choice(NUMBERS[:9])), width
    return rng.choice((nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.LeakyReLU, nn.ELU))(), width


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
    width = rng.choice((3, 4, 8)) if form == "image" else rng.choice(WIDTHS)
    first, parts = width, []
    make = {"image": image_part, "sequence": sequence_part, "flat": flat_part}[form]
    for _ in range(rng.randint(1, most_parts)):
        part, width = lone_part(rng, form, width) if is_lone else make(rng, width)
        parts.append(part)
    if form != "flat" and not is_lone and rng.random() < 0.7:
        parts, width = _flattened(rng, form, parts, width)
    net = Chain(parts, rng.choice(["plain", "plain", "plain", "pair", "dict"]), rng.randrange(len(parts)))
    _thin(net, rng.choice([1.0, 0.6, 0.3, 0.1, 0.05, 0.02]))
    scale = rng.choice([1.0] * 6 + [1e-4, 1e-6, 1e3, 1e20, 1e38])
    sizes = [_size(rng, form) for _ in range(rng.choice([1, 1, 2]))]
    if is_lone:
        sizes = [(rng.choice([32, 48, 64]), *size[1:]) for size in sizes]
    return Trial(net.eval(), [_input(rng, form, first, size, scale) for size in [*sizes, sizes[0]]], scale)


def _flattened(rng: random.Random, form: str, parts: list[nn.Module], width: int) -> tuple[list[nn.Module], int]:
    """With parts that make flat points of images or sequences, and a few more."""
    ends: list[tuple[nn.Module, int]] = [
        (Part("mean", lambda x: x.mean((2, 3))), width),
        (nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()), 4 * width),
        (Part("view", lambda x: F.adaptive_max_pool2d(x, 2).contiguous().view(x.shape[0], -1)), 4 * width),
    ]
    if form == "sequence":
        ends = [
            (Part("mean", lambda x: x.mean(1)), width), (Part("last", lambda x: x[:, -1]), width),
            (Part("largest", lambda x: x.max(1).values), width),
        ]  # fmt: skip
    end, width = rng.choice(ends)
    parts = [*parts, end]
    for _ in range(rng.choice([1, 1, 2])):
        part, width = flat_part(rng, width)
        parts.append(part)
    return parts, width


def _size(rng: random.Random, form: str) -> tuple[int, ...]:
    n = rng.choice([1, 2, 3, 5, 7, 8, 13, 16, 32, 48, 64])
    if form == "image":
        return n, rng.choice([5, 7, 8, 9]), rng.choice([5, 6, 8, 11])
    return (n, rng.choice([1, 2, 5, 8, 16, 20])) if form == "sequence" else (n,)


def _input(rng: random.Random, form: str, width: int, size: tuple[int, ...], scale: float) -> Tensor:
    shape = (size[0], width, *size[1:]) if form == "image" else (*size, width)
    x = torch.randn(shape) * scale
    if scale > 1e30:
        x = x.clamp(-3e38, 3e38)
    if form == "image" and rng.random() < 0.2:
        x = x.contiguous(memory_format=torch.channels_last)
    return x


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
