"""Cuts the windows of a use into pieces of bounded size and lays each out as patches_GKP."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sipp.numerics import BOUND_DTYPE, SCORE_DTYPE
from sipp.records import Use


def split_windows(
    use: Use, *, bytes_per_patch: int, chunk_bytes: int, bytes_per_point: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Pieces of the use's windows that fit `chunk_bytes`: the points they belong to, and the windows.

    Cuts along the points first, then along the positions of a single point where one is too large.
    """
    n_points = len(use.windows)
    per_point = bytes_per_point + bytes_per_patch * _n_patches(use.windows, use.n_position_dims) // n_points
    step = max(1, chunk_bytes // max(1, per_point))
    for start in range(0, n_points, step):
        piece = use.windows[start : start + step]
        for part in _split_positions(piece, 2, use.n_position_dims, chunk_bytes // bytes_per_patch):
            yield slice(start, start + len(piece)), part


def patches_of(windows: Tensor, n_position_dims: int) -> Tensor:
    """The windows (B, G, *positions, *fan_in) as patches_GKP, P running over points and then positions: a fresh copy.

    Values are float32 (float64 for a float64 model, whose range may be wider).
    """
    position_dims = range(2, 2 + n_position_dims)
    fan_dims = range(2 + n_position_dims, windows.ndim)
    ordered = windows.permute(1, *fan_dims, 0, *position_dims)
    dtype = BOUND_DTYPE if windows.dtype == BOUND_DTYPE else SCORE_DTYPE
    patches = torch.empty(ordered.shape, dtype=dtype, device=windows.device).copy_(ordered)
    n_patches = windows.shape[0] * windows.shape[2 : 2 + n_position_dims].numel()
    return patches.view(windows.shape[1], windows.shape[2 + n_position_dims :].numel(), n_patches)


def _n_patches(windows: Tensor, n_position_dims: int) -> int:
    return windows.shape[: 2 + n_position_dims].numel()


def _split_positions(piece: Tensor, dim: int, n_position_dims: int, most: int) -> Iterator[Tensor]:
    """The piece cut along position dimension `dim` and the following ones until it has at most `most` patches."""
    n_patches = _n_patches(piece, n_position_dims)
    if n_patches <= most or dim == 2 + n_position_dims:
        yield piece
        return
    size = piece.shape[dim]
    step = max(1, size * most // n_patches)
    for start in range(0, size, step):
        part = piece.narrow(dim, start, min(step, size - start))
        yield from _split_positions(part, dim + 1, n_position_dims, most)
