"""Prints what spending a budget costs: time and memory of OptAlloc, of sampling and of the largest scores.

    python benchmarks/bench_budget.py [--busy] [--write]

For the shapes of ResNet20 and ResNet101, in both forms of the problem (T10). `--busy`: CPU seconds of one thread, which
other programs disturb less.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch
from common import alternate, clock_for, peak_extra_bytes, write_figures
from torch import Tensor, nn

from sipp.pruning.budgets import AllocationProblem, allocate, allocation_problem, sampling_constant
from sipp.pruning.rows import largest
from sipp.pruning.sampling import sparsify
from sipp_lab.nets import build

C_CONSTANT = 3.0
SCALE = sampling_constant(n_outputs=200_000, delta=1e-16, c_constant=C_CONSTANT)
KEEP = 0.2
REPEATS = 5


def layers_of(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, and sensitivities like those of a trained network: heavy tails, a largest value near 1, some zeros."""
    generator = torch.Generator().manual_seed(0)
    weights, rows = [], []
    for module in build(name).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weights.append(module.weight.detach().flatten(1))
            values = torch.exp(1.5 * torch.randn(weights[-1].shape, generator=generator))
            values[torch.rand(values.shape, generator=generator) < 0.02] = 0
            rows.append(values / values.amax(1, keepdim=True))
    return weights, rows


def sampled(weights: list[Tensor], posed: AllocationProblem, budget: int) -> int:
    """How many weights the network keeps after all steps of `sipp-hybrid` behind the scores."""
    rng, n_kept = np.random.default_rng(0), 0
    for weight, worth, kept in zip(weights, posed.worths, allocate(posed, budget, rng)):
        options = {"is_hybrid": True, "draws": "until", "scale": SCALE, "c_constant": C_CONSTANT}
        n_kept += int(sparsify(weight, worth, kept, rng=rng, **options).mask_FK.sum())
    return n_kept


def measure(name: str, clock: Callable[[], float]) -> dict[str, float]:
    """Prints a line for each step, and returns the seconds and GiB that the pages quote."""
    weights, rows = layers_of(name)
    n_weights = sum(layer.numel() for layer in rows)
    budget = round(KEEP * n_weights)
    steps = {
        f"hybrid, {form}": lambda form=form: sampled(weights, allocation_problem(weights, rows, SCALE, form), budget)
        for form in ("layers", "paper")
    }
    steps["largest (det)"] = lambda: sum(int(mask.sum()) for mask in largest(rows, budget))
    kept = list[int]()
    extra = [peak_extra_bytes(lambda step=step: kept.append(step())) / 2**30 for step in steps.values()]
    if kept != [budget] * len(steps):
        raise SystemExit("the budget is not met exactly: nothing is timed")
    seconds = alternate(*steps.values(), repeats=REPEATS if n_weights < 10**6 else 1, clock=clock)
    size = f"{sum(map(len, rows)):,} rows, {n_weights:,} weights"
    for what, best, memory in zip(steps, seconds, extra):
        print(f"| {name} | {size} | {what} | {best:.3f} s | {memory:.2f} GiB |", flush=True)
    hybrid, paper, largest_seconds = (float(f"{value:.2g}") for value in seconds)
    return {"hybrid": hybrid, "hybrid_paper": paper, "largest": largest_seconds, "hybrid_gib": round(extra[0], 1)}


if __name__ == "__main__":
    print("| network | size | what | time | extra memory |\n|---|---|---|---|---|")
    is_busy = "--busy" in sys.argv
    found = {name: measure(name, clock_for(is_busy)) for name in ("resnet20", "resnet101")}
    if "--write" in sys.argv:
        unit = "CPU seconds of one thread" if is_busy else "seconds"
        write_figures("budget", f"synthetic rows with the shapes of the networks, keep 0.2, {unit}", found)
