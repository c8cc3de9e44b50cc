"""LeNet-300-100 and LeNet-5 for 28 x 28 grey images, in the forms the pruning literature measures.

LeNet-5 is the 431 k variant (20 and 50 filters, 500 hidden units, max-pooling, ReLU), not the 62 k network of 1998.
"""

from torch import nn

HIDDEN_300_100 = (300, 100)
LENET5_FILTERS = (20, 50)
LENET5_KERNEL = 5
LENET5_HIDDEN = 500
LENET5_LAST_SIDE = 4  # 28 -> 24 -> 12 -> 8 -> 4


def lenet_300_100(side: int, n_classes: int) -> nn.Sequential:
    """Two hidden layers: logits for images N x 1 x side x side."""
    first, second = HIDDEN_300_100
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(side * side, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, n_classes),
    )


def lenet5(n_classes: int) -> nn.Sequential:
    """LeNet-5 in its 431 k form: logits for N x 1 x 28 x 28."""
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
