"""Upper bounds, in float64, on the norms of layers and pooling as linear maps (T13).

A bound here is on the linear MAP, not on the kernel tensor: the 3 x 3 all-ones kernel has Frobenius norm 3 but
stretches some images almost ninefold. Every number comes from a full decomposition and is rounded up; power iteration
converges from below and is never a bound.

Axes: G groups, F rows of one group, C input channels of one group, T taps of the kernel, Q frequencies, R aliases.
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

# Relative slack that turns a float64 decomposition (error about 1e-12 at worst) into an upper bound.
ROUND_UP = 1.0 + 1e-9
# The frequencies are taken in blocks of at most this many complex entries (64 MiB).
BLOCK_ENTRIES = 1 << 22
# Above this many multiply-adds (about a minute on one core) only the windows are counted.
MAX_TRANSFER_WORK = 1e11


def linear_norm(weight_FK: Tensor) -> float:
    """The largest singular value of a matrix, rounded up."""
    weight_FK, scale = _normalised(weight_FK)
    return _sigma(weight_FK) * scale * ROUND_UP if 0 < scale < math.inf else scale


def conv_norm(
    weight: Tensor,
    *,
    input_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> float:
    """An upper bound on the norm of a zero-padded convolution (any rank) as a linear map on images of this size.

    `weight` is (rows, channels per group, *kernel). A grouped convolution is block diagonal: its norm is that of its
    worst group.
    """
    weight, scale = _normalised(weight)
    if not 0 < scale < math.inf:
        return scale
    kernel = weight.shape[2:]
    weight_GFCT = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    cover = math.prod(
        _cover(k, s, d, (n + 2 * p - d * (k - 1) - 1) // s + 1)
        for n, k, s, p, d in zip(input_size, kernel, stride, padding, dilation)
    )
    # A window's output is at most sigma_1(W) times the window, and the windows hold an input at most `cover` times.
    norm = math.sqrt(cover) * _sigma(weight_GFCT.flatten(2))
    if cover > 1:
        # On a circle this long the padding reads only zeros, and windows that coincide on it read only zeros: the map
        # is a part of the circular convolution. T13's n + p for stride 1, extended to strides, dilations, any padding.
        grid = [-(-(n + p) // s) * s for n, p, s in zip(input_size, padding, stride)]
        norm = min(norm, _transfer_norm(weight_GFCT, kernel, grid, stride, dilation))
    return norm * scale * ROUND_UP


def average_pool_norm(
    input_size: Sequence[int],
    *,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> float:
    """The operator norm of average pooling, rounded up: the product of its norms along the axes (it is separable)."""
    norm = 1.0
    for n, k, s, p in zip(input_size, kernel, stride, padding):
        unit = torch.eye(n, dtype=torch.float64, device="cpu").unsqueeze(1)
        norm *= _sigma(F.avg_pool1d(unit, k, s, p, ceil_mode, count_include_pad).squeeze(1))
    return norm * ROUND_UP


def max_pool_gain(
    *, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], n_out: Sequence[int]
) -> float:
    """The Lipschitz constant of max pooling: sqrt of the number of windows that can hold one input.

    |max a - max b| <= ||a - b|| within a window, and an input is in at most m windows along each axis.
    """
    return math.sqrt(math.prod(_cover(k, s, d, n) for k, s, d, n in zip(kernel, stride, dilation, n_out)))


def _transfer_norm(
    weight_GFCT: Tensor, kernel: Sequence[int], grid: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> float:
    """The norm of a strided circular convolution on `grid` (each axis a multiple of its stride); inf if too costly.

    Without stride it is the largest sigma_1 of H(q) = sum_t W_t exp(2 pi i q.t d / N) over the frequencies q. With
    stride s the frequencies q, q + N/s, .. fold onto one output frequency: sigma_1 of [H H ..] / sqrt(s) side by side.
    """
    n_groups, n_rows, n_channels, _ = weight_GFCT.shape
    coarse = [n // s for n, s in zip(grid, stride)]
    n_aliases = math.prod(stride)
    # The kernel is real, so q and -q give the same norm: half of the last axis is enough.
    n_frequencies = math.prod([*coarse[:-1], coarse[-1] // 2 + 1])
    small, large = sorted((n_rows, n_channels * n_aliases))
    if n_groups * n_frequencies * small**2 * (large + small) > MAX_TRANSFER_WORK:
        return math.inf
    device = weight_GFCT.device
    dilation_A = torch.tensor(dilation, dtype=torch.int64, device=device)
    taps_TA = _cartesian([range(k) for k in kernel], device) * dilation_A
    frequencies_QA = _cartesian([*map(range, coarse[:-1]), range(coarse[-1] // 2 + 1)], device)
    shifts_RA = _cartesian([range(0, n, m) for n, m in zip(grid, coarse)], device)
    grid_A = torch.tensor(grid, dtype=torch.int64, device=device)
    weight_complex = weight_GFCT.to(torch.complex128)
    block = max(1, BLOCK_ENTRIES // (n_groups * n_rows * n_channels * n_aliases))
    largest = 0.0
    for block_QA in frequencies_QA.split(block):
        indices_QRA = block_QA.unsqueeze(1) + shifts_RA
        # Integers modulo the grid first: the angle stays exact whatever the frequency.
        turns_QRT = ((indices_QRA.unsqueeze(2) * taps_TA).remainder(grid_A) / grid_A.double()).sum(dim=-1)
        phases_QRT = torch.polar(torch.ones_like(turns_QRT), 2.0 * math.pi * turns_QRT)
        transfer = torch.einsum("gfct,qrt->gqfcr", weight_complex, phases_QRT).flatten(3)
        largest = max(largest, _sigma(transfer))
    return largest / math.sqrt(n_aliases)


def _sigma(matrices: Tensor) -> float:
    """The largest singular value among a batch of matrices, by the eigenvalues of the smaller Gram matrix."""
    gram = matrices @ matrices.mH if matrices.shape[-2] <= matrices.shape[-1] else matrices.mH @ matrices
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram)[..., -1].max()), 0.0))


def _normalised(weight: Tensor) -> tuple[Tensor, float]:
    """The weight in float64 divided by its largest magnitude, and that magnitude (infinite with NaN in the weight).

    No square of it can over- or underflow.
    """
    weight = weight.detach().to(torch.float64)
    scale = float(weight.abs().max()) if weight.numel() else 0.0
    return weight / (scale or 1.0), math.inf if math.isnan(scale) else scale


def _cover(kernel: int, stride: int, dilation: int, n_out: int) -> int:
    """m of T13, the most windows that hold one input along an axis, never more than there are windows."""
    # Tap t meets input i when t * d = i modulo s: every (s / gcd)-th tap.
    return min(-(-kernel * math.gcd(stride, dilation) // stride), max(n_out, 1))


def _cartesian(ranges: Sequence[range], device: torch.device) -> Tensor:
    """All index tuples of the ranges, one per row."""
    return torch.tensor(list(product(*ranges)), dtype=torch.int64, device=device)
