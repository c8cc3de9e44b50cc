"""Prints how many forward passes a network's sensitivities take on the same points, and the memory they need.

python benchmarks/bench_networks.py [--busy] [--write]

The networks are untrained, with BatchNorm statistics of the images (so that activations are like a trained one's);
images are smooth noise, other inputs independent numbers. Scores are compared with the float64 reference kernel on a
few points before anything is timed. The forward pass runs the same batches.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import torch
from common import alternate, clock_for, peak_extra_bytes, smooth_images, table, write_figures
from torch import Tensor, nn

import sipp
from sipp_lab.nets import build

# network, images, of these in a batch, side, repeats, wanted
NETWORKS = (
    ("resnet20", 256, 64, 32, 5, 3.0),
    ("resnet20", 128, 128, 32, 5, 3.5),
    ("resnet18", 256, 32, 224, 2, 3.0),
    ("resnet18", 16, 16, 224, 3, 3.5),
)
OTHERS_WANTED, TARGET_BYTES = 5.0, 600 << 20
MEMORY_BATCH = 16
CHECKED = 4
AGREEMENT = 1e-5
WORK = (
    "sensitivities (max), forward pass included; forward and all in ms, ratio in forward passes; larger batches first"
)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(40, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x)[0][:, -1])


def separable(channels: int, out: int, stride: int) -> list[nn.Module]:
    """A depthwise convolution and a pointwise one."""
    depthwise = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
    pointwise = nn.Conv2d(channels, out, 1, bias=False)
    return [depthwise, nn.BatchNorm2d(channels), nn.ReLU6(), pointwise, nn.BatchNorm2d(out), nn.ReLU6()]


def others() -> dict[str, tuple[nn.Module, Tensor]]:
    """Networks of other layers, with their points."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    first = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    body = [*separable(32, 64, 1), *separable(64, 128, 2), *separable(128, 128, 1), *separable(128, 256, 2)]
    mobile = nn.Sequential(*first, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))
    block = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
    attention = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    return {
        "dense 784-300-100-10": (dense, torch.rand(1024, 784)),
        "depthwise, 96 x 96": (with_statistics(mobile, smooth_images(32, 96)), smooth_images(32, 96)),
        "LSTM 40-128-128, 50 steps": (Recurrent(), torch.randn(64, 50, 40)),
        "transformer 128, 2 blocks, 64 tokens": (attention, torch.randn(32, 64, 128)),
    }


def with_statistics(model: nn.Module, images: Tensor) -> nn.Module:
    """The network in eval mode, its BatchNorm statistics those of some images."""
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(images[:8])
    return model.eval()


def network(name: str, images: Tensor) -> nn.Module:
    torch.manual_seed(0)
    return with_statistics(build(name), images)


def check(model: nn.Module, points: Tensor) -> None:
    for reduce in ("max", "mean"):
        fast = sipp.sensitivity(model, [points], reduce=reduce)
        slow = sipp.sensitivity(model, [points], reduce=reduce, kernel="reference")
        worst = max(float(((fast[n] - slow[n]).abs() / slow[n].clamp(min=1e-12)).max()) for n in fast)
        if not worst <= AGREEMENT:
            raise SystemExit(f"{reduce}-scores disagree with the reference by {worst:.1e}: not timed")


def run(model: nn.Module, batches: Sequence[Tensor]) -> None:
    for batch in batches:
        model(batch)


def time_table(busy: bool, writes: bool) -> None:
    clock = clock_for(busy)
    cases = []
    for name, n_images, batch, side, repeats, wanted in NETWORKS:
        images = smooth_images(n_images, side)
        few = smooth_images(CHECKED, 32, seed=1)
        cases.append((name, network(name, images), list(images.split(batch)), few, repeats, wanted))
    for name, (model, points) in others().items():
        cases.append((name, model.eval(), [points], points[:CHECKED], 9, OTHERS_WANTED))
    rows: list[list[object]] = []
    found: dict[str, dict[str, float]] = {}
    for name, model, batches, few, repeats, wanted in cases:
        check(model, few)
        with torch.no_grad():
            forward, largest, mean = alternate(
                partial(run, model, batches),
                partial(sipp.sensitivity, model, batches, progress=False),
                partial(sipp.sensitivity, model, batches, reduce="mean", progress=False),
                repeats=repeats,
                clock=clock,
            )
        points = f"{len(batches)} x {len(batches[0])}"
        times = [
            f"{largest * 1e3:.0f}",
            f"{largest / forward:.2f}",
            wanted,
            f"{mean * 1e3:.0f}",
            f"{mean / largest:.2f}",
        ]
        rows.append([name, points, f"{forward * 1e3:.1f}", *times])
        one = {
            "forward": forward * 1e3,
            "all": largest * 1e3,
            "ratio": largest / forward,
            "mean_by_max": mean / largest,
        }
        found.setdefault(name.split()[0].strip(",").lower(), {key: round(value, 3) for key, value in one.items()})
    header = ["network", "points", "forward ms", "max ms", "forwards", "wanted", "mean ms", "mean / max"]
    table("sensitivities", header, rows)
    if writes:
        write_figures("scoring-cpu", WORK, found)


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
    parser.add_argument("--write", action="store_true", help="write the figures of a quiet machine")
    parser.add_argument("--memory", type=int, help="only print the extra bytes for so many images")
    options = parser.parse_args()
    if options.memory:
        print(extra_bytes(options.memory))
        return
    time_table(options.busy, options.write)
    memory_table()


if __name__ == "__main__":
    main()
