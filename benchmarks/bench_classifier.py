"""Counts what each method leaves of the classifier when an untrained ResNet20 is pruned.

    python benchmarks/bench_classifier.py --data data

256 images of CIFAR-10 score the weights. Nothing is trained: a network whose classifier keeps no weight gives every
image the same answer, which is 10 %, however it is trained. Writes its table to benchmarks/figures/classifier.json.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from common import write_figures

import sipp
from sipp.errors import DeadRowsWarning
from sipp_lab.data.images import normalise
from sipp_lab.data.sets import load_cifar10
from sipp_lab.nets import build

INITS = ("fan-out", "he")
ARMS = (
    ("magnitude", None),
    ("snip", None),
    ("sipp-det", "mean"),
    ("sipp-det", "max"),
    ("sipp-rand", None),
    ("sipp-hybrid", None),
)
KEEPS = (0.1, 0.05, 0.02)
N_POINTS, N_SEEDS, BATCH = 256, 3, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with cifar-10-batches-bin")
    warnings.simplefilter("ignore", DeadRowsWarning)
    images = load_cifar10(parser.parse_args().data)
    chosen = torch.randperm(images.n_train, generator=torch.Generator().manual_seed(0))[:N_POINTS]
    points = list(zip(normalise(images.images[chosen]).split(BATCH), images.labels[chosen].split(BATCH)))
    rows = []
    for init in INITS:
        for method, reduce in ARMS:
            for keep in KEEPS:
                left, dead = [], []
                for seed in range(N_SEEDS):
                    torch.manual_seed(seed)
                    net = build("resnet20", n_classes=10, init=init)
                    options = {} if reduce is None else {"reduce": reduce}
                    pruned = sipp.prune(
                        net,
                        points,
                        keep=keep,
                        method=method,
                        seed=seed,
                        norm_stats="batch",  # an untrained network has none of its own
                        progress=False,
                        **options,
                    )
                    left.append(pruned.layers[-1].kept)
                    dead.append(sum(layer.dead_rows for layer in pruned.layers))
                name = f"{method} {reduce}" if reduce else method
                rows.append({"init": init, "method": name, "keep": keep, "classifier": left, "dead_rows": dead})
    n_weights = pruned.layers[-1].n_weights
    print(f"weights left of the classifier's {n_weights}, seeds 0 to {N_SEEDS - 1}")
    print("| initialisation | method | " + " | ".join(f"{keep:.0%}" for keep in KEEPS) + " |")
    print("|---" * (2 + len(KEEPS)) + "|")
    for start in range(0, len(rows), len(KEEPS)):
        cells = [", ".join(map(str, row["classifier"])) for row in rows[start : start + len(KEEPS)]]
        print(f"| {rows[start]['init']} | {rows[start]['method']} | {' | '.join(cells)} |")
    shape = f"ResNet20 untrained, {N_POINTS} images to score, {n_weights} weights in the classifier, {N_SEEDS} seeds"
    write_figures("classifier", shape, {"rows": rows})


if __name__ == "__main__":
    main()
