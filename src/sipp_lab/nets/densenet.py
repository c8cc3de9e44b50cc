"""DenseNet22: the DenseNet-BC of depth 22 and growth 12 for 32 x 32 images (Huang et al. 2017)."""

import torch
from torch import Tensor, nn

N_BLOCKS = 3
BOTTLENECK = 4  # the 1 x 1 convolution gives BOTTLENECK * growth channels
STEM_GROWTHS = 2  # the first convolution gives STEM_GROWTHS * growth channels
COMPRESSION = 2  # a transition keeps 1 / COMPRESSION of the channels


class Unit(nn.Module):
    """Appends `growth` new channels to its input."""

    def __init__(self, n_in: int, growth: int) -> None:
        super().__init__()
        n_mid = BOTTLENECK * growth
        self.bn1 = nn.BatchNorm2d(n_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(n_in, n_mid, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_mid)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(n_mid, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(self.relu1(self.bn1(x)))
        new = self.conv2(self.relu2(self.bn2(new)))
        return torch.cat((x, new), dim=1)


def _transition(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(n_in),
        nn.ReLU(),
        nn.Conv2d(n_in, n_out, 1, bias=False),
        nn.AvgPool2d(2),
    )


class DenseNet(nn.Module):
    """Logits N x n_classes for images N x 3 x 32 x 32; its depth is 6 n_units + 4."""

    def __init__(self, n_units: int, growth: int, n_classes: int) -> None:
        super().__init__()
        n_channels = STEM_GROWTHS * growth
        self.conv1 = nn.Conv2d(3, n_channels, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        for block in range(N_BLOCKS):
            blocks.append(nn.Sequential(*(Unit(n_channels + i * growth, growth) for i in range(n_units))))
            n_channels += n_units * growth
            if block < N_BLOCKS - 1:
                blocks.append(_transition(n_channels, n_channels // COMPRESSION))
                n_channels //= COMPRESSION
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(n_channels)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(n_channels, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn(self.blocks(self.conv1(x))))
        return self.linear(torch.flatten(self.pool(out), 1))
