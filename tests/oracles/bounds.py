"""T11 and T12 for a chain of fully-connected ReLU layers, by the book: float64, loops, nothing from sipp."""

import numpy as np


def forward(weights: list[np.ndarray], biases: list[np.ndarray], x: np.ndarray) -> tuple[list, list, np.ndarray]:
    """The inputs a_l and products Z_l = W_l a_l of every layer, and the output (ReLU between layers only)."""
    inputs, products = [], []
    a = x
    for i, (w, b) in enumerate(zip(weights, biases)):
        inputs.append(a)
        products.append(w @ a)
        a = products[-1] + b
        if i + 1 < len(weights):
            a = np.maximum(a, 0)
    return inputs, products, a


def sensitivities(weights: list[np.ndarray], biases: list[np.ndarray], points: np.ndarray) -> list[np.ndarray]:
    """T1-T3, one ratio at a time."""
    scores = [np.zeros_like(w) for w in weights]
    for x in points:
        for score, w, a in zip(scores, weights, forward(weights, biases, x)[0]):
            for t in (1, -1):
                at = np.maximum(t * a, 0)
                for i in range(len(w)):
                    for s in (1, -1):
                        ws = np.maximum(s * w[i], 0)
                        total = float(ws @ at)
                        if total > 0:
                            score[i] = np.maximum(score[i], ws * at / total)
    return scores


def network_epsilon(
    weights: list[np.ndarray], pruned: list[np.ndarray], biases: list[np.ndarray], points: np.ndarray, eps: list[float]
) -> float:
    """sum over layers of eps_l, the norms after the layer, and the largest (sum of quadrants' norms) / ||f(x)||."""
    total = 0.0
    n_layers = len(weights)
    for l in range(n_layers):
        after = 1.0
        for k in range(l + 1, n_layers):
            after *= max(np.sqrt((weights[k] ** 2).sum()), np.sqrt((pruned[k] ** 2).sum()))
        largest = 0.0
        for x in points:
            inputs, _, output = forward(weights, biases, x)
            a, w = inputs[l], weights[l]
            quadrants = [np.linalg.norm(np.maximum(s * w, 0) @ np.maximum(t * a, 0)) for s in (1, -1) for t in (1, -1)]
            largest = max(largest, sum(quadrants) / np.linalg.norm(output))
        total += after * largest * eps[l]
    return total
