"""Prints what the size of the weights that stay does to a fully-connected network pruned at initialisation.

    python results/digits-fully-connected/rescaled.py

The network, schedule and initialisation are those of `sipp run digits-fc-at-init --set init=fan-out`. Each network is
trained as the method leaves it, and with the initial weights under the same mask, scaled layer by layer to the norm
that the layer had before; for `sipp-rand` also with the initial weights as they were, and scaled to the norm that
sampling gives the layer.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Mapping

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sipp

METHODS = ("sipp-rand", "snip", "magnitude", "sipp-det")
KEEPS, SEEDS = (0.1, 0.05, 0.02), (0, 1, 2)
EPOCHS, BATCH, RATE, DECAYS = 6, 64, 0.05, (3, 5)
N_TRAIN, N_CALIBRATION, N_ASIDE = 1437, 200, 600


def images() -> tuple[Tensor, Tensor]:
    data = load_digits()
    inputs = torch.tensor(data.data, dtype=torch.float32)
    return (inputs - inputs[:N_TRAIN].mean()) / inputs[:N_TRAIN].std(), torch.tensor(data.target)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def masked(net: nn.Module, masks: Mapping[str, Tensor], norms: Mapping[str, Tensor] | None) -> nn.Module:
    """The network with these weights only, each layer scaled to a norm if there are any."""
    new = copy.deepcopy(net)
    with torch.no_grad():
        for name, mask in masks.items():
            weight = new.get_parameter(name).mul_(mask)
            if norms is not None and weight.norm() > 0:
                weight.mul_(norms[name] / weight.norm())
    return new


def trained(net: nn.Module, masks: Mapping[str, Tensor], order: Tensor, seed: int) -> float:
    """Trains and returns top-1 in per cent; pruned weights stay 0."""
    inputs, labels = images()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    generator, n_steps, step = torch.Generator().manual_seed(seed), len(order) // BATCH, 0
    for epoch in range(EPOCHS):
        rate = RATE * 0.1 ** sum(epoch >= decay for decay in DECAYS)
        shuffled = order[torch.randperm(len(order), generator=generator)]
        for chosen in shuffled[: n_steps * BATCH].split(BATCH):
            step += 1
            optimizer.param_groups[0]["lr"] = rate * min(1.0, step / n_steps)  # one epoch of warm-up
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
            with torch.no_grad():
                for name, mask in masks.items():
                    net.get_parameter(name).mul_(mask)
    with torch.no_grad():
        return 100 * float((net(inputs[N_TRAIN:]).argmax(1) == labels[N_TRAIN:]).float().mean())


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    inputs, labels = images()
    order = torch.randperm(N_TRAIN, generator=torch.Generator().manual_seed(0))
    points, train = order[:N_CALIBRATION], order[N_ASIDE:]
    print("| keep | method | as it is | initial weights | norm of the sample | norm of the dense layer |")
    print("|---|---|---|---|---|---|")
    for keep in KEEPS:
        for method in METHODS:
            found: dict[str, list[float]] = {}
            for seed in SEEDS:
                net = network(seed)
                pruned = sipp.prune(
                    net, [(inputs[points], labels[points])], keep=keep, method=method, seed=seed, progress=False
                )
                masks = pruned.masks
                sizes = [{name: model.get_parameter(name).norm() for name in masks} for model in (pruned.model, net)]
                nets = {"as it is": copy.deepcopy(pruned.model), "dense": masked(net, masks, sizes[1])}
                if method == "sipp-rand":
                    nets |= {"initial": masked(net, masks, None), "sample": masked(net, masks, sizes[0])}
                for name, one in nets.items():
                    found.setdefault(name, []).append(trained(one, masks, train, seed))
            said = {name: f"{statistics.mean(top1):.1f} ± {statistics.stdev(top1):.1f}" for name, top1 in found.items()}
            cells = [said.get(name, "") for name in ("as it is", "initial", "sample", "dense")]
            print(f"| {100 * keep:g} % | `{method}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
