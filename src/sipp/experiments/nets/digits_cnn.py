"""A small convolutional network for 8 x 8 grey digits: the network of examples, tests and smoke recipes."""

from torch import nn

WIDTHS = (16, 32, 64)


def digits_cnn(n_classes: int) -> nn.Sequential:
    """Three 3 x 3 convolutions with BatchNorm: logits for N x 1 x 8 x 8."""
    first, second, third = WIDTHS
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
