"""What least squares needs of a layer: sums over the patches that both networks meet at it (T21).

For one row: patches x_p of the pruned network, gaps d_p = (dense output) - (pruned output), and a correction (c, b) of
its kept weights and its intercept. The squared error over n patches is
    sum_p (d_p - c x_p - b)^2 = dd - 2 c.dx - 2 b d + c xx c + 2 b c.x + n b^2,
with dd, dx, d, xx, x the sums of products. Both outputs are those at the same patch of the same point, each network
with its own inputs, so that a fit also compensates for the errors of earlier layers. Where a layer's output is added to
a residual stream, the error of the stream counts as the layer's own (`streams.py`).

The sums are float64, so chunks of any size may be added. The products of a chunk are float32, which would lose the
variation of inputs that lie far from 0: their mean is subtracted first and added back in float64. Where a GPU
multiplies TF32 several times as fast, a large xx is made of two TF32 products: each number is the sum of its 10 leading
bits, which TF32 holds exactly, and a rest. Other sums would take three products, which gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sipp.inputs import Weight, WeightUse, split_windows
from sipp.results import numerics

PATCHES_PER_FEATURE = 256  # neighbouring windows of an image are similar: beyond this number they are subsampled
FEWEST_POSITIONS = 4  # left along an axis that is subsampled

FAR = 16.0  # standard deviations: a mean closer to 0 costs float32 at most two of seven digits, and is not subtracted
TELLING = 8  # the fewest patches that show how far from 0 the inputs lie
ENOUGH = 256  # about as many patches are looked at

FAST_TF32 = ((8, 0), (9, 0), (10, 0))  # compute capabilities of GPUs that multiply TF32 much faster than float32
FEWEST_SPLIT = 1 << 32  # multiplications: smaller products take as long as their launches
LEADING_BITS = -(1 << 13)  # of a float32: sign, exponent and the 10 bits of the mantissa that TF32 has


@dataclass
class Moments:
    """The sums for R rows of each of G groups; they grow with `add_inputs` and `add_rows`."""

    xx_GKK: Tensor
    dx_GRK: Tensor
    x_GK: Tensor
    d_GR: Tensor
    dd_GR: Tensor
    yy_GR: Tensor  # squares of the dense output without its bias; errors are relative to it
    n: float  # patches that are real

    @staticmethod
    def zeros(n_groups: int, n_rows: int, fan_in: int, device: torch.device) -> Moments:
        """No patches yet; `n_rows` of each group."""
        g, r, k = n_groups, n_rows, fan_in
        shapes = (g, k, k), (g, r, k), (g, k), (g, r), (g, r), (g, r)
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.zeros(sum(sizes), dtype=numerics.BOUND_DTYPE, device=device).split(
            sizes
        )  # one launch for all of them
        xx, dx, x, d, dd, yy = (part.view(shape) for part, shape in zip(parts, shapes))
        return Moments(xx, dx, x, d, dd, yy, 0.0)

    def add_inputs(self, xx_GKK: Tensor, x_GK: Tensor, mean_GK1: Tensor | None = None, n: int = 0) -> None:
        """Adds the sums that do not depend on the rows, of n patches from which `mean_GK1` was subtracted, if given."""
        self.xx_GKK += xx_GKK
        self.x_GK += x_GK
        if mean_GK1 is not None:
            mean_GK1, x_GK1 = mean_GK1.to(numerics.BOUND_DTYPE), x_GK[..., None].to(numerics.BOUND_DTYPE)
            crossed_GKK = (x_GK1 + n / 2 * mean_GK1) @ mean_GK1.mT
            self.xx_GKK += crossed_GKK + crossed_GKK.mT
            self.x_GK += n * mean_GK1[..., 0]

    def add_rows(self, patches_GKP: Tensor, gap_GRP: Tensor, dense_GRP: Tensor, mean_GK1: Tensor | None = None) -> None:
        """Adds the sums that depend on the rows: of patches, gaps and dense outputs, all of them 0 at padding."""
        self.dx_GRK += gap_GRP @ patches_GKP.mT
        gap_GR = gap_GRP.sum(-1)
        if mean_GK1 is not None:
            self.dx_GRK += gap_GR[..., None].to(numerics.BOUND_DTYPE) @ mean_GK1.mT.to(numerics.BOUND_DTYPE)
        self.d_GR += gap_GR
        self.dd_GR += gap_GRP.square().sum(-1)
        self.yy_GR += dense_GRP.square().sum(-1)

    def rows(self, at: Tensor) -> Moments:
        """The sums of a few rows of each group."""
        d_GR, dd_GR, yy_GR = self.d_GR[:, at], self.dd_GR[:, at], self.yy_GR[:, at]
        return Moments(self.xx_GKK, self.dx_GRK[:, at], self.x_GK, d_GR, dd_GR, yy_GR, self.n)

    def aimed(self, a: float) -> Moments:
        """The sums with all gaps scaled by the error feedback a (T21)."""
        return self if a == 1 else replace(self, dx_GRK=a * self.dx_GRK, d_GR=a * self.d_GR, dd_GR=a * a * self.dd_GR)

    def centred(self) -> tuple[Tensor, Tensor]:
        """xx and dx about the means, for least squares with a free intercept."""
        xx_GKK = self.xx_GKK - self.x_GK[:, :, None] * self.x_GK[:, None, :] / self.n
        return xx_GKK, self.dx_GRK - self.d_GR[..., None] * self.x_GK[:, None, :] / self.n

    def intercept(self, change_GRK: Tensor) -> Tensor:
        """The best intercept (G x R) for a change of weights: the mean residual."""
        return (self.d_GR - (change_GRK @ self.x_GK[..., None])[..., 0]) / self.n

    def error(self, change_GRK: Tensor, shift_GR: Tensor) -> Tensor:
        """The squared error (G x R) of the rows with these changes of weights and intercepts."""
        by_x_GR = (change_GRK @ self.x_GK[..., None])[..., 0]
        quadratic_GR = ((change_GRK @ self.xx_GKK - 2 * self.dx_GRK) * change_GRK).sum(-1)
        found_GR = self.dd_GR + quadratic_GR + shift_GR * (2 * by_x_GR - 2 * self.d_GR + self.n * shift_GR)
        return found_GR.clamp(min=0)


RowBlock = tuple[int, int, int]  # first row, number of rows and number of groups of a use


@dataclass(frozen=True)
class UsePair:
    """One use of a weight in both networks, with the gap between the streams that its output is added to."""

    dense: WeightUse
    pruned: WeightUse
    stream: WeightUse | None


InputSums = tuple[Tensor, Moments]  # the windows of a use, and the sums over them that do not depend on rows


@dataclass
class WeightSums:
    """The sums of one weight on the fit points and on the validation points, per block of rows."""

    weight: Weight
    shares: bool  # other weights have the same input: the sums over it are made once
    chunk_bytes: int
    allow_tf32: bool
    fit: dict[RowBlock, Moments] = field(default_factory=dict)
    validation: dict[RowBlock, Moments] = field(default_factory=dict)
    obstacle: str = ""  # why the sums cannot be used
    is_far: bool | None = None  # whether its inputs lie far from 0; None: nothing has shown it yet

    def add(
        self, into: dict[RowBlock, Moments], pair: UsePair, dense: Tensor, pruned: Tensor, known: InputSums | None
    ) -> InputSums | None:
        """Adds one use to the fit or the validation sums of the weight with these values in the two networks.

        `known` are the sums over the input of the last use; those of this one are returned if they are shared. Products
        are in float32, or in float64 like the inputs; sums are float64.
        """
        use, weight, allow_tf32 = pair.pruned, self.weight, self.allow_tf32
        dtype = (
            numerics.BOUND_DTYPE
            if numerics.BOUND_DTYPE in (use.windows.dtype, pair.dense.windows.dtype)
            else numerics.SCORE_DTYPE
        )
        dense_GRK, rows_GRK = (
            weight.rows(values)[use.rows_of(weight)].unflatten(0, (use.windows.shape[1], -1)).to(dtype)
            for values in (dense, pruned)
        )
        n_groups, n_rows, fan_in = rows_GRK.shape
        key, device = (use.row_start, n_groups * n_rows, n_groups), rows_GRK.device
        if key not in into:
            into[key] = Moments.zeros(n_groups, n_rows, fan_in, device)
        moments = into[key]
        shared = known[1] if known is not None and known[0] is use.windows else None
        here = shared if shared is not None else moments
        if self.shares and shared is None:
            here = Moments.zeros(n_groups, 0, fan_in, device)
        is_padded = use.counts_B is not None or use.real_BP is not None
        for dense_GKP, patches_GKP, stream_GRP in _patches(weight, pair, dtype, self.chunk_bytes):
            with numerics.exact_matmul(use.windows, pruned, allow_tf32=allow_tf32):
                target_GRP = dense_GRK @ dense_GKP
                target_GRP = target_GRP if stream_GRP is None else target_GRP.add_(stream_GRP)
                gap_GRP = target_GRP - rows_GRK @ patches_GKP
            mean_GK1, n_patches = None, patches_GKP.shape[-1]
            if not is_padded:  # padding has to stay 0
                self.is_far = lie_far(patches_GKP) if self.is_far is None else self.is_far
                mean_GK1 = patches_GKP.mean(-1, keepdim=True) if self.is_far else None
                patches_GKP = patches_GKP if mean_GK1 is None else patches_GKP - mean_GK1
            if shared is None:
                operands = (use.windows,) if mean_GK1 is None else ()  # without their mean they are float32
                splits = not allow_tf32 and gains_by_split(use.windows, fan_in**2 * n_patches)
                with numerics.exact_matmul(*operands, allow_tf32=allow_tf32 or splits):
                    xx_GKK = squared(patches_GKP, is_split=splits)
                here.add_inputs(xx_GKK, patches_GKP.sum(-1), mean_GK1, n_patches)
            with numerics.exact_matmul(allow_tf32=allow_tf32):  # gaps are float32
                moments.add_rows(patches_GKP, gap_GRP, target_GRP, mean_GK1)
        if here is not moments:
            moments.add_inputs(here.xx_GKK, here.x_GK)
        moments.n += float(use.n_patches if use.counts_B is None else use.counts_B.sum())
        return (use.windows, here) if self.shares else None

    def solvable(self) -> tuple[list[RowBlock], str]:
        """The blocks of rows in order, and why they cannot be solved; empty if they can."""
        if self.obstacle:
            return [], self.obstacle
        if not self.fit or self.fit.keys() != self.validation.keys():
            return [], "no inputs reach it"
        keys, stop = sorted(self.fit), 0
        for start, n_rows, _ in keys:
            if start < stop:
                return [], "its uses take rows that overlap"
            stop = start + n_rows
        looked_at = [part[key] for part in (self.fit, self.validation) for key in keys]
        if any(moments.n == 0 for moments in looked_at):
            return [], "no inputs reach it"
        squares = torch.stack([one.sum() for m in looked_at for one in (m.xx_GKK, m.dd_GR, m.yy_GR)])
        # all sums are finite if those of squares are; inf and nan stay in a sum
        return (keys, "") if math.isfinite(squares.sum()) else ([], "its outputs or their squares are not finite")


def _patches(
    weight: Weight, pair: UsePair, dtype: torch.dtype, chunk_bytes: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """The patches of both networks (G x K x P) and the gap between their streams (G x R x P), in chunks."""
    n_rows_per_group = pair.pruned.n_rows_of(weight) // pair.pruned.n_groups
    per_window = numerics.BOUND_DTYPE.itemsize * (2 * weight.fan_in + 3 * n_rows_per_group)

    def chunks(use: WeightUse) -> Iterator[Tensor]:
        for _, windows in split_windows(use, bytes_per_window=per_window, chunk_bytes=chunk_bytes):
            yield _ordered(windows, use.n_position_dims, dtype)

    for dense_GKP, patches_GKP in zip(chunks(pair.dense), chunks(pair.pruned)) if pair.stream is None else ():
        yield dense_GKP, patches_GKP, None
    if pair.stream is not None:
        yield from zip(chunks(pair.dense), chunks(pair.pruned), chunks(pair.stream))


def _ordered(windows: Tensor, n_position_dims: int, dtype: torch.dtype) -> Tensor:
    """The windows as patches_GKP, in the order of `patches_of`; those of a linear layer are a view, not a copy."""
    n_last = 2 + n_position_dims
    ordered = windows.permute(1, *range(n_last, windows.ndim), 0, *range(2, n_last))
    return ordered.reshape(windows.shape[1], windows.shape[n_last:].numel(), -1).to(dtype)


def thinned(use: WeightUse, weight: Weight, n_points: int, phase: int) -> WeightUse:
    """Subsamples positions where all points have far too many, with another phase for each batch; not padded ones."""
    sizes = use.windows.shape[2 : 2 + use.n_position_dims]
    strides = _strides(sizes, math.prod(sizes) * n_points // (PATCHES_PER_FEATURE * weight.fan_in))
    if math.prod(strides) == 1 or use.counts_B is not None:
        return use
    taken = (slice(phase % stride, None, stride) for stride in strides)
    return replace(use, windows=use.windows[(slice(None), slice(None), *taken)])


def _strides(sizes: Sequence[int], too_many: int) -> list[int]:
    """Strides, powers of two, that subsample positions by a factor of at most `too_many`; 1 for sequences."""
    strides = [1] * len(sizes)
    while len(sizes) > 1 and 2 * math.prod(strides) <= too_many:
        axis = max(range(len(sizes)), key=lambda a: sizes[a] // strides[a])
        if sizes[axis] // strides[axis] < 2 * FEWEST_POSITIONS:
            break
        strides[axis] *= 2
    return strides


def lie_far(patches_GKP: Tensor) -> bool | None:
    """Whether a feature lies far from 0 compared with its variation; None: too few patches."""
    if (n_patches := patches_GKP.shape[-1]) < TELLING:
        return None
    deviation_GK, mean_GK = torch.std_mean(patches_GKP[..., :: -(-n_patches // ENOUGH) | 1], -1, correction=0)
    return bool((mean_GK.abs() > FAR * deviation_GK).any())


def gains_by_split(inputs: Tensor, n_multiplications: int) -> bool:
    """Whether an xx of this size is faster as the sum of two TF32 products."""
    is_large = inputs.is_cuda and inputs.dtype == numerics.SCORE_DTYPE and n_multiplications >= FEWEST_SPLIT
    return is_large and torch.cuda.get_device_capability(inputs.device) in FAST_TF32


def squared(patches_GKP: Tensor, *, is_split: bool) -> Tensor:
    """X X' of patches X; by two TF32 products if it is split.

    The product of the two rests is left out. At most 2^-19 of each product of two numbers is lost, so that a sum over
    many patches loses no more than by float32's own rounding.
    """
    if not is_split:
        return patches_GKP @ patches_GKP.mT
    leading_GKP = (patches_GKP.view(torch.int32) & LEADING_BITS).view(numerics.SCORE_DTYPE)
    crossed_GKK = leading_GKP @ (patches_GKP - leading_GKP).mT
    return (leading_GKP @ leading_GKP.mT).add_(crossed_GKK).add_(crossed_GKK.mT)
