"""The sums that the least squares of a layer needs, over its patches in both networks (T21).

For one row: patches x_p of the pruned network, gaps d_p = (dense output) - (pruned output), and a correction (c, b) of
its kept weights and its intercept. The squared error over n patches is
    sum_p (d_p - c x_p - b)^2 = dd - 2 c.dx - 2 b d + c xx c + 2 b c.x + n b^2,
with dd, dx, d, xx, x the sums of products. Both outputs are those at the same patch of the same point, each network
with its own inputs, so that a fit also compensates for the errors of earlier layers. Where a layer's output is added to
a residual stream, the error of the stream counts as the layer's own.

The sums are float64, so chunks of any size may be added. The products of a chunk are float32, which would lose the
variation of inputs that lie far from 0: their mean is subtracted first and added back in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sipp.inputs import (
    Batch,
    ModelMap,
    Residual,
    Watch,
    Weight,
    WeightUse,
    is_residual,
    split_windows,
    with_padding_zeroed,
)
from sipp.results import numerics

PATCHES_PER_FEATURE = 256  # neighbouring windows of an image are similar: beyond this number they are subsampled
FEWEST_POSITIONS = 4  # left along an axis that is subsampled

SMALLEST_SCALE = 1e-2  # of the largest: rows that a norm scales by less correct nothing


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

    def add_inputs(self, patches_GKP: Tensor, mean_GK1: Tensor) -> None:
        """Adds the sums that do not depend on the rows, of patches from which this mean was subtracted."""
        x_GK, n = patches_GKP.sum(-1), patches_GKP.shape[-1]
        self.xx_GKK += patches_GKP @ patches_GKP.mT
        self.x_GK += x_GK
        mean_GK1, x_GK1 = mean_GK1.to(numerics.BOUND_DTYPE), x_GK[..., None].to(numerics.BOUND_DTYPE)
        crossed_GKK = (x_GK1 + n / 2 * mean_GK1) @ mean_GK1.mT
        self.xx_GKK += crossed_GKK + crossed_GKK.mT
        self.x_GK += n * mean_GK1[..., 0]

    def add_rows(self, patches_GKP: Tensor, gap_GRP: Tensor, dense_GRP: Tensor, mean_GK1: Tensor) -> None:
        """Adds the sums that depend on the rows: of such patches, gaps and dense outputs, which are 0 at padding."""
        self.dx_GRK += gap_GRP @ patches_GKP.mT
        gap_GR = gap_GRP.sum(-1)
        self.dx_GRK += gap_GR[..., None].to(numerics.BOUND_DTYPE) @ mean_GK1.mT.to(numerics.BOUND_DTYPE)
        self.d_GR += gap_GR
        self.dd_GR += gap_GRP.square().sum(-1)
        self.yy_GR += dense_GRP.square().sum(-1)

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


RowRange = tuple[int, int, int]  # first row, number of rows and number of groups of a use


@dataclass(frozen=True)
class UsePair:
    """One use of a weight in both networks, with the gap between the streams that its output is added to."""

    dense: WeightUse
    pruned: WeightUse
    stream: WeightUse | None


InputSums = tuple[Tensor, Moments]  # the windows of a use, and the sums over them that do not depend on rows


@dataclass
class WeightSums:
    """The sums of one weight on the fit points and on the validation points, by range of rows."""

    weight: Weight
    shares: bool  # other weights have the same input: the sums over it are made once
    chunk_bytes: int
    allow_tf32: bool
    fit: dict[RowRange, Moments] = field(default_factory=dict)
    validation: dict[RowRange, Moments] = field(default_factory=dict)
    obstacle: str = ""  # why the sums cannot be used

    def add(
        self, into: dict[RowRange, Moments], pair: UsePair, dense: Tensor, pruned: Tensor, known: InputSums | None
    ) -> InputSums | None:
        """Adds one use to the fit or the validation sums of the weight with these values in the two networks.

        `known` are the sums over the input of the last use; those of this one are returned if they are shared.
        """
        use, weight = pair.pruned, self.weight
        is_double = numerics.BOUND_DTYPE in (use.windows.dtype, pair.dense.windows.dtype)
        dtype = numerics.BOUND_DTYPE if is_double else numerics.SCORE_DTYPE
        dense_GRK, rows_GRK = (
            weight.rows(values)[use.rows_of(weight)].unflatten(0, (use.n_groups, -1)).to(dtype)
            for values in (dense, pruned)
        )
        n_groups, n_rows, fan_in = rows_GRK.shape
        key, device = (use.row_start, n_groups * n_rows, n_groups), rows_GRK.device
        if key not in into:
            into[key] = Moments.zeros(n_groups, n_rows, fan_in, device)
        moments = into[key]
        shared = known[1] if known is not None and known[0] is use.windows else None
        inputs = shared
        if inputs is None:
            inputs = Moments.zeros(n_groups, 0, fan_in, device) if self.shares else moments
        for dense_GKP, patches_GKP, stream_GRP in _patches(weight, pair, dtype, self.chunk_bytes):
            with numerics.exact_matmul(use.windows, pruned, allow_tf32=self.allow_tf32):
                target_GRP = dense_GRK @ dense_GKP
                target_GRP = target_GRP if stream_GRP is None else target_GRP.add_(stream_GRP)
                gap_GRP = target_GRP - rows_GRK @ patches_GKP
            mean_GK1 = patches_GKP.mean(-1, keepdim=True)
            patches_GKP = patches_GKP - mean_GK1
            with numerics.exact_matmul(allow_tf32=self.allow_tf32):  # gaps, and patches about their mean, are float32
                if shared is None:
                    inputs.add_inputs(patches_GKP, mean_GK1)
                moments.add_rows(patches_GKP, gap_GRP, target_GRP, mean_GK1)
        if self.shares:
            moments.xx_GKK += inputs.xx_GKK
            moments.x_GK += inputs.x_GK
        moments.n += float(use.n_patches if use.counts_B is None else use.counts_B.sum())
        return (use.windows, inputs) if self.shares else None

    def solvable(self) -> tuple[list[RowRange], str]:
        """The ranges of rows in order, and why they cannot be solved; empty if they can."""
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

    streams = repeat(None) if pair.stream is None else chunks(pair.stream)
    yield from zip(chunks(pair.dense), chunks(pair.pruned), streams)


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


# --- Residual streams: what the output of a layer is added to, as patches of the layer ------------------------------


def streams_in(found: ModelMap, *, inputs_differ: bool) -> dict[str, Residual]:
    """By weight, the residual stream to which its layer's output is added and which depends on earlier weights.

    With `inputs_differ`, weights of earlier blocks count too, which made the inputs.
    """
    return {weight: one for weight, one in found.residuals.items() if one.latest or (inputs_differ and one.of_inputs)}


@contextmanager
def meeting_streams(
    model: nn.Module, streams: Mapping[str, Residual], on_stream: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """A context for one run that calls `on_stream` with each weight's stream, a copy, when it is met."""
    n_left: dict[str, int] = {}  # sums to go, by weight whose layer has been called

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if n_left and is_residual(function, args):
            for weight in list(n_left):
                n_left[weight] -= 1
                if n_left[weight] == 0:
                    del n_left[weight]
                    on_stream(weight, args[streams[weight].at].detach().clone())
        return function(*args, **kwargs)

    def called(weight: str) -> Callable[..., None]:
        return lambda module, args, output: n_left.update({weight: streams[weight].nth})

    with ExitStack() as stack:
        for weight, one in streams.items():
            stack.callback(model.get_submodule(one.module).register_forward_hook(called(weight)).remove)
        stack.enter_context(Watch(run))
        yield


