"""Prints how accurate a published ResNet20 stays when it is sampled without retraining, for both forms of OptAlloc.

    python benchmarks/bench_allocation.py --data data --weights resnet20-cifar10.safetensors

256 training images score the weights, 2,000 test images judge. Writes the table to benchmarks/figures/allocation.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from published import accuracy, images_of, resnet

import sipp

METHODS = (("sipp-rand", "layers"), ("sipp-rand", "paper"), ("sipp-hybrid", "layers"), ("sipp-hybrid", "paper"))
KEEPS = (0.8, 0.65, 0.5)
N_POINTS, N_TEST, N_SEEDS = 256, 2000, 5
FIGURES = Path(__file__).parent / "figures" / "allocation.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with cifar-10-batches-bin")
    parser.add_argument("--weights", type=Path, required=True, help="resnet20-cifar10.safetensors")
    wanted = parser.parse_args()
    images = images_of(wanted.data, 0)
    images = type(images)(images.train, images.test[:N_TEST], images.labels[:N_TEST])
    net = resnet(wanted.weights)
    rows = [{"method": "dense", "keep": 1.0, "top1": [round(accuracy(net, images), 2)]}]
    for method, allocation in METHODS:
        for keep in KEEPS:
            found = []
            for seed in range(N_SEEDS):
                options = {"method": method, "allocation": allocation, "seed": seed, "progress": False}
                pruned = sipp.prune(net, images.points(0, N_POINTS), keep=keep, **options)
                found.append(round(accuracy(pruned.model, images), 2))
            rows.append({"method": method, "allocation": allocation, "keep": keep, "top1": found})
    print("| method | allocation | keep | top-1, mean | lowest to highest |\n|---|---|---|---|---|")
    for row in rows:
        top1 = row["top1"]
        ends = f"{min(top1):.1f} to {max(top1):.1f}"
        name = f"{row['method']} | {row.get('allocation', '')}"
        print(f"| {name} | {row['keep']:g} | {statistics.mean(top1):.1f} | {ends} |")
    FIGURES.parent.mkdir(exist_ok=True)
    shape = f"ResNet20, {N_POINTS} inputs to score, {N_TEST:,} test images, not retrained, {N_SEEDS} seeds"
    FIGURES.write_text(json.dumps({"shape": shape, "sipp": sipp.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
