"""Scores of other methods by their definitions, weight by weight: slow and obvious."""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def lamp(weight: Tensor) -> Tensor:
    """w^2 / (sum of w_k^2 over all k that do not come after it, from the largest magnitude to the smallest)."""
    flat = weight.double().abs().flatten().tolist()
    scores = []
    for j, magnitude in enumerate(flat):
        total = sum(other**2 for k, other in enumerate(flat) if other > magnitude or (other == magnitude and k <= j))
        scores.append(magnitude**2 / total if total > 0 else 0.0)
    return torch.tensor(scores, dtype=torch.float64).view(weight.shape)


def wanda(weight_FK: Tensor, patches_PK: Tensor) -> Tensor:
    """|w_ij| times the length of input j over all patches."""
    weight = weight_FK.double()
    scores = torch.zeros_like(weight)
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            scores[i, j] = abs(float(weight[i, j])) * sum(float(x[j]) ** 2 for x in patches_PK.double()) ** 0.5
    return scores


def snip(total_loss: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    """|w dL/dw| by central differences."""
    scores, step = torch.zeros_like(weights), 1e-6
    for q in range(len(weights)):
        moved = torch.zeros_like(weights)
        moved[q] = step
        scores[q] = (weights[q] * (total_loss(weights + moved) - total_loss(weights - moved)) / (2 * step)).abs()
    return scores


def erk_counts(shapes: list[tuple[int, ...]], budget: int) -> list[float]:
    """How many weights each layer keeps: density eps (sum of sizes) / (product), full ones set to 1, eps solved again.

    The counts are not rounded; they add up to the budget.
    """
    sizes = [math.prod(shape) for shape in shapes]
    full: set[int] = set()
    while True:
        free = [i for i in range(len(shapes)) if i not in full]
        left = budget - sum(sizes[i] for i in full)
        scale = left / sum(sum(shapes[i]) for i in free) if free else 0.0
        density = [1.0 if i in full else scale * sum(shapes[i]) / sizes[i] for i in range(len(shapes))]
        over = {i for i in free if density[i] > 1}
        if not over:
            return [d * size for d, size in zip(density, sizes)]
        full |= over


def grasp(total_loss: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    """The paper's S = -w * (H g), of which the largest are removed, with the whole Hessian written out."""
    hessian = torch.autograd.functional.hessian(total_loss, weights)
    gradient = torch.autograd.functional.jacobian(total_loss, weights)
    scores = torch.zeros_like(weights)
    for q in range(len(weights)):
        scores[q] = -weights[q] * sum(hessian[q, k] * gradient[k] for k in range(len(weights)))
    return scores


def obs(weight_FK: Tensor, patches_PK: Tensor, damping: float) -> Tensor:
    """Half the least squared error of a row without weight j, the others refitted, with a pull towards their values.

    For each weight a least-squares problem: move the others by d to make up for w_j x_j, at the price of `damping`
    (times the mean square sum of an input) for every squared move, that of w_j to 0 included.
    """
    x, weight = patches_PK.double(), weight_FK.double()
    price = math.sqrt(damping * float(x.square().sum()) / x.shape[1])
    system = torch.cat([x, price * torch.eye(x.shape[1], dtype=torch.float64)])  # moves -> errors
    scores = torch.zeros(weight.shape, dtype=torch.float64)
    for j in range(x.shape[1]):
        others = [k for k in range(x.shape[1]) if k != j]
        for i in range(len(weight)):
            lost = -weight[i, j] * system[:, j]
            left = lost
            if others:
                left = lost - system[:, others] @ torch.linalg.lstsq(system[:, others], lost[:, None]).solution[:, 0]
            scores[i, j] = left.square().sum() / 2
    return scores


def synflow(model: nn.Module, names: list[str], shape: tuple[int, ...], n_steps: int, budget: int) -> list[int]:
    """The weights that are left, numbered end to end, after as many of n_steps as it takes to get down to the budget.

    For layers that are linear where all is positive, R is linear in each weight: w dR/dw is what R loses without it.
    """
    model = copy.deepcopy(model).double().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.abs()
    places = [
        (model.get_parameter(name).data.view(-1), j) for name in names for j in range(model.get_parameter(name).numel())
    ]

    def total() -> float:
        with torch.no_grad():
            return float(model(torch.ones(1, *shape, dtype=torch.float64)).sum())

    def lost_without(k: int) -> float:
        flat, j = places[k]
        before, value = total(), float(flat[j])
        flat[j] = 0.0
        lost = before - total()
        flat[j] = value
        return lost

    left = list(range(len(places)))
    for step in range(1, n_steps + 1):
        flow = {k: lost_without(k) for k in left}
        n_kept = max(budget, round(len(places) ** (1 - step / n_steps)))
        left = sorted(left, key=lambda k: -flow[k])[:n_kept]
        for k in range(len(places)):
            if k not in left:
                flat, j = places[k]
                flat[j] = 0.0
        if n_kept == budget:
            break
    return sorted(left)
