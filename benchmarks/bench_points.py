"""Accuracy against the number of points S and against delta, on a published ResNet20: pruned, not retrained.

    python benchmarks/bench_points.py --weights resnet20-cifar10.safetensors --data data/

Every number of points is drawn anew from the training images for each repetition. `delta` decides how OptAlloc shares
out a budget among rows, and how rows are sampled; `sipp-det` and `sipp-blend` do not look at it.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from pathlib import Path

import torch
from common import machine, table
from safetensors.torch import load_file
from torch import Tensor, nn

from sipp.errors import DeadRowsWarning
from sipp.pruning import cut, rank
from sipp.results.options import Method, PruneOptions
from sipp.scoring.task import task_of
from sipp_lab.data.images import normalise
from sipp_lab.data.sets import load_cifar10
from sipp_lab.nets import build

N_POINTS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
DELTAS = (0.5, 0.1, 1e-2, 1e-4, 1e-8, 1e-16)
POINTS_FOR_DELTA = 100
BATCH = 500


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right answers, in per cent."""
    with torch.no_grad():
        n_right = sum(int((net(x).argmax(1) == y).sum()) for x, y in zip(images.split(BATCH), labels.split(BATCH)))
    return 100 * n_right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--keep", type=float, default=0.8)
    parser.add_argument("--tests", type=int, default=2000, help="test images")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeadRowsWarning)
    data = load_cifar10(options.data)
    end = data.n_train + options.tests
    tests = normalise(data.images[data.n_train : end]), data.labels[data.n_train : end]
    net = build("resnet20", n_classes=10)
    net.load_state_dict(load_file(options.weights))
    net.eval()

    def points(n: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return normalise(data.images[torch.randperm(data.n_train, generator=generator)[:n]])

    def found(n: int, method: Method, reduce: str | None, delta: float) -> str:
        options_of = PruneOptions(method=method, reduce=reduce, delta=delta)  # type: ignore[arg-type]
        values = []
        for seed in range(options.repetitions):
            ranking = rank(task_of(net, points(n, seed), seed=seed), options_of)
            values.append(accuracy(cut(ranking, round(options.keep * ranking.n_weights), seed=seed).model, *tests))
        return f"{statistics.mean(values):.2f} +- {statistics.stdev(values):.2f}"

    print(f"ResNet20, keep {options.keep}, {options.tests} test images, dense {accuracy(net, *tests):.2f}; {machine()}")
    arms = (("sipp-det", "max"), ("sipp-det", "mean"), ("sipp-hybrid", None), ("sipp-blend", None))
    names = [f"{method} {reduce or ''}".strip() for method, reduce in arms]
    rows = [[n, *(found(n, method, reduce, 1e-16) for method, reduce in arms)] for n in N_POINTS]  # type: ignore[arg-type]
    table("top-1 against the number of points", ["points", *names], rows)
    sampled = ("sipp-rand", "sipp-hybrid")
    deltas = [[f"{d:g}", *(found(POINTS_FOR_DELTA, method, None, d) for method in sampled)] for d in DELTAS]  # type: ignore[arg-type]
    table(f"top-1 against delta, {POINTS_FOR_DELTA} points", ["delta", *sampled], deltas)


if __name__ == "__main__":
    main()
