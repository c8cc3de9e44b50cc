"""Prints the rate of the CPU's max_times against torch's float32 matmul of the same shape, in one run.

python benchmarks/bench_kernels.py [--busy]

Pairs per second over multiply-adds per second. A kernel that disagrees with the float64 reference, or whose skipping
changes a bit, is not timed. "real-like": activations behind a ReLU with neighbours alike, as a network has them;
"random": independent values, of which less can be skipped.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from common import alternate, clock_for, table
from torch import Tensor

from sipp.scoring.kernels import reference
from sipp.scoring.kernels.cpu import kernel as cpu

SHAPES = {(64, 576, 8192): 0.70, (512, 4608, 2048): 0.55, (16, 27, 65536): 0.55}  # rows, fan-in, patches: target
AGREEMENT = 1e-5
CHECKED_ROWS, CHECKED_PATCHES = 4, 1024  # the float64 reference is slow


def operands(rows: int, fan_in: int, patches: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(patches_GKP, inverse_SGRP, positive_GRK, weight_GRK)."""
    generator = torch.Generator().manual_seed(0)
    if kind == "random":
        a = torch.rand(1, fan_in, patches, generator=generator)
    else:
        a = F.avg_pool1d(torch.randn(1, fan_in, patches + 15, generator=generator), 16, 1).clamp(min=0)
        a = a / a.sum(1, keepdim=True).clamp(min=1e-20)  # as the kernel for windows does
    weight = torch.randn(1, rows, fan_in, generator=generator)
    sums = cpu.quadrant_sums(weight, a)
    return a, torch.where(sums > 0, sums.reciprocal(), torch.zeros(())), weight > 0, weight


def check(a: Tensor, inverse: Tensor, positive: Tensor) -> None:
    small = a[..., :CHECKED_PATCHES], inverse[:, :, :CHECKED_ROWS, :CHECKED_PATCHES], positive[:, :CHECKED_ROWS]
    expected = reference.max_times(*small)
    if not torch.allclose(cpu.max_times(*small).double(), expected, rtol=AGREEMENT, atol=0):
        raise SystemExit("max_times disagrees with the reference: not timed")
    if not torch.equal(cpu.max_times(a, inverse, positive), cpu.max_times(a, inverse, positive, skip=False)):
        raise SystemExit("skipping changes the result: not timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", action="store_true", help="one thread, measured in CPU time")
    clock = clock_for(parser.parse_args().busy)
    rows = []
    for (n_rows, fan_in, n_patches), target in SHAPES.items():
        pairs = n_rows * fan_in * n_patches
        for kind in ("random", "real-like"):
            a, inverse, positive, weight = operands(n_rows, fan_in, n_patches, kind)
            check(a, inverse, positive)
            matmul, brute, skip, sums = alternate(
                lambda w=weight, a=a: w[0] @ a[0],
                lambda a=a, i=inverse, p=positive: cpu.max_times(a, i, p, skip=False),
                lambda a=a, i=inverse, p=positive: cpu.max_times(a, i, p),
                lambda w=weight, a=a: cpu.quadrant_sums(w, a),
                repeats=15,
                clock=clock,
            )
            rates = [pairs / t / 1e9 for t in (matmul, brute, skip)]
            cells = [f"{rate:.1f}" for rate in rates]
            ratios = [f"{rates[1] / rates[0]:.2f}", f"{rates[2] / rates[0]:.2f}", f"{target:.2f}"]
            rows.append([f"{n_rows} x {fan_in} x {n_patches}", kind, *cells, *ratios, f"{2 * pairs / sums / 1e9:.1f}"])
    header = ["shape", "data", "matmul G/s", "brute G/s", "skip G/s", "brute ratio", "skip ratio", "target", "D G/s"]
    table("max_times: pairs/s over torch matmul multiply-adds/s (D: quadrant_sums, multiply-adds/s)", header, rows)


if __name__ == "__main__":
    main()
