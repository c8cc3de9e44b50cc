"""Prints what the search for mask and weights together gives on published CIFAR-10 ResNets, and what each part gives.

    python benchmarks/bench_joint.py --weights resnet20-cifar10.safetensors --data data/
    python benchmarks/bench_joint.py --weights resnet56-cifar10.safetensors --keep 0.2 0.1 0.05
    python benchmarks/bench_joint.py --weights resnet20-cifar10.safetensors --keep 0.1 --without search target residual
    python benchmarks/bench_joint.py --weights resnet20-cifar10.safetensors --keep 0.1 --peers alps sparsegpt
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
from typing import Any

import torch
from bench_repair import timed
from common import table, write_figures
from published import accuracy, images_of, resnet
from repair_split import splitting

import sipp
from sipp.inputs.data import data_of
from sipp.repairing import repair_network
from sipp.repairing.data_split import split_batches
from sipp.repairing.repair_task import PEERS, RepairTask
from sipp.results.pruned import Repaired

WORK = (
    "published ResNet, first masks by magnitude, 1,000 unlabelled training images; accuracy in per cent, seconds of "
    "the repair"
)
WITHOUT: dict[str, dict[str, Any]] = {
    "search": {"method": "refit"},
    "target": {"error_feedback": 0.0},
    "residual": {"corrects_streams": False},
}


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
        f"{found.record.error_feedback:g} {found.record.budgets}",
        f"{origins.count('searched')} / {origins.count('first')} / {origins.count('unfitted')}",
        f"{100 * moved:.0f} %",
        took,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--keep", type=float, nargs="+", default=[0.3, 0.2, 0.1, 0.05])
    parser.add_argument("--without", nargs="*", choices=list(WITHOUT), default=[])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=[])
    parser.add_argument("--error-feedback", type=float, help="default: the usual one")
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the figures of a quiet machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    images, net = images_of(options.data, options.seed), resnet(options.weights).to(options.device)
    data = list(images.points(0, options.points).split(options.batch))
    read = data_of(data, device=torch.device(options.device), n_points=None)
    parts = split_batches(read.batches())
    lines = []
    found_at: dict[str, dict[str, float]] = {}
    for keep in options.keep:
        masks = sipp.prune(net, None, keep=keep, method="magnitude", progress=False).masks
        ways: dict[str, dict[str, Any]] = {"joint": {"error_feedback": options.error_feedback}}
        ways |= {f"without {one}": WITHOUT[one] for one in options.without}
        ways |= {one: {"method": one} for one in options.peers}
        for name, changed in ways.items():
            with splitting(options.device) if options.split else nullcontext() as split:
                found, took = timed(partial(repair_network, net, masks, parts, RepairTask(**changed)))
            score = accuracy(found.model.cpu(), images)
            lines.append(line(name, keep, found, score, took))
            if name in options.peers or name == "joint":
                at = found_at.setdefault(f"{keep:g}", {})
                at |= {name: score} if name in options.peers else {"accuracy": score, "seconds": float(took.split()[0])}
            print(lines[-1], *[] if split is None else [str(split)], sep="\n", flush=True)
    title = f"{options.weights.stem}, dense {accuracy(net.cpu(), images):.2f}: accuracy, %, on 10,000 test images; "
    header = [
        "keep",
        "",
        "accuracy",
        "output error",
        "error feedback, budgets",
        "new / first / no fit",
        "moved",
        "s (CPU s a thread)",
    ]
    table(title + f"{options.points} unlabelled training images", header, lines)
    if options.write:
        device = "h200" if options.device == "cuda" else "cpu"
        dense = accuracy(net.cpu(), images)
        write_figures(f"repair-{device}", WORK, {options.weights.stem.split("-")[0]: {"dense": dense, **found_at}})


if __name__ == "__main__":
    main()
