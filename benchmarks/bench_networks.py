"""Prints how many forward passes a network's max-sensitivities take on the same images, and the memory they need.

python benchmarks/bench_networks.py [--busy]

The networks are untrained, with BatchNorm statistics of the images (so that activations are like a trained one's);
images are smooth noise. Scores are compared with the float64 reference kernel on a few images before anything is timed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
from common import alternate, clock_for, peak_extra_bytes, smooth_images, table
from torch import Tensor, nn

import sipp
from sipp.nets.registry import NETS

CASES = (("resnet20", 128, 32, 7), ("resnet18", 16, 224, 5))  # network, images, side, repeats
TARGET_RATIO, TARGET_BYTES = 5.0, 600 << 20
MEMORY_BATCH = 16
AGREEMENT = 1e-5


def network(name: str, images: Tensor) -> nn.Module:
    """The untrained network in eval mode, its BatchNorm statistics those of some images."""
    torch.manual_seed(0)
    model = NETS[name].builder(NETS[name].n_classes).train()
    with torch.no_grad():
        for _ in range(3):
            model(images[:8])
    return model.eval()


def check(model: nn.Module, images: Tensor) -> None:
    fast = sipp.sensitivity(model, [images])
    slow = sipp.sensitivity(model, [images], kernel="reference")
    worst = max(float(((fast[n] - slow[n]).abs() / slow[n].clamp(min=1e-12)).max()) for n in fast)
    if not worst <= AGREEMENT:
        raise SystemExit(f"scores disagree with the reference by {worst:.1e}: not timed")


def time_table(busy: bool) -> None:
    clock = clock_for(busy)
    rows = []
    for name, n_images, side, repeats in CASES:
        images = smooth_images(n_images, side)
        model = network(name, images)
        check(model, smooth_images(4, 32, seed=1))
        with torch.no_grad():
            forward, score = alternate(
                lambda m=model, x=images: m(x),
                lambda m=model, x=images: sipp.sensitivity(m, [x]),
                repeats=repeats,
                clock=clock,
            )
        rows.append(
            [name, n_images, f"{forward * 1e3:.0f}", f"{score * 1e3:.0f}", f"{score / forward:.2f}", TARGET_RATIO]
        )
    table("max-sensitivities", ["network", "images", "forward ms", "scores ms", "ratio", "target"], rows)


def extra_bytes(n_images: int) -> int:
    """Peak memory of scoring ResNet18 on so many images, above the model and the images: the forward pass included."""
    images = smooth_images(n_images, 224)
    model = network("resnet18", images[:MEMORY_BATCH])
    sipp.sensitivity(model, [images[:1]])  # compiled code, thread pools
    return peak_extra_bytes(lambda: sipp.sensitivity(model, list(images.split(MEMORY_BATCH))))


def memory_table() -> None:
    """Each line is measured in a process of its own: a process keeps memory that it has had."""
    rows = []
    for n_images in (16, 64):
        command = [sys.executable, __file__, "--memory", str(n_images)]
        extra = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(["resnet18", n_images, f"{extra / 2**20:.0f}", TARGET_BYTES >> 20])
    table("peak memory above model and images, batches of 16", ["network", "images", "extra MB", "target MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", action="store_true", help="one thread, measured in CPU time")
    parser.add_argument("--memory", type=int, help="only print the extra bytes for so many images")
    options = parser.parse_args()
    if options.memory:
        print(extra_bytes(options.memory))
        return
    time_table(options.busy)
    memory_table()


if __name__ == "__main__":
    main()
