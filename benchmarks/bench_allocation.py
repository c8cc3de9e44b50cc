"""Prints how accurate a published ResNet20 stays when it is sampled without retraining, for both forms of OptAlloc.

    python benchmarks/bench_allocation.py --data data --weights resnet20-cifar10.safetensors

256 training images score the weights, 2,000 test images judge. Writes the table to benchmarks/figures/allocation.json.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from common import write_figures
from published import accuracy, images_of, resnet

import sipp

METHODS = (("sipp-rand", "layers"), ("sipp-rand", "paper"), ("sipp-hybrid", "layers"), ("sipp-hybrid", "paper"))
KEEPS = (0.8, 0.65, 0.5)
N_POINTS, N_TEST, N_SEEDS = 256, 2000, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with cifar-10-batches-bin")
    parser.add_argument("--weights", type=Path, required=True, help="resnet20-cifar10.safetensors")
    wanted = parser.parse_args()
    images = images_of(wanted.data, 0)
    images = type(images)(images.train, images.test[:N_TEST], images.labels[:N_TEST])
    net = resnet(wanted.weights)
    values: dict[str, Any] = {"dense": round(accuracy(net, images), 2)}
    print("| method | allocation | keep | top-1, mean | lowest to highest |\n|---|---|---|---|---|")
    for method, allocation in METHODS:
        for keep in KEEPS:
            found = []
            for seed in range(N_SEEDS):
                options = {"method": method, "allocation": allocation, "seed": seed, "progress": False}
                pruned = sipp.prune(net, images.points(0, N_POINTS), keep=keep, **options)
                found.append(round(accuracy(pruned.model, images), 2))
            low, high, mean = min(found), max(found), statistics.mean(found)
            print(f"| {method} | {allocation} | {keep:g} | {mean:.1f} | {low:.1f} to {high:.1f} |", flush=True)
            of_keep = values.setdefault(method, {}).setdefault(allocation, {})
            of_keep[f"{keep:g}"] = {"mean": round(mean, 2), "low": low, "high": high}
    shape = f"ResNet20, {N_POINTS} inputs to score, {N_TEST:,} test images, not retrained, {N_SEEDS} seeds"
    write_figures("allocation", shape, values)


if __name__ == "__main__":
    main()
