"""Residual networks for 32 x 32 images: ResNet (He et al.), and pre-activation WideResNet."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 64)  # channels of the three stages; a wide network multiplies them
WIDE_STEM = 16


class SubsampleAndPad(nn.Module):
    """Parameter-free shortcut (option A): every second pixel, with zero channels added on both sides."""

    def __init__(self, n_pad: int) -> None:
        super().__init__()
        self.n_pad = n_pad

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.n_pad, self.n_pad))


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.shortcut: nn.Module = nn.Identity() if stride == 1 else SubsampleAndPad((n_out - n_in) // 2)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu2(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """Depth 6 n_blocks + 2, with parameter-free shortcuts (He et al. 2016, section 4.2, option A)."""

    def __init__(self, n_blocks: int, n_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU()
        self.layer1 = _stage(BasicBlock, WIDTHS[0], WIDTHS[0], n_blocks, stride=1)
        self.layer2 = _stage(BasicBlock, WIDTHS[0], WIDTHS[1], n_blocks, stride=2)
        self.layer3 = _stage(BasicBlock, WIDTHS[1], WIDTHS[2], n_blocks, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(WIDTHS[2], n_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        return self.linear(torch.flatten(self.pool(out), 1))


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


def _stage(
    block: Callable[[int, int, int], nn.Module], n_in: int, n_out: int, n_blocks: int, *, stride: int
) -> nn.Sequential:
    return nn.Sequential(block(n_in, n_out, stride), *(block(n_out, n_out, 1) for _ in range(n_blocks - 1)))
