"""Networks without shortcuts: LeNets, small convolutional networks, VGG16, and an LSTM classifier."""

import torch
from torch import Tensor, nn

LENET5_KERNEL, LENET5_FILTERS, LENET5_HIDDEN = 5, (20, 50), 500
LENET5_LAST_SIDE = 4  # 28 -> 24 -> 12 -> 8 -> 4
DIGITS_WIDTHS = (16, 32, 64)
CNN5_MULTIPLES = (1, 2, 4, 8)  # channels of the four convolutions, in units of the width
CNN5_POOLS = (1, 2, 2, 8)  # max-pool after each (1: none), from 32 x 32 pixels to one
CNN5_DIGITS_POOLS = (1, 2, 2, 2)  # the same from 8 x 8 pixels
VGG16_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # each ends in a max-pool


def lenet_300_100(side: int, n_classes: int) -> nn.Sequential:
    """Two hidden layers: logits for images N x 1 x side x side."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(side * side, 300),
        nn.ReLU(),
        nn.Linear(300, 100),
        nn.ReLU(),
        nn.Linear(100, n_classes),
    )


def lenet5(n_classes: int) -> nn.Sequential:
    """Logits for N x 1 x 28 x 28: the 431 k version of the pruning literature, not the 62 k network of 1998."""
    first, second = LENET5_FILTERS
    return nn.Sequential(
        nn.Conv2d(1, first, LENET5_KERNEL),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, LENET5_KERNEL),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * LENET5_LAST_SIDE**2, LENET5_HIDDEN),
        nn.ReLU(),
        nn.Linear(LENET5_HIDDEN, n_classes),
    )


def digits_cnn(n_classes: int) -> nn.Sequential:
    """Three 3 x 3 convolutions with BatchNorm, for examples and tests: logits for N x 1 x 8 x 8."""
    first, second, third = DIGITS_WIDTHS
    return nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1, bias=False),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(second, third, 3, padding=1, bias=False),
        nn.BatchNorm2d(third),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, n_classes),
    )


class Cnn5(nn.Module):
    """The network of the double-descent study (Nakkiran et al. 2020).

    Logits N x n_classes for images N x n_in x H x W that the pools reduce to one pixel.
    """

    def __init__(self, width: int, n_in: int, pools: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for multiple, pool in zip(CNN5_MULTIPLES, pools):
            n_out = multiple * width
            layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU()]
            if pool > 1:
                layers.append(nn.MaxPool2d(pool))
            n_in = n_out
        self.features = nn.Sequential(*layers)
        self.linear = nn.Linear(n_in, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.flatten(self.features(x), 1))


class Vgg(nn.Module):
    """VGG16 with BatchNorm (Simonyan and Zisserman 2015, configuration D) and one linear layer.

    Logits N x n_classes for images N x 3 x 32 x 32: five poolings leave one pixel.
    """

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 3
        for stage in VGG16_STAGES:
            for n_out in stage:
                layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU()]
                n_in = n_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(n_in, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class LstmClassifier(nn.Module):
    """Logits N x n_classes, from the last state, for sequences N x T x step_size or images N x 1 x T x step_size."""

    def __init__(self, step_size: int, hidden: int, n_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(step_size, hidden, batch_first=True)
        self.linear = nn.Linear(hidden, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.flatten(x, 1, -2)  # N x T x step_size; no change for a plain sequence
        states = self.lstm(steps)[0]
        return self.linear(states[:, -1])
