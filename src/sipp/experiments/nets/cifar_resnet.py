"""CIFAR ResNets of depth 6n + 2 (He et al. 2016, section 4.2) with parameter-free shortcuts (option A)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 64)  # filters of the three stages


class SubsampleAndPad(nn.Module):
    """Every second pixel of the input, with zero channels added on both sides: option A, no parameters."""

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
    """Logits N x n_classes for images N x 3 x 32 x 32; its depth is 6 n_blocks + 2."""

    def __init__(self, n_blocks: int, n_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU()
        self.layer1 = _stage(WIDTHS[0], WIDTHS[0], n_blocks, stride=1)
        self.layer2 = _stage(WIDTHS[0], WIDTHS[1], n_blocks, stride=2)
        self.layer3 = _stage(WIDTHS[1], WIDTHS[2], n_blocks, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(WIDTHS[2], n_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        return self.linear(torch.flatten(self.pool(out), 1))


def _stage(n_in: int, n_out: int, n_blocks: int, *, stride: int) -> nn.Sequential:
    first = BasicBlock(n_in, n_out, stride)
    return nn.Sequential(first, *(BasicBlock(n_out, n_out, 1) for _ in range(n_blocks - 1)))
