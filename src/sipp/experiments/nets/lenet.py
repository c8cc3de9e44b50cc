"""LeNet-300-100 and LeNet-5 for 28 x 28 grey images, in the forms the pruning literature measures.

LeNet-5 is the 431 k variant (20 and 50 filters, 500 hidden units, max-pooling, ReLU), not the 62 k network of 1998.
"""

from torch import nn

from sipp.experiments.nets.init import he_init_

SIDE = 28
DIGITS_SIDE = 8
HIDDEN_300_100 = (300, 100)
LENET5_FILTERS = (20, 50)
LENET5_KERNEL = 5
LENET5_HIDDEN = 500
LENET5_LAST_SIDE = 4  # 28 -> 24 -> 12 -> 8 -> 4


def lenet_300_100(n_classes: int) -> nn.Sequential:
    """A He-initialised network of two hidden layers: logits for N x 1 x 28 x 28."""
    return _two_hidden(SIDE, n_classes)


def digits_fc(n_classes: int) -> nn.Sequential:
    """The same for digits, N x 1 x 8 x 8."""
    return _two_hidden(DIGITS_SIDE, n_classes)


def _two_hidden(side: int, n_classes: int) -> nn.Sequential:
    first, second = HIDDEN_300_100
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(side * side, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, n_classes),
    )
    he_init_(net)
    return net


def lenet5(n_classes: int) -> nn.Sequential:
    """A He-initialised LeNet-5 (431 k form): logits for N x 1 x 28 x 28."""
    first, second = LENET5_FILTERS
    net = nn.Sequential(
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
    he_init_(net)
    return net