def stream_as_use(model: nn.Module, stream: Residual, tensor: Tensor, like: WeightUse, batch: Batch) -> WeightUse:
    """A stream in units of the layer's output, laid out like a use of it, with rows in place of the fan-in."""
    module = model.get_submodule(stream.module)
    tensor = _in_units_of_output(model, stream, module, tensor)
    n_blocks = len(like.windows)  # the points; 1 if they cannot be told apart
    if isinstance(module, _ConvNd):
        if tensor.ndim == len(module.kernel_size) + 1:  # one image without a batch dimension
            tensor = tensor[None]
        images = tensor.unflatten(0, (n_blocks, -1)).movedim(2, 1)  # B x F x images x size
        windows = images.unflatten(1, (module.groups, -1)).movedim(2, -1)
        return WeightUse("", windows, n_position_dims=len(module.kernel_size) + 1)
    if isinstance(module, nn.MultiheadAttention) and tensor.ndim == 3 and not module.batch_first:
        tensor = tensor.transpose(0, 1)
    use = WeightUse("", tensor.reshape(n_blocks, 1, -1, tensor.shape[-1]), attributed=like.attributed)
    return with_padding_zeroed(use, batch)


def _in_units_of_output(model: nn.Module, stream: Residual, module: nn.Module, tensor: Tensor) -> Tensor:
    """The stream divided by the scales of the norms behind the layer, row by row."""
    if not stream.norms:
        return tensor
    scale_F = torch.ones((), dtype=torch.float64, device=tensor.device)
    for name in stream.norms:
        norm: Any = model.get_submodule(name)
        by_norm_F = (norm.running_var.double() + norm.eps).rsqrt()
        scale_F = scale_F * (by_norm_F if norm.weight is None else by_norm_F * norm.weight.detach().double())
    is_large_F = scale_F.abs() > SMALLEST_SCALE * scale_F.abs().max()
    factor_F = torch.where(is_large_F, scale_F.reciprocal(), 0.0).to(tensor.dtype)
    return tensor * factor_F.view(-1, *[1] * (tensor.ndim - 2 if isinstance(module, _ConvNd) else 0))
