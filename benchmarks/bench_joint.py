"""Prints what the search for mask and weights together gives on published CIFAR-10 ResNets, and what peers give.

    python benchmarks/bench_joint.py --weights resnet20-cifar10.safetensors --data data/
    python benchmarks/bench_joint.py --weights resnet56-cifar10.safetensors --keep 0.2 0.1 0.05
    python benchmarks/bench_joint.py --weights resnet20-cifar10.safetensors --keep 0.1 --ways joint refit alps sparsegpt
    python benchmarks/bench_joint.py --weights resnet56-cifar10.safetensors --keep 0.2 0.1 --device cuda --split

First masks by global magnitude, unlabelled training images, all 10,000 test images for the accuracy. `--split`
prints which part took how many seconds.
"""

from __future__ import annotations

import argparse
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from bench_repair import timed
from common import table
from published import accuracy, images_of, resnet
from repair_split import splitting

import sipp
from sipp.inputs.data import data_of
from sipp.repairing import Repaired, repair_network, split_data
from sipp.repairing.fit import PEERS


def line(name: str, keep: float, found: Repaired, score: float, took: str) -> list[str]:
    """One line of the table."""
    origins = [layer.mask_origin for layer in found.record.layers]
    moved = sum(layer.n_moved for layer in found.record.layers) / sum(layer.kept for layer in found.record.layers)
    error = found.record.output_validation if found.record.output_after is None else found.record.output_after
    return [
        f"{keep:g}",
        name,
        f"{score:.2f}",
        "-" if error is None else f"{error:.3f}",
        f"{origins.count('searched')} / {origins.count('first')} / {origins.count('unfitted')}",
        f"{100 * moved:.0f} %",
        took,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--keep", type=float, nargs="+", default=[0.3, 0.2, 0.1, 0.05])
    parser.add_argument("--ways", nargs="*", choices=["joint", "refit", *PEERS], default=["joint"])
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--split", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    images, net = images_of(options.data, options.seed), resnet(options.weights).to(options.device)
    data = list(images.points(0, options.points).split(options.batch))
    read = data_of(data, device=torch.device(options.device), n_points=None)
    parts = split_data(read)
    lines = []
    for keep in options.keep:
        masks = sipp.prune(net, None, keep=keep, method="magnitude", progress=False).masks
        for name in options.ways:
            with splitting(options.device) if options.split else nullcontext() as split:
                found, took = timed(partial(repair_network, net, masks, parts, name))
            lines.append(line(name, keep, found, accuracy(found.model.cpu(), images), took))
            print(lines[-1], *[] if split is None else [str(split)], sep="\n", flush=True)
    title = f"{options.weights.stem}, dense {accuracy(net.cpu(), images):.2f}: accuracy, %, on 10,000 test images; "
    header = [
        "keep",
        "",
        "accuracy",
        "output error",
        "new / first / no fit",
        "moved",
        "s (CPU s a thread)",
    ]
    table(title + f"{options.points} unlabelled training images", header, lines)


if __name__ == "__main__":
    main()
