"""Prints what allocating a budget costs: time and memory for the shapes of ResNet20 and ResNet101, and against cvxpy.

    python benchmarks/bench_budget.py            # ours alone
    python benchmarks/bench_budget.py --cvxpy    # beside the relaxed problem in cvxpy, where that is installed

In cvxpy the bound of each row enters as the largest of the tangents of its convex part, so that the problem is a
linear program; the same rows, the same budget. Agreement of both optima is checked before anything is timed.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import alternate, peak_extra_bytes
from torch import Tensor, nn

from sipp.allocation.largest_scores import largest
from sipp.allocation.optimal import allocate_within, allocation_problem, relax_within
from sipp.allocation.rows import sampling_constant
from sipp.experiments.nets import build

N_OUTPUTS, DELTA, C_CONSTANT = 200_000, 1e-16, 3.0
KEEP = 0.2
CHORDS = (40, 400)  # pieces of each row's curve in the linear program: more come closer to the curve
REPEATS = 5
AGREEMENT = 0.02  # tangents lie below the curve: the linear program's optimum is a little lower


def sensitivities(name: str) -> list[Tensor]:
    """Rows like those of a trained network: heavy tails, a largest value near 1, some weights without any."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for module in build(name).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            shape = (module.weight.shape[0], module.weight[0].numel())
            values = torch.exp(1.5 * torch.randn(shape, generator=generator))
            values[torch.rand(shape, generator=generator) < 0.02] = 0
            rows.append(values / values.amax(1, keepdim=True))
    return rows


def options() -> dict[str, float]:
    return {"n_outputs": N_OUTPUTS, "delta": DELTA, "c_constant": C_CONSTANT}


def allocate(rows: list[Tensor], budget: int) -> list[Tensor]:
    """What sampling spends on each row, from sensitivities alone."""
    return allocate_within(allocation_problem(rows, **options()), budget, generator=torch.Generator().manual_seed(0))


def draws_for(layer: Tensor, kept: Tensor) -> Tensor:
    """N(m) of T7, by bisection of its logarithm."""
    log_missed = torch.log1p(-layer.double() / layer.double().sum(1, keepdim=True))
    low, high = torch.zeros(2, len(layer), dtype=torch.float64)
    high += 100.0
    for _ in range(60):
        middle = (low + high) / 2
        is_few = (-torch.expm1(middle.exp()[:, None] * log_missed)).sum(1) < kept
        low, high = torch.where(is_few, middle, low), torch.where(is_few, high, middle)
    return low.exp()


def ours(name: str) -> tuple[list[Tensor], int, float]:
    """Prints time and memory of both ways to spend a budget; the rows, the budget and the best time of `allocate`."""
    rows = sensitivities(name)
    n_weights = sum(layer.numel() for layer in rows)
    budget = round(KEEP * n_weights)
    results: dict[str, list[Tensor]] = {}

    def allocated() -> None:
        results["kept"] = allocate(rows, budget)

    def selected() -> None:
        results["masks"] = largest(rows, budget)

    steps = {"allocate (hybrid)": allocated, "largest (det)": selected}
    extra = {what: peak_extra_bytes(step) for what, step in steps.items()}  # of the first call
    if any(sum(int(layer.sum()) for layer in result) != budget for result in results.values()):
        raise SystemExit("the budget is not met exactly: nothing is timed")
    seconds = alternate(*steps.values(), repeats=REPEATS if n_weights < 10**6 else 1)
    n_rows = sum(len(layer) for layer in rows)
    for what, best in zip(steps, seconds):
        size = f"{n_rows:,} rows, {n_weights:,} weights"
        print(f"| {name} | {size} | {what} | {best:.3f} s | {extra[what] / 2**30:.2f} GiB |", flush=True)
    return rows, budget, seconds[0]


def tangents(layer: Tensor, n_chords: int) -> tuple[Tensor, Tensor]:
    """Slopes and offsets of lines below eps(m), rows x chords, from its values at numbers of kept weights."""
    caps = (layer > 0).sum(1)
    shares = torch.linspace(0.02, 0.8, n_chords + 1, dtype=torch.float64)
    kept = caps[:, None] * shares
    points = []
    for j in range(kept.shape[1]):
        draws = draws_for(layer, kept[:, j])
        share = sampling_constant(layer.double().sum(1), **options()) / draws
        points.append(share + (share * (share + 6.0)).sqrt())  # T6
    values = torch.stack(points, 1)
    slopes = (values[:, 1:] - values[:, :-1]) / (kept[:, 1:] - kept[:, :-1])
    return slopes, values[:, :-1] - slopes * kept[:, :-1]


def beside_cvxpy(rows: list[Tensor], budget: int, seconds: float, n_chords: int) -> None:
    import cvxpy

    lines = [tangents(layer, n_chords) for layer in rows]
    slopes, offsets = (torch.cat([line[i] for line in lines]).numpy() for i in range(2))
    caps = torch.cat([(layer > 0).sum(1) for layer in rows]).numpy()
    start = time.perf_counter()
    kept, eps = cvxpy.Variable(len(caps)), cvxpy.Variable(len(caps))
    constraints = [kept >= 0, kept <= 0.8 * caps, cvxpy.sum(kept) <= budget]
    constraints += [eps >= cvxpy.multiply(slopes[:, j], kept) + offsets[:, j] for j in range(slopes.shape[1])]
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(eps)), constraints)
    problem.solve()
    theirs = time.perf_counter() - start
    found = relax_within(allocation_problem(rows, **options()), budget).objective
    print(
        f"objective: ours {found:.6g}, cvxpy {problem.value:.6g} ({n_chords} chords of each curve, no row kept whole)"
    )
    if abs(found / problem.value - 1) > AGREEMENT:
        raise SystemExit("the optima disagree: nothing is compared")
    print(
        f"| resnet20 | {len(caps)} rows | cvxpy {cvxpy.__version__} | {theirs:.2f} s | {theirs / seconds:.0f} x ours |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cvxpy", action="store_true", help="also solve the ResNet20 problem in cvxpy")
    wanted = parser.parse_args()
    allocate(sensitivities("digits-cnn"), 2000)  # compile
    print("| network | size | what | time | extra memory |\n|---|---|---|---|---|")
    rows, budget, seconds = ours("resnet20")
    ours("resnet101")
    if wanted.cvxpy:
        for n_chords in CHORDS:
            beside_cvxpy(rows, budget, seconds, n_chords)


if __name__ == "__main__":
    main()
