"""CNN5: the five-layer convolutional network of the double-descent study (Nakkiran et al. 2020)."""

import torch
from torch import Tensor, nn

MULTIPLES = (1, 2, 4, 8)  # channels of the four convolutions, in units of the width
POOLS = (1, 2, 2, 8)  # max-pool after each; 1 = none. 32 x 32 pixels become one
DIGITS_POOLS = (1, 2, 2, 2)  # and so do 8 x 8


class Cnn5(nn.Module):
    """Logits N x n_classes for images N x n_in x H x W whose pixels the pools make one of."""

    def __init__(self, width: int, n_in: int, pools: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for multiple, pool in zip(MULTIPLES, pools):
            n_out = multiple * width
            layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]
            if pool > 1:
                layers.append(nn.MaxPool2d(pool))
            n_in = n_out
        self.features = nn.Sequential(*layers)
        self.linear = nn.Linear(n_in, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.flatten(self.features(x), 1))
