"""Train a small CNN on embedded digits, keep a tenth of its weights, retrain with the zeros held.

python examples/prune_and_retrain.py
"""

import torch
import torch.nn.functional as F

import sipp
from sipp_lab.data.feed import split_images
from sipp_lab.data.sets import load_digits
from sipp_lab.nets import build

digits = load_digits()
splits = split_images(digits, n_calibration=200, n_holdout=400, seed=0)
train, calibration, test = (
    (digits.images[part], digits.labels[part]) for part in (splits.train, splits.calibration, splits.test)
)


def fit(net: torch.nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    net.train()
    for _ in range(epochs):
        for items in torch.randperm(len(train[1])).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(train[0][items]), train[1][items]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(net: torch.nn.Module) -> float:
    net.eval()
    return (net(test[0]).argmax(1) == test[1]).double().mean().item()


torch.manual_seed(0)
net = build("digits-cnn")
fit(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4), epochs=8)
print(f"dense:             {accuracy(net):.1%}")

pruned = sipp.prune(net, calibration[0], keep=0.1, method="sipp-hybrid", seed=0)
print(pruned)
print(f"pruned:            {accuracy(pruned.model):.1%}")

optimizer = torch.optim.SGD(pruned.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
sipp.hold(pruned.model, pruned, optimizer=optimizer)  # pruned weights stay zero from here on
fit(pruned.model, optimizer, epochs=8)
sipp.release(pruned.model)  # a plain module again, zeros in place
print(f"pruned, retrained: {accuracy(pruned.model):.1%}")

n_nonzero = sum(int(pruned.model.get_parameter(name).count_nonzero()) for name in pruned.masks)
print(f"{n_nonzero:,} of {pruned.n_weights:,} prunable weights are not zero")
