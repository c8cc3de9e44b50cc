"""Prints how many forward passes a network's max-sensitivities take on the same images, and the memory they need.

python benchmarks/bench_networks.py [--busy]

The networks are untrained, with BatchNorm statistics of the images (so that activations are like a trained one's);
images are smooth noise. Scores are compared with the float64 reference kernel on a few images before anything is timed.
"""

from __future__ import annotations

import torch
from common import alternate, clock_from_arguments, peak_extra_bytes, smooth_images, table
from torch import Tensor, nn

import sipp
from sipp.nets.registry import NETS

CASES = (("resnet20", 128, 32, 9), ("resnet18", 16, 224, 5))  # network, images, side, repeats
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


def main() -> None:
    clock = clock_from_arguments(__doc__)
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

    rows = []
    for n_images in (16, 64):
        images = smooth_images(n_images, 224)
        model = network("resnet18", images)
        batches = list(images.split(MEMORY_BATCH))
        extra = peak_extra_bytes(lambda m=model, b=batches: sipp.sensitivity(m, b))
        rows.append(["resnet18", n_images, f"{extra / 2**20:.0f}", TARGET_BYTES >> 20])
    table("peak memory above model and images, batches of 16", ["network", "images", "extra MB", "target MB"], rows)


if __name__ == "__main__":
    main()
