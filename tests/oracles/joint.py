"""T21 by its definition, in numpy and float64: one system solved from scratch for each row of each round."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

DAMPING, RHO, ROUNDS_A_LOOK, MOST_ROUNDS, SETTLED = 0.01, 0.3, 3, 501, 0.1


def aim(x_PK: Array, dense_x_PK: Array, w_FK: Array, a: float, lost_PF: Array | float = 0.0) -> Array:
    """(1 - a) X^ W' + a X W' + a (s - s^), the last in the units of the layer's output."""
    found: Array = (1 - a) * x_PK @ w_FK.T + a * dense_x_PK @ w_FK.T + a * lost_PF
    return found


def refit(x_PK: Array, t_PF: Array, w_FK: Array, mask_FK: Mask, ridge: float, centred: bool) -> tuple[Array, Array]:
    """The rows on their masks that minimise ||t - v x - b||^2 + ridge * mean_j ||x_j||^2 * ||v - w||^2, and the b."""
    x_mid, t_mid = (x_PK.mean(0), t_PF.mean(0)) if centred else (np.zeros(x_PK.shape[1]), np.zeros(t_PF.shape[1]))
    x, t = x_PK - x_mid, t_PF - t_mid
    share = np.sqrt(ridge * np.square(x).sum(0).mean())
    v_FK = np.zeros_like(w_FK)
    for f, kept_K in enumerate(mask_FK):
        at = np.flatnonzero(kept_K)
        system = np.concatenate([x[:, at], share * np.eye(len(at))])
        wanted = np.concatenate([t[:, f], share * w_FK[f, at]])
        v_FK[f, at] = np.linalg.lstsq(system, wanted, rcond=None)[0]
    return v_FK, t_mid - v_FK @ x_mid


def largest(size_FK: Array, n_kept: int, pattern: tuple[int, int] | None, lives_F: Mask) -> Mask:
    """The mask of the largest numbers; n of every m; each living row its largest first."""
    mask_FK = np.zeros(size_FK.shape, bool)
    if pattern is not None:
        n, m = pattern
        for f in range(len(size_FK)):
            for start in range(0, size_FK.shape[1], m):
                best = np.argsort(-size_FK[f, start : start + m], kind="stable")[:n]
                mask_FK[f, start + best] = True
        return mask_FK
    for f in np.flatnonzero(lives_F):
        mask_FK[f, size_FK[f].argmax()] = True
    others = np.argsort(-np.where(mask_FK, -1.0, size_FK), axis=None, kind="stable")
    mask_FK.reshape(-1)[others[: n_kept - int(mask_FK.sum())]] = True
    return mask_FK


def search(
    x_PK: Array,
    t_PF: Array,
    w_FK: Array,
    mask_FK: Mask,
    centred: bool,
    pattern: tuple[int, int] | None = None,
    lives_F: Mask | None = None,
    growths: tuple[float, float, float] = (1.15, 1.1, 1.05),
) -> tuple[Mask, int]:
    """The mask that alternating directions end with, and the number of rounds.

    rho grows by the first of `growths` if more than a tenth of the mask changed or nothing, by the second if more than
    0.005 of it did, otherwise by the last.
    """
    if centred:
        x_PK, t_PF = x_PK - x_PK.mean(0), t_PF - t_PF.mean(0)
    n, fan_in = x_PK.shape
    lives_F = np.zeros(len(w_FK), bool) if lives_F is None else lives_F
    system = x_PK.T @ x_PK / n
    damping = DAMPING * np.diag(system).mean()
    system = system + damping * np.eye(fan_in)
    wanted_FK = t_PF.T @ x_PK / n + damping * w_FK
    scale_K = np.sqrt(np.diag(system))
    system, wanted_FK = system / np.outer(scale_K, scale_K), wanted_FK / scale_K
    n_kept, before_FK = int(mask_FK.sum()), mask_FK
    kept_FK, push_FK, rho = np.where(mask_FK, w_FK * scale_K, 0.0), np.zeros_like(w_FK), RHO
    for n_rounds in range(1, MOST_ROUNDS + 1):
        free_FK = np.linalg.solve(system + rho * np.eye(fan_in), (wanted_FK + rho * kept_FK - push_FK).T).T
        wish_FK = free_FK + push_FK / rho
        mask_FK = largest(np.abs(wish_FK), n_kept, pattern, lives_F)
        kept_FK = np.where(mask_FK, wish_FK, 0.0)
        push_FK = push_FK + rho * (free_FK - kept_FK)
        if n_rounds % ROUNDS_A_LOOK == 0:
            changed = int((mask_FK & ~before_FK).sum())
            if changed == 0 and np.linalg.norm(free_FK - kept_FK) <= SETTLED * np.linalg.norm(kept_FK):
                return mask_FK, n_rounds
            share = changed / n_kept
            rho *= growths[0 if share > 0.1 or share == 0 else 1 if share > 0.005 else 2]
            before_FK = mask_FK
    return mask_FK, MOST_ROUNDS
