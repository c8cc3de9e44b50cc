"""Residual networks (He et al. 2016) for 32 x 32 images and for ImageNet, and pre-activation WideResNet.

Those for ImageNet have the parameter names of published checkpoints, and as there, the 3 x 3 convolution of a
bottleneck block has the stride.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 64)  # channels of the three stages for 32 x 32 images; a wide network multiplies them
WIDE_STEM = 16
IMAGENET_STEM = 64
IMAGENET_WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # output channels / width of a bottleneck block

Block = Callable[[int, int, int], nn.Module]  # input channels, width, stride


class SubsampleAndPad(nn.Module):
    """Parameter-free shortcut (option A): every second pixel, with zero channels added on both sides."""

    def __init__(self, n_pad: int) -> None:
        super().__init__()
        self.n_pad = n_pad

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.n_pad, self.n_pad))


def projection(n_in: int, n_out: int, stride: int) -> nn.Sequential | None:
    """The 1 x 1 convolution and norm of a shortcut; None if the shapes already match."""
    if stride == 1 and n_in == n_out:
        return None
    return nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False), nn.BatchNorm2d(n_out))


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x)); without a shortcut, x itself."""

    def __init__(self, n_in: int, width: int, stride: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu2(out + (x if self.downsample is None else self.downsample(x)))


def padded_block(n_in: int, width: int, stride: int) -> BasicBlock:
    """A block with a parameter-free shortcut."""
    return BasicBlock(n_in, width, stride, None if stride == 1 else SubsampleAndPad((width - n_in) // 2))


def projected_block(n_in: int, width: int, stride: int) -> BasicBlock:
    """A block with a projection where shapes change."""
    return BasicBlock(n_in, width, stride, projection(n_in, width, stride))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride) and 1 x 1 convolutions and a shortcut."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = width * EXPANSION
        self.conv1 = nn.Conv2d(n_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, n_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(n_out)
        self.downsample = projection(n_in, n_out, stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu3(out + (x if self.downsample is None else self.downsample(x)))


class PreActBlock(nn.Module):
    """conv(relu(bn(conv(relu(bn(x)))))) + shortcut; a projection shortcut applies to relu(bn(x))."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(n_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        fits = n_in == n_out and stride == 1
        self.projection = None if fits else nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.relu1(self.bn1(x))
        out = self.conv2(self.relu2(self.bn2(self.conv1(active))))
        shortcut = x if self.projection is None else self.projection(active)
        return out + shortcut


class CifarResNet(nn.Module):
    """Depth 6 n_blocks + 2, with parameter-free shortcuts (He et al. 2016, section 4.2, option A)."""

    def __init__(self, n_blocks: int, n_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU()
        self.layer1 = _stage(padded_block, WIDTHS[0], WIDTHS[0], n_blocks, stride=1)
        self.layer2 = _stage(padded_block, WIDTHS[0], WIDTHS[1], n_blocks, stride=2)
        self.layer3 = _stage(padded_block, WIDTHS[1], WIDTHS[2], n_blocks, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(WIDTHS[2], n_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        return self.linear(torch.flatten(self.pool(out), 1))


class WideResNet(nn.Module):
    """WideResNet without dropout (Zagoruyko and Komodakis 2016), of depth 6 n_blocks + 4."""

    def __init__(self, n_blocks: int, factor: int, n_classes: int) -> None:
        super().__init__()
        first, second, third = (width * factor for width in WIDTHS)
        self.conv1 = nn.Conv2d(3, WIDE_STEM, 3, padding=1, bias=False)
        self.layer1 = _stage(PreActBlock, WIDE_STEM, first, n_blocks, stride=1)
        self.layer2 = _stage(PreActBlock, first, second, n_blocks, stride=2)
        self.layer3 = _stage(PreActBlock, second, third, n_blocks, stride=2)
        self.bn = nn.BatchNorm2d(third)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(third, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        out = self.relu(self.bn(out))
        return self.linear(torch.flatten(self.pool(out), 1))


class ImageNetResNet(nn.Module):
    """Logits N x n_classes for images N x 3 x 224 x 224 (any size from 32 up works); table 1 of He et al."""

    def __init__(self, block: Block, expansion: int, n_blocks: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        stages, n_in = [], IMAGENET_STEM
        for i, (width, count) in enumerate(zip(IMAGENET_WIDTHS, n_blocks)):
            stages.append(_stage(block, n_in, width, count, stride=1 if i == 0 else 2, expansion=expansion))
            n_in = width * expansion
        self.conv1 = nn.Conv2d(3, IMAGENET_STEM, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(IMAGENET_STEM)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(n_in, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return self.fc(torch.flatten(self.avgpool(out), 1))


def _stage(block: Block, n_in: int, width: int, n_blocks: int, *, stride: int, expansion: int = 1) -> nn.Sequential:
    others = (block(width * expansion, width, 1) for _ in range(n_blocks - 1))
    return nn.Sequential(block(n_in, width, stride), *others)
