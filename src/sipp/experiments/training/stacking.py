"""Stacks P networks of one architecture into one module, as P groups of channels.

Images are N x (P C) x H x W, logits N x (P classes). Parameters and buffers keep their names, with an extra leading
axis. Convolutions are written for what cuDNN does well: it has fast grouped kernels for stride 1 and at least
`WELL_GROUPED` channels per network; otherwise it runs one group after another, which would defeat the purpose.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.experiments.nets.cifar_resnet import SubsampleAndPad
from sipp.pruning.masking import release

WELL_GROUPED = 16  # channels per network; images have fewer and are padded

# Modules that treat every channel or value separately, so they also work on stacked networks.
CHANNELWISE = (
    nn.ReLU,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.Flatten,
    nn.Identity,
)


class StackedConv(nn.Module):
    """The convolutions of P networks as a grouped convolution.

    Images may have more channels than the weights; these are ignored.
    """

    def __init__(self, convs: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        first = convs[0]
        stacked = torch.stack([conv.weight.detach() for conv in convs])  # P O C K K, channels innermost in memory
        self.weight = nn.Parameter(stacked.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3))
        biases = [conv.bias.detach() for conv in convs if conv.bias is not None]
        self.bias = nn.Parameter(torch.stack(biases)) if biases else None
        self.stride, self.padding = int(first.stride[0]), int(first.padding[0])

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        n_nets = len(weight)
        if lacking := x.shape[1] // n_nets - weight.shape[2]:  # zero weights
            weight = F.pad(weight, (0, 0, 0, 0, 0, lacking))
        bias = None if self.bias is None else self.bias.flatten()
        if self.stride == 1:
            return F.conv2d(x, weight.flatten(0, 1), bias, padding=self.padding, groups=n_nets)
        y = _by_patches(x, weight, self.stride, self.padding)
        return y if bias is None else y + bias[:, None, None]


def _by_patches(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution as a batched product of patches and weights, which is faster for strides above 1."""
    n_nets, n_out, n_in, side, _ = weight.shape
    height, width = ((size + 2 * padding - side) // stride + 1 for size in x.shape[2:])
    apart = F.pad(x, (padding,) * 4).permute(0, 2, 3, 1).unflatten(3, (n_nets, n_in))  # N H W P C
    rows, columns = (slice(0, stride * (size - 1) + 1, stride) for size in (height, width))
    taps = [apart[:, i:, j:][:, rows, columns] for i in range(side) for j in range(side)]
    patches = torch.stack(taps, 4).flatten(4).flatten(0, 2).transpose(0, 1)  # P, N H W, K K C
    y = torch.bmm(patches, weight.permute(0, 3, 4, 2, 1).reshape(n_nets, -1, n_out))
    return y.transpose(0, 1).reshape(len(x), height, width, -1).permute(0, 3, 1, 2)


class StackedNorm(nn.Module):
    """The BatchNorms of P networks as one with P times the channels."""

    def __init__(self, norms: Sequence[nn.BatchNorm2d]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([norm.weight.detach() for norm in norms]))
        self.bias = nn.Parameter(torch.stack([norm.bias.detach() for norm in norms]))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, torch.stack([getattr(norm, name) for norm in norms]))
        if (momentum := norms[0].momentum) is None:
            raise ModelError("a BatchNorm without momentum cannot be trained side by side", fix="set train.together=1")
        self.momentum, self.eps = momentum, norms[0].eps

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.running_mean, Tensor) and isinstance(self.running_var, Tensor)
        if self.training:
            assert isinstance(self.num_batches_tracked, Tensor)
            self.num_batches_tracked.add_(1)
        mean, variance = self.running_mean.view(-1), self.running_var.view(-1)
        scale, shift = self.weight.view(-1), self.bias.view(-1)
        return F.batch_norm(x, mean, variance, scale, shift, self.training, self.momentum, self.eps)


class StackedLinear(nn.Module):
    """The linear layers of P networks, N x (P C) to N x (P O)."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))  # P O C
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.stack(biases)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("npc,poc->npo", x.unflatten(1, (len(self.weight), -1)), self.weight)
        return (y if self.bias is None else y + self.bias).flatten(1)


class StackedPad(nn.Module):
    """`SubsampleAndPad` for P networks: pads the channels of each."""

    def __init__(self, n_nets: int, n_pad: int) -> None:
        super().__init__()
        self.n_nets, self.n_pad = n_nets, n_pad

    def forward(self, x: Tensor) -> Tensor:
        apart = x[:, :, ::2, ::2].unflatten(1, (self.n_nets, -1))
        return F.pad(apart, (0, 0, 0, 0, self.n_pad, self.n_pad)).flatten(1, 2)


def stack(models: Sequence[nn.Module]) -> nn.Module:
    """One module that runs all of them: images N x (P C) x H x W in, logits N x (P classes) out."""
    stacked = copy.deepcopy(models[0])
    release(stacked)  # the program applies the masks
    for path, module in models[0].named_modules():
        if any(True for _ in module.children()) or isinstance(module, CHANNELWISE):
            continue
        together = _stack_modules([model.get_submodule(path) for model in models], path)
        parent, _, name = path.rpartition(".")
        setattr(stacked.get_submodule(parent), name, together)
    return stacked


def _stack_modules(modules: Sequence[nn.Module], path: str) -> nn.Module:
    """One module that replaces those of all members at the same path."""
    first = modules[0]
    if isinstance(first, nn.Conv2d) and first.groups == 1 and first.dilation == (1, 1):
        return StackedConv([module for module in modules if isinstance(module, nn.Conv2d)])
    if isinstance(first, nn.BatchNorm2d):
        return StackedNorm([module for module in modules if isinstance(module, nn.BatchNorm2d)])
    if isinstance(first, nn.Linear):
        return StackedLinear([module for module in modules if isinstance(module, nn.Linear)])
    if isinstance(first, SubsampleAndPad):
        return StackedPad(len(modules), first.n_pad)
    raise ModelError(f"{path}: a {type(first).__name__} cannot be trained side by side", fix="set train.together=1")
