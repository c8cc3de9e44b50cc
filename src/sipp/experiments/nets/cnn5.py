"""CNN5: the five-layer convolutional network of the double-descent study (Nakkiran et al. 2020)."""

import torch
from torch import Tensor, nn

from sipp.experiments.nets.init import he_init_

MULTIPLES = (1, 2, 4, 8)  # channels of the four convolutions, in units of the width
POOLS = (1, 2, 2, 8)  # max-pool after each; 1 = none. 32 x 32 pixels become one
DIGITS_POOLS = (1, 2, 2, 2)  # and so do 8 x 8


class Cnn5(nn.Module):
    """Logits N x n_classes for images N x n_in x H x W whose pixels the pools make one of."""

    def __init__(self, width: int, n_classes: int, n_in: int, pools: tuple[int, ...]) -> None:
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


def cnn5(width: int, n_classes: int) -> Cnn5:
    """A He-initialised CNN5 for N x 3 x 32 x 32 whose first convolution has `width` filters."""
    net = Cnn5(width, n_classes, 3, POOLS)
    he_init_(net)
    return net


def digits_cnn5(width: int, n_classes: int) -> Cnn5:
    """The same for grey digits, N x 1 x 8 x 8."""
    net = Cnn5(width, n_classes, 1, DIGITS_POOLS)
    he_init_(net)
    return net
