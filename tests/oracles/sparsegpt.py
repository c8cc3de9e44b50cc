"""SparseGPT by its definition, in numpy and float64: the inverse of what is left of H, made anew for each column."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

BLOCK, DAMPING = 128, 0.01


def sparsegpt(x_PK: Array, w_FK: Array, n_kept: int, pattern: tuple[int, int] | None) -> tuple[Mask, Array]:
    """The mask and the values. Each block of columns keeps an even part of the budget, each group of m its best n."""
    system = x_PK.T @ x_PK
    met_K = np.diag(system) > 0
    system = system + np.diag(np.where(met_K, DAMPING * np.diag(system).mean(), 1.0))
    n_rows, fan_in = w_FK.shape
    left_FK, mask_FK = np.where(met_K, w_FK, 0.0), np.zeros(w_FK.shape, bool)
    step = BLOCK if pattern is None else BLOCK // pattern[1] * pattern[1]
    stiff_K = np.array([1 / np.linalg.inv(system[j:, j:])[0, 0] for j in range(fan_in)])
    for j in range(fan_in):
        if pattern is None and j % step == 0:
            ends = [n_rows * end * n_kept // w_FK.size for end in (j, min(j + step, fan_in))]
            score = left_FK[:, j : j + step] ** 2 * stiff_K[j : j + step]
            best = np.argsort(-score, axis=None, kind="stable")[: ends[1] - ends[0]]
            kept = np.zeros(score.size, bool)
            kept[best] = True
            mask_FK[:, j : j + step] = kept.reshape(score.shape)
        if pattern is not None and j % step % pattern[1] == 0:
            n, m = pattern
            stop = min(j + m, j // step * step + step, fan_in)
            for f in range(n_rows):
                score = left_FK[f, j:stop] ** 2 * stiff_K[j:stop]
                mask_FK[f, j + np.argsort(-score, kind="stable")[:n]] = True
        inverse = np.linalg.inv(system[j:, j:])
        lost_F = np.where(mask_FK[:, j], 0.0, left_FK[:, j])
        left_FK[:, j:] -= np.outer(lost_F / inverse[0, 0], inverse[0])
    return mask_FK, np.where(mask_FK, left_FK, 0.0)
