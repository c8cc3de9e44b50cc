"""Runs the dense and the pruned network on the same points, and sums all that the fit of a few weights needs.

Both networks' outputs of a layer are compared at the same patches of the same points. Each network has its own inputs
there, so that a fit also compensates for the errors of earlier layers. Where a layer's output is added to a residual
stream, the error of the stream counts as the layer's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from sipp.inputs import (
    Batch,
    StopForward,
    Weight,
    WeightUse,
    n_groups_of,
    n_patches_of,
    n_rows_of,
    rows_of,
    split_windows,
    to_rows,
)
from sipp.repairing.moments import Moments, WeightMoments, gains_by_split, lie_far, squared
from sipp.repairing.parts import Part, Side
from sipp.repairing.streams import Stream, reading, stream_as_use
from sipp.results import numerics

NOT_ALIGNED = "the pruned network sends it other inputs (tokens routed differently?)"
PATCHES_PER_FEATURE = 256  # neighbouring windows of an image are similar: beyond this number they are subsampled
FEWEST_POSITIONS = 4  # left along an axis that is subsampled


@dataclass(frozen=True)
class Both:
    """The dense network and the pruned one, whose weights change as they are fitted."""

    dense: Side
    pruned: Side
    weights: Mapping[str, Weight]
    n_uses: Mapping[str, int]  # of each weight in a run; not of those whose number may depend on the inputs
    streams: Mapping[str, Stream]  # by weight: those that are corrected
    n_fit_batches: int  # they come first; the others validate
    chunk_bytes: int
    far: dict[str, bool] = field(default_factory=dict)  # whether the inputs of a weight lie far from 0

    @property
    def n_points(self) -> int:
        return sum(batch.n_points for batch in self.dense.batches)


def sums_of(both: Both, part: Part, names: Sequence[str]) -> dict[str, WeightMoments]:
    """The sums of some weights of a part that have the same input, with the pruned network as it is now."""
    sums = {name: WeightMoments() for name in names}
    for i in range(len(both.dense.batches)):
        dense, pruned = (_met(both, side, part, names, i) for side in (both.dense, both.pruned))
        known = None  # the sums over inputs that the weight before has made
        for name in names:
            uses, other_uses = dense.uses[name], pruned.uses[name]
            streams = _stream_gap(both, name, dense, pruned, i)
            if [u.windows.shape for u in uses] != [u.windows.shape for u in other_uses] or streams is None:
                sums[name].obstacle = NOT_ALIGNED
            for one in zip(uses, other_uses, streams or ()) if not sums[name].obstacle else ():
                shares = len(names) > 1
                known = _add(both, sums[name], both.weights[name], i, one, known, shares=shares)
    return sums


@dataclass
class _Met:
    """What a run has met: the uses of some weights, with copies of what they read, and streams."""

    uses: dict[str, list[WeightUse]]
    streams: dict[str, Tensor] = field(default_factory=dict)


def _met(both: Both, side: Side, part: Part, names: Sequence[str], i: int) -> _Met:
    """Runs a part of one network on batch i as far as it is needed."""
    met = _Met({name: [] for name in names})
    streams = {name: both.streams[name] for name in names if name in both.streams}
    n_left = sum(both.n_uses[name] for name in names) if all(name in both.n_uses for name in names) else math.inf
    last: tuple[Tensor, Tensor] | None = None  # the windows of the last use, as they were given and as they are kept

    def stop_at_last() -> None:
        if n_left == 0 and len(met.streams) == len(streams):
            raise StopForward

    def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
        nonlocal n_left, last
        if weight.name not in met.uses:
            return
        use = thinned(use, weight, both.n_points, i)
        if last is None or not _are_same(last[0], use.windows):  # the weights of a group read the same
            last = use.windows, use.windows if use.is_own_copy else use.windows.clone()
        met.uses[weight.name].append(replace(use, windows=last[1]))
        n_left -= 1
        stop_at_last()

    def on_stream(name: str, stream: Tensor) -> None:
        met.streams[name] = stream
        stop_at_last()

    with reading(side.model, streams, on_stream) if streams else nullcontext():
        side.run(part, i, side.layers_of(names), on_use)
    return met


def _are_same(a: Tensor, b: Tensor) -> bool:
    """Whether these are views of the same numbers."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def thinned(use: WeightUse, weight: Weight, n_points: int, phase: int) -> WeightUse:
    """Subsamples positions where all points have far too many, with another phase for each batch; not padded ones."""
    sizes = use.windows.shape[2 : 2 + use.n_position_dims]
    strides = _strides(sizes, math.prod(sizes) * n_points // (PATCHES_PER_FEATURE * weight.fan_in))
    if math.prod(strides) == 1 or use.counts_B is not None:
        return use
    taken = (slice(phase % stride, None, stride) for stride in strides)
    return replace(use, windows=use.windows[(slice(None), slice(None), *taken)])


def _strides(sizes: Sequence[int], too_many: int) -> tuple[int, ...]:
    """Strides, powers of two, that subsample positions by a factor of at most `too_many`; 1 for sequences."""
    strides = [1] * len(sizes)
    while len(sizes) > 1 and 2 * math.prod(strides) <= too_many:
        axis = max(range(len(sizes)), key=lambda a: sizes[a] // strides[a])
        if sizes[axis] // strides[axis] < 2 * FEWEST_POSITIONS:
            break
        strides[axis] *= 2
    return tuple(strides)


def _stream_gap(both: Both, name: str, dense: _Met, pruned: _Met, i: int) -> list[WeightUse | None] | None:
    """By use, the dense stream minus the pruned one, like the layer's output; None if they cannot be compared."""
    if name not in both.streams:
        return [None] * len(dense.uses[name])
    found = dense.streams.get(name), pruned.streams.get(name)
    if found[0] is None or found[1] is None or found[0].shape != found[1].shape or len(dense.uses[name]) != 1:
        return None
    like = dense.uses[name][0]
    use = stream_as_use(both.pruned.model, both.streams[name], found[0] - found[1], like, both.pruned.batches[i])
    use = thinned(use, both.weights[name], both.n_points, i)
    is_like = use.windows.shape[: 2 + use.n_position_dims] == like.windows.shape[: 2 + like.n_position_dims]
    return [use] if is_like else None


_Uses = tuple[WeightUse, WeightUse, WeightUse | None]  # dense, pruned, and the gap between their streams


def _add(
    both: Both,
    sums: WeightMoments,
    weight: Weight,
    i: int,
    uses: _Uses,
    known: tuple[Tensor, Moments] | None,
    *,
    shares: bool,
) -> tuple[Tensor, Moments] | None:
    """Adds one use to the sums of a weight; returns its windows with the sums over them, which others may share.

    `known` are those of the last use. Products are in float32, or in float64 like the inputs; sums are float64.
    """
    dense_use, use, _ = uses
    dtype = (
        numerics.BOUND_DTYPE
        if numerics.BOUND_DTYPE in (use.windows.dtype, dense_use.windows.dtype)
        else numerics.SCORE_DTYPE
    )
    parameter = both.pruned.model.get_parameter(weight.name)
    dense_GRK, rows_GRK = (_rows(side.model, weight, use).to(dtype) for side in (both.dense, both.pruned))
    n_groups, n_rows, _ = rows_GRK.shape
    into = sums.fit if i < both.n_fit_batches else sums.validation
    moments = into.setdefault(
        (use.row_start, n_groups * n_rows, n_groups),
        Moments.zeros(n_groups, n_rows, weight.fan_in, rows_GRK.device),
    )
    shared = known[1] if known is not None and known[0] is use.windows else None
    here = shared if shared is not None else moments
    if shares and shared is None:
        here = Moments.zeros(n_groups, 0, weight.fan_in, rows_GRK.device)
    is_padded, allow_tf32 = use.counts_B is not None or use.real_BP is not None, both.dense.allow_tf32
    for dense_GKP, patches_GKP, stream_GRP in _patches(both, weight, uses, dtype):
        with numerics.exact_matmul(use.windows, parameter, allow_tf32=allow_tf32):
            target_GRP = dense_GRK @ dense_GKP
            target_GRP = target_GRP if stream_GRP is None else target_GRP.add_(stream_GRP)
            gap_GRP = target_GRP - rows_GRK @ patches_GKP
        mean_GK1 = None
        if not is_padded and _lies_far(both, weight, patches_GKP):  # padding has to stay 0
            mean_GK1 = patches_GKP.mean(-1, keepdim=True)
            patches_GKP = patches_GKP - mean_GK1
        if shared is None:
            n_patches = patches_GKP.shape[-1]
            operands = (use.windows,) if mean_GK1 is None else ()  # without their mean they are float32
            n_products = weight.fan_in**2 * n_patches
            splits = not allow_tf32 and gains_by_split(use.windows.device, use.windows.dtype, n_products)
            with numerics.exact_matmul(*operands, allow_tf32=allow_tf32 or splits):
                xx_GKK = squared(patches_GKP, is_split=splits)
            here.add_inputs(xx_GKK, patches_GKP.sum(-1), mean_GK1, n_patches)
        with numerics.exact_matmul(allow_tf32=allow_tf32):  # gaps are float32
            moments.add_rows(patches_GKP, gap_GRP, target_GRP, mean_GK1)
    if here is not moments:
        moments.add_inputs(here.xx_GKK, here.x_GK)
    moments.n += float(n_patches_of(use) if use.counts_B is None else use.counts_B.sum())
    return (use.windows, here) if shares else None


def _patches(
    both: Both, weight: Weight, uses: _Uses, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """The patches of both networks (G x K x P) and the gap between their streams (G x R x P), in chunks."""
    n_rows_per_group = n_rows_of(uses[1], weight) // n_groups_of(uses[1])
    per_window = numerics.BOUND_DTYPE.itemsize * (2 * weight.fan_in + 3 * n_rows_per_group)

    def chunks(use: WeightUse) -> Iterator[Tensor]:
        for _, windows in split_windows(use, bytes_per_window=per_window, chunk_bytes=both.chunk_bytes):
            yield _ordered(windows, use.n_position_dims, dtype)

    dense_use, use, stream = uses
    for dense_GKP, patches_GKP in zip(chunks(dense_use), chunks(use)) if stream is None else ():
        yield dense_GKP, patches_GKP, None
    if stream is not None:
        yield from zip(chunks(dense_use), chunks(use), chunks(stream))


def _ordered(windows: Tensor, n_position_dims: int, dtype: torch.dtype) -> Tensor:
    """The windows as patches_GKP, in the order of `patches_of`; those of a linear layer are a view, not a copy."""
    n_last = 2 + n_position_dims
    ordered = windows.permute(1, *range(n_last, windows.ndim), 0, *range(2, n_last))
    return ordered.reshape(windows.shape[1], windows.shape[n_last:].numel(), -1).to(dtype)


def _lies_far(both: Both, weight: Weight, patches_GKP: Tensor) -> bool:
    """Whether the weight's inputs lie far from 0; decided once."""
    if weight.name not in both.far and (found := lie_far(patches_GKP)) is not None:
        both.far[weight.name] = found
    return both.far.get(weight.name, False)


def _rows(model: nn.Module, weight: Weight, use: WeightUse) -> Tensor:
    """The rows of the use's groups (G x R x K) in the current model."""
    rows_FK = to_rows(weight, model.get_parameter(weight.name).detach())
    return rows_FK[rows_of(use, weight)].unflatten(0, (use.windows.shape[1], -1))
