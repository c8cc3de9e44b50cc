"""Scores of other methods by their definitions, weight by weight: slow and obvious."""

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


def wanda_linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """|w_ij| times the length of input j over all points and positions."""
    rows = inputs.double().reshape(-1, layer.in_features)
    scores = torch.zeros(layer.weight.shape, dtype=torch.float64)
    for i in range(layer.out_features):
        for j in range(layer.in_features):
            scores[i, j] = abs(float(layer.weight.detach()[i, j])) * sum(float(x[j]) ** 2 for x in rows) ** 0.5
    return scores
