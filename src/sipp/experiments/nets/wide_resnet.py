"""WRN16-8: the wide residual network of depth 16 and width factor 8 (Zagoruyko and Komodakis 2016), no dropout."""

import torch
from torch import Tensor, nn

STEM_WIDTH = 16
WIDTHS = (16, 32, 64)  # before the width factor


class PreActBlock(nn.Module):
    """conv(relu(bn(conv(relu(bn(x)))))) + shortcut; a projection, where there is one, meets relu(bn(x))."""

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
    """Logits N x n_classes for images N x 3 x 32 x 32; its depth is 6 n_blocks + 4, projections counted."""

    def __init__(self, n_blocks: int, factor: int, n_classes: int) -> None:
        super().__init__()
        first, second, third = (width * factor for width in WIDTHS)
        self.conv1 = nn.Conv2d(3, STEM_WIDTH, 3, padding=1, bias=False)
        self.layer1 = _stage(STEM_WIDTH, first, n_blocks, stride=1)
        self.layer2 = _stage(first, second, n_blocks, stride=2)
        self.layer3 = _stage(second, third, n_blocks, stride=2)
        self.bn = nn.BatchNorm2d(third)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(third, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        out = self.relu(self.bn(out))
        return self.linear(torch.flatten(self.pool(out), 1))


def _stage(n_in: int, n_out: int, n_blocks: int, *, stride: int) -> nn.Sequential:
    first = PreActBlock(n_in, n_out, stride)
    return nn.Sequential(first, *(PreActBlock(n_out, n_out, 1) for _ in range(n_blocks - 1)))
