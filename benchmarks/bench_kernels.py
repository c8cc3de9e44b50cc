"""Prints the time of the CPU kernel against torch's float32 matmul of the same shape, in one run.

python benchmarks/bench_kernels.py [--busy]

The kernel finds denominators, norms and the largest ratio of every weight: two products of that shape and what lies
around them. A way that disagrees with the float64 reference, or whose skipping changes a bit, is not timed.
"real-like": activations behind a ReLU with neighbours alike, as a network has them; "random": independent values, of
which less can be skipped.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch
import torch.nn.functional as F
from common import alternate, clock_for, table
from torch import Tensor

from sipp.inputs.patches import WeightUse
from sipp.scoring.kernels import cpu, reference
from sipp.scoring.kernels.protocol import Chunk

SHAPES = ((64, 576, 8192), (512, 4608, 2048), (16, 27, 65536))  # rows, fan-in, patches
AGREEMENT = 1e-5
CHECKED_ROWS, CHECKED_PATCHES = 4, 1024  # the float64 reference is slow


def operands(rows: int, fan_in: int, patches: int, kind: str) -> tuple[Tensor, Tensor]:
    """(patches_GKP, weight_GRK)."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, rows, fan_in, generator=generator)
    if kind == "random":
        return torch.rand(1, fan_in, patches, generator=generator), weight
    return F.avg_pool1d(torch.randn(1, fan_in, patches + 15, generator=generator), 16, 1).clamp(min=0), weight


def ratios(a: Tensor, weight: Tensor) -> Tensor:
    """The largest ratio of each weight, patches as positions of one point."""
    found = cpu.Ratios(weight, torch.ones(weight.shape[:2]).double())
    found.take_in(WeightUse("", a.transpose(1, 2)[None]), torch.tensor([[1.0], [0.0]]))
    return found.largest()


def by_every_product(a: Tensor, weight: Tensor) -> Tensor:
    with mock.patch.object(cpu, "MOST_WEIGHTS", 2**30):
        return ratios(a, weight)


def by_skipping(a: Tensor, weight: Tensor) -> Tensor:
    with mock.patch.object(cpu, "MOST_WEIGHTS", 0):
        return ratios(a, weight)


def check(a: Tensor, weight: Tensor) -> None:
    small = a[..., :CHECKED_PATCHES], weight[:, :CHECKED_ROWS]
    ones = torch.ones(small[1].shape[:2]).double()
    chunk = Chunk(small[0].double(), 1, small[1].double(), ones, (True, False))
    expected, _ = reference.max_chunk(chunk, torch.zeros_like(small[1]))
    if not torch.allclose(by_skipping(*small).double(), expected, rtol=AGREEMENT, atol=0):
        raise SystemExit("the kernel disagrees with the reference: not timed")
    if not torch.equal(by_skipping(a, weight), by_every_product(a, weight)):
        raise SystemExit("skipping changes the result: not timed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", action="store_true", help="one thread, measured in CPU time")
    clock = clock_for(parser.parse_args().busy)
    rows = []
    for shape in SHAPES:
        for kind in ("random", "real-like"):
            a, weight = operands(*shape, kind)
            check(a, weight)
            times = alternate(
                lambda a=a, w=weight: w[0] @ a[0],
                lambda a=a, w=weight: by_every_product(a, w),
                lambda a=a, w=weight: by_skipping(a, w),
                repeats=15,
                clock=clock,
            )
            n_rows, fan_in, n_patches = shape
            cells = [f"{1e3 * seconds:.1f}" for seconds in times]
            ratio = [f"{seconds / times[0]:.2f}" for seconds in times[1:]]
            rows.append([f"{n_rows} x {fan_in} x {n_patches}", kind, *cells, *ratio])
    names = ("every product", "skipping")
    header = ["shape", "data", "matmul ms", *(f"{name} ms" for name in names), *(f"{name} / matmul" for name in names)]
    table("the CPU kernel against torch's float32 matmul", header, rows)


if __name__ == "__main__":
    main()
