"""Least squares by numpy in float64, one row at a time, and the patches of a convolution cut out one by one."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def refit_row(
    x_PK: Array, gap_P: Array, kept_K: npt.NDArray[np.bool_], ridge: float, has_intercept: bool
) -> tuple[Array, float]:
    """The change of a row's kept weights, and its intercept, that fit the gap; `ridge` times its square is added."""
    centre_K = x_PK.mean(0) if has_intercept else np.zeros(x_PK.shape[1])
    middle = float(gap_P.mean()) if has_intercept else 0.0
    inside = x_PK - centre_K
    used = np.flatnonzero(kept_K & (np.square(inside).sum(0) > 0))
    change_K = np.zeros(x_PK.shape[1])
    if len(used):
        system = np.concatenate([inside[:, used], np.sqrt(ridge) * np.eye(len(used))])
        wanted = np.concatenate([gap_P - middle, np.zeros(len(used))])
        change_K[used] = np.linalg.lstsq(system, wanted, rcond=None)[0]
    return change_K, middle - float(centre_K @ change_K) if has_intercept else 0.0


def conv_patches(
    image_CS: Array,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Array:
    """(P, C * prod(kernel)): the windows of one zero-padded image, in the order of the output's positions."""
    padded = np.pad(image_CS, [(0, 0), *((p, p) for p in padding)])
    sizes = padded.shape[1:]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(sizes, kernel, stride, dilation)]
    found = []
    for at in itertools.product(*map(range, counts)):
        window = tuple(slice(a * s, a * s + d * (k - 1) + 1, d) for a, s, k, d in zip(at, stride, kernel, dilation))
        found.append(padded[(slice(None), *window)].reshape(-1))
    return np.stack(found)
