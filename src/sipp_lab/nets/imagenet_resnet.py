"""ImageNet ResNets (He et al. 2016, table 1) with the parameter names of published checkpoints.

As in those checkpoints, the 3 x 3 convolution of a bottleneck block has the stride.
"""

import torch
from torch import Tensor, nn

STEM_WIDTH = 64
WIDTHS = (64, 128, 256, 512)


def _projection(n_in: int, n_out: int, stride: int) -> nn.Sequential | None:
    """The 1 x 1 convolution and norm of the shortcut; None if the shapes already match."""
    if stride == 1 and n_in == n_out:
        return None
    return nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False), nn.BatchNorm2d(n_out))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    expansion = 1  # output channels / width

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(n_in, width, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu2(out + shortcut)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 (with the stride) and 1 x 1 convolutions and a shortcut."""

    expansion = 4

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = width * self.expansion
        self.conv1 = nn.Conv2d(n_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, n_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(n_out)
        self.downsample = _projection(n_in, n_out, stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.bn1(self.conv1(x)))
        out = self.relu2(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu3(out + shortcut)


class ImageNetResNet(nn.Module):
    """Logits N x n_classes for images N x 3 x 224 x 224 (any size from 32 up works)."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], n_blocks: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        stages, n_in = [], STEM_WIDTH
        for i, (width, count) in enumerate(zip(WIDTHS, n_blocks)):
            n_out = width * block.expansion
            first = block(n_in, width, 1 if i == 0 else 2)
            stages.append(nn.Sequential(first, *(block(n_out, width, 1) for _ in range(count - 1))))
            n_in = n_out
        self.conv1 = nn.Conv2d(3, STEM_WIDTH, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(n_in, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        return self.fc(torch.flatten(self.avgpool(out), 1))
