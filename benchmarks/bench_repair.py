"""Prints what `sipp.repair` brings back on published CIFAR-10 ResNets, and on a sentence transformer.

    python benchmarks/bench_repair.py --weights resnet20-cifar10.safetensors --data data/
    python benchmarks/bench_repair.py --weights resnet56-cifar10.safetensors --data data/ --steps 100
    python benchmarks/bench_repair.py --encoder all-MiniLM-L6-v2/

The ResNets: masks by `wt`, unlabelled training images for the repair, all 10,000 test images for the accuracy. The
encoder: a folder with a BERT model and its tokenizer; sentences made here, some for the repair, others for the table.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from pathlib import Path

import torch
from common import table
from safetensors.torch import load_file
from torch import Tensor, nn

import sipp
from sipp.experiments.data import load_cifar10, normalise
from sipp.experiments.nets import build

N_TEST = 10_000
BATCH = 500


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right answers, in per cent."""
    net.eval()
    with torch.no_grad():
        n_right = sum(int((net(x).argmax(1) == y).sum()) for x, y in zip(images.split(BATCH), labels.split(BATCH)))
    return 100 * n_right / len(labels)


def images_table(options: argparse.Namespace) -> None:
    """Prints one line a keep: accuracy of the pruned, the refitted and the polished network, and what the repair took."""
    data = load_cifar10(options.data)
    images = normalise(data.images[data.n_train :]), data.labels[data.n_train :]
    generator = torch.Generator().manual_seed(options.seed)
    chosen = torch.randperm(data.n_train, generator=generator)[: options.points]
    points = normalise(data.images[chosen])
    net = build(options.weights.name.split("-")[0], n_classes=10)
    net.load_state_dict(load_file(options.weights))
    net.eval()
    lines = [["dense", "", f"{accuracy(net, *images):.2f}", "", "", ""]]
    for keep in options.keep:
        pruned = sipp.prune(net, None, keep=keep, method="wt")
        start, cpu = time.perf_counter(), time.process_time()
        fixed = sipp.repair(net, pruned, points, steps=options.steps, learning_rate=options.learning_rate)
        took = f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s CPU"
        if options.show:
            print(fixed.repair)
        assert fixed.repair is not None
        errors = (fixed.repair.output_before, fixed.repair.output_refit, fixed.repair.output_after)
        raw, new = accuracy(pruned.model, *images), accuracy(fixed.model, *images)
        steps = "" if fixed.repair.polish is None else f"{fixed.repair.polish.best} of {fixed.repair.polish.taken}"
        lines.append(
            [f"{keep:g}", f"{raw:.2f}", f"{new:.2f}", " / ".join(f"{e:.3f}" for e in errors if e is not None), steps, took]
        )
        print(lines[-1], flush=True)
    table("repair", ["keep", "pruned", "repaired", "output error: pruned / refit / after", "best step", "time"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.4, 0.3, 0.2, 0.1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what was done to each layer")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.weights:
        images_table(options)


if __name__ == "__main__":
    main()
