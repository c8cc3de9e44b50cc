"""Whole channels removed without training: accuracy and speed of smaller dense networks, beside other ways to choose.

    python benchmarks/bench_channels.py --weights resnet56-cifar10.safetensors --cifar10 data/ --fewer 2.1
    python benchmarks/bench_channels.py --weights resnet20-cifar10.safetensors --cifar10 data/ --fewer 1.5 2 3 4
    python benchmarks/bench_channels.py ... --steps 1000          # also polished towards the dense outputs
    python benchmarks/bench_channels.py ... --mirrored            # 1,000 images and their mirror images
    python benchmarks/bench_channels.py ... --peer FOLDER         # also Torch-Pruning, installed in that folder
    python benchmarks/bench_channels.py --networks 300            # random networks: equal to their masked networks

1,000 training images without labels calibrate, all 10,000 test images judge. `l1` takes the filters with the smallest
sums of magnitudes, the same share in every residual block; `not refitted` is sipp's choice with the dense weights; both
and Torch-Pruning (its group magnitudes of the inner filters: it does not know these networks' shortcuts, which pad with
zeros) have the statistics of their norms taken again on the same images. With --timed, plain torch
runs both networks in turns, 64 inputs at a time, and the best of each counts. Rows go to
benchmarks/figures/channels.json, beside those of earlier calls.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from common import alternate, table, write_figures
from published import BATCH, accuracy, images_of, resnet
from torch import Tensor, nn

import sipp
from sipp.results.shrunk import Shrunk

N_POINTS = 1_000
TIMED = 64
TOLERANCE = 1e-6  # in float64
WORK = "1,000 inputs without labels, 10,000 test images, not trained"
FIGURES = Path(__file__).parent / "figures" / "channels.json"


def recalibrated(net: nn.Module, points: Tensor) -> nn.Module:
    """The network with the statistics of its norms taken on these inputs."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    with torch.no_grad():
        for part in points.split(BATCH):
            net.train()(part)
    return net.eval()


def by_l1(net: nn.Module, points: Tensor, fewer: float) -> nn.Module:
    """Each residual block without the same share of its inner filters, those with the smallest sums of magnitudes."""
    low, high = 0.0, 1.0
    for _ in range(8):
        share = (low + high) / 2
        trial = copy.deepcopy(net)
        for block in trial.modules():
            if hasattr(block, "conv1") and hasattr(block, "conv2"):
                order = block.conv1.weight.detach().abs().sum((1, 2, 3)).argsort()
                block.conv2.weight.data[:, order[: int(share * len(order))]] = 0.0
        small = sipp.shrink(trial, points[:1])
        if small.multiply_adds_before > fewer * small.multiply_adds:
            high = share
            found = small.model
        else:
            low = share
    return recalibrated(found, points)


def by_torch_pruning(net: nn.Module, points: Tensor, fewer: float) -> nn.Module:
    """What Torch-Pruning leaves: the same share of all channels, by the magnitude of their groups."""
    import torch_pruning

    example, low, high = points[:1], 0.0, 1.0
    whole, _ = torch_pruning.utils.count_ops_and_params(net, example)
    for _ in range(10):
        share = (low + high) / 2
        trial = copy.deepcopy(net)
        importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
        blocks = [module for module in trial.modules() if hasattr(module, "conv1") and hasattr(module, "conv2")]
        stream = [trial.conv1, trial.linear, *(block.conv2 for block in blocks)]
        pruner = torch_pruning.pruner.BasePruner(trial, example, importance, pruning_ratio=share, ignored_layers=stream)
        pruner.step()
        if whole > fewer * torch_pruning.utils.count_ops_and_params(trial, example)[0]:
            high, found = share, trial
        else:
            low = share
    return recalibrated(found, points)


def search(n_networks: int) -> None:
    """Random networks with a budget, not refitted: the same as with zeros in place of what is gone, or the seed."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from runtime.shrinkable_networks import network

    wrong, smaller = [], 0
    for seed in range(n_networks):
        net, _ = network(seed)
        try:
            small = sipp.shrink(net, torch.randn(24, 3, 8, 8), weights=0.95, repair=False, progress=False)
        except sipp.errors.SippError:  # nothing can go, or too little
            continue
        smaller += 1
        with torch.no_grad():
            for site in small.chosen.sites if small.chosen is not None else ():
                net.get_parameter(site.reader)[:, list(site.removed)] = 0.0
            x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
            wanted, found = net.double()(x), small.model.double()(x)
        if not float((wanted - found).norm()) <= TOLERANCE * float(wanted.norm()):
            wrong.append(seed)
    print(f"{n_networks} random networks: {smaller} smaller, outputs differ for {wrong or 'none'}")
    found_before = json.loads(FIGURES.read_text())["values"] if FIGURES.exists() else {}
    found_before["random networks"] = {"tried": n_networks, "smaller": smaller, "wrong": len(wrong)}
    write_figures("channels", WORK, found_before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--cifar10", type=Path)
    parser.add_argument("--fewer", type=float, nargs="+", default=[2.0])
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--mirrored", action="store_true")
    parser.add_argument("--only", nargs="+", default=["sipp", "not refitted", "l1"])
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--timed", action="store_true", help="time both networks; for a quiet machine")
    parser.add_argument("--seed", type=int, default=0, help="of the training images")
    parser.add_argument("--networks", type=int, help="only compare so many random networks")
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of bounds
    if given.networks:
        search(given.networks)
        return
    images, net = images_of(given.cifar10, given.seed), resnet(given.weights)
    points = images.points(0, N_POINTS)
    used = torch.stack((points, points.flip(3)), 1).flatten(0, 1) if given.mirrored else points
    options = {"progress": False}

    def small(fewer: float, **more: object) -> Shrunk:
        return sipp.shrink(net, used, multiply_adds=1 / fewer, **options, **more)

    ways: dict[str, Callable[[float], nn.Module]] = {
        "sipp": lambda fewer: small(fewer).model,
        "not refitted": lambda fewer: recalibrated(small(fewer, repair=False).model, points),
        "l1": lambda fewer: by_l1(net, points, fewer),
    }
    ways = {name: way for name, way in ways.items() if name in given.only}
    if given.steps:
        ways["sipp, polished"] = lambda fewer: small(fewer, steps=given.steps).model
    if given.peer:
        sys.path.insert(0, str(given.peer))
        ways["torch-pruning"] = lambda fewer: by_torch_pruning(net, points, fewer)
    name = given.weights.name.split("-")[0] + (", mirrored" if given.mirrored else "")
    rows = []
    for fewer in given.fewer:
        for way, make in ways.items():
            start = time.perf_counter()
            made = make(fewer)
            taken = time.perf_counter() - start
            values = {"accuracy": round(accuracy(made, images), 2)}
            if given.timed:
                seconds = alternate(*(lambda one=one: run(one, points[:TIMED]) for one in (net, made)))
                values["faster"] = round(seconds[0] / seconds[1], 2)
            rows.append([name, way, f"{fewer:g}", values["accuracy"], values.get("faster", ""), f"{taken:.0f} s"])
            print(*rows[-1], flush=True)
            before = json.loads(FIGURES.read_text())["values"] if FIGURES.exists() else {}
            before.setdefault(name, {}).setdefault(way, {})[f"{fewer:g}"] = values
            write_figures("channels", WORK, before)
    table("Smaller dense networks", ["network", "way", "fewer", "accuracy", "faster", "made in"], rows)


def run(net: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        output: Tensor = net(x)
    return output


if __name__ == "__main__":
    main()
