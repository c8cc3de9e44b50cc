"""Runs the dense and the pruned network on the same points, and sums the moments that the fit of a few weights needs.

Both networks' outputs of a layer are compared at the same patches of the same points. Each network has its own inputs
there, so that a fit also compensates for the errors of earlier layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from sipp.errors import DataError
from sipp.inputs.capture import OnUse
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.patches import n_groups_of, n_patches_of, n_rows_of, split_windows
from sipp.inputs.restore import StopForward
from sipp.inputs.trace import read_uses
from sipp.repairing.layer_usage import LayerUsage, Targets
from sipp.repairing.moments import Moments, RowBlock, WeightMoments, gains_by_split, lie_far, squared
from sipp.repairing.replaying import Replay, gives_zeros
from sipp.repairing.residual_connections import ResidualInputs, reading_residual_inputs
from sipp.results.batches import Batch, WeightUse
from sipp.results.numerics import BOUND_DTYPE, SCORE_DTYPE, exact_matmul, float32_products, same_tensor
from sipp.results.ranking import Weight, to_rows

_NOT_ALIGNED = "the pruned network sends it other inputs (tokens routed differently?)"


@dataclass(frozen=True)
class Side:
    """One of the two networks: the module that is run, its layers, its batches, and the outputs that are final."""

    model: nn.Module
    run: nn.Module  # the model, or one of its blocks on the states before it
    layers: tuple[PrunableLayer, ...]
    batches: Sequence[Batch]
    replay: Replay


@dataclass(frozen=True)
class NetworkPair:
    """The dense and the pruned network, or one block of both, at the same points.

    All weights of a pair are fitted, in the order of execution, before the next pair is made.
    """

    dense: Side
    pruned: Side  # its weights change between calls
    n_fit_batches: int  # they come first; the others validate
    usage: LayerUsage
    chunk_bytes: int
    allow_tf32: bool  # in products and passes on a GPU
    inputs_differ: bool  # earlier weights were fitted, so that the pruned network has other inputs
    finished: set[str] = field(default_factory=set)  # weights that do not change any more

    @property
    def names(self) -> tuple[str, ...]:
        """The weights, in the order of execution."""
        return tuple(name for group in self.usage.groups for name in group)

    def dense_outputs(
        self, names: Sequence[str], i: int, modules: Mapping[str, nn.Module] | None = None
    ) -> tuple[Targets, ResidualInputs]:
        """The outputs of these weights in the dense network on batch i, without bias, and what is added to them.

        Both are read in one pass; `modules` are the layers whose additions are wanted, by weight. Weights must come in
        the order of execution, within a call and between calls.
        """
        found: Targets = {name: [] for name in names}

        def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
            dtype = BOUND_DTYPE if use.windows.dtype == BOUND_DTYPE else SCORE_DTYPE
            rows_GRK = _rows(self.dense.model, weight, use).to(dtype)
            parameter = self.dense.model.get_parameter(weight.name)
            with exact_matmul(use.windows, parameter, allow_tf32=self.allow_tf32):
                for windows in self.chunks(weight, use):
                    found[weight.name].append(rows_GRK @ _patches(windows, use.n_position_dims, dtype))

        batch, replay = self.dense.batches[i], self.dense.replay
        to_end = replay.mode != "off" and self.names[-1] in names  # this frees what was kept inside
        with replay.running(self.dense.run, i, ()):
            return found, self._run(self.dense, names, i, batch, on_use, modules or {}, to_end=to_end)

    def moments(
        self,
        names: Sequence[str],
        targets_of: Callable[[int, ResidualInputs], Targets],
        modules: Mapping[str, nn.Module] | None = None,
    ) -> dict[str, WeightMoments]:
        """The moments of these weights, with the pruned network as it is now.

        `targets_of` gives the targets of a batch, given what is added to the modules' outputs in the pruned network.
        The weights must come in the order of execution, and must not change once the next ones are fitted.
        """
        sums = {name: WeightMoments() for name in names}
        self._check_replay(names)
        for i in range(len(self.pruned.batches)):
            uses = list[_KeptUse]()
            streams = self._uses_and_streams(names, i, uses, modules) if modules else {}
            self._add_batch(sums, i, targets_of(i, streams), uses)
        self.finished.update(names)
        return sums

    def _add_batch(self, sums: dict[str, WeightMoments], i: int, targets: Targets, uses: list[_KeptUse]) -> None:
        """Adds batch i to the moments; `uses` are those that a pass has kept, if it was made for the streams."""
        names = list(sums)
        left = {name: targets.pop(name)[::-1] for name in names}  # each is freed once it was used
        shared = _Shared() if len(names) > 1 else None

        def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
            of_weight = sums[weight.name]
            into = of_weight.fit if i < self.n_fit_batches else of_weight.validation
            self._add(of_weight, into, weight, use, left[weight.name], shared)

        if not _hand_over(uses, on_use):
            self._run_pruned(names, i, on_use)
        for name in names:
            if left[name]:
                sums[name].obstacle = _NOT_ALIGNED

    def _run_pruned(
        self, names: Sequence[str], i: int, on_use: OnUse, modules: Mapping[str, nn.Module] | None = None
    ) -> ResidualInputs:
        """Calls `on_use` for each use of these weights in the pruned network; returns the streams.

        Modules whose output is final are replayed, not run. Linear layers of these weights are not run either, unless
        values may decide the way through the network: the weights have the same input, so neither another of them nor
        a stream depends on their outputs.
        """
        batch, layers = self.pruned.batches[i], self.pruned.layers
        unfinished = {
            layer.module for layer in layers if any(w.name not in self.finished for w in layer.weights.values())
        }
        is_plain = self.usage.is_static[i] and all(self.usage.n_uses[i][name] == 1 for name in names)
        unread = {
            layer.module
            for layer in layers
            if is_plain and gives_zeros(layer.module) and all(w.name in names for w in layer.weights.values())
        }
        with self.pruned.replay.running(self.pruned.run, i, unfinished, unread):
            return self._run(self.pruned, names, i, batch, on_use, modules)

    def _uses_and_streams(
        self, names: Sequence[str], i: int, uses: list[_KeptUse], modules: Mapping[str, nn.Module]
    ) -> ResidualInputs:
        """The streams on batch i; the same pass appends to `uses`."""

        def keep(weight: Weight, use: WeightUse, batch: Batch) -> None:
            version = None if use.windows.is_inference() else use.windows._version
            uses.append(_KeptUse(weight, use, batch, version))

        return self._run_pruned(names, i, keep, modules)

    def _check_replay(self, names: Sequence[str]) -> None:
        """Switches the replay off if it changes the inputs of the first batch: some modules have side effects."""
        replay = self.pruned.replay
        if replay.mode != "check" or not replay.kept.get(0):
            return
        met: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._run(self.pruned, names, 0, self.pruned.batches[0], lambda _, use, __: met[0].append(use.windows.clone()))
        try:
            self._run_pruned(names, 0, lambda _, use, __: met[1].append(use.windows.clone()))
            is_same = len(met[0]) == len(met[1]) and all(map(same_tensor, *met))
        except DataError:
            is_same = False
        replay.is_checked = is_same
        if not is_same:
            replay.switch_off()

    def _add(
        self,
        sums: WeightMoments,
        into: dict[RowBlock, Moments],
        weight: Weight,
        use: WeightUse,
        left: list[Tensor],
        shared: _Shared | None,
    ) -> None:
        """Adds one use in the pruned network to the moments; `left` are the targets still to be met, the next one last.

        `shared` holds the sums of the same windows that another weight has made.
        """
        dtype = BOUND_DTYPE if use.windows.dtype == BOUND_DTYPE else SCORE_DTYPE  # of products; sums are float64
        parameter = self.pruned.model.get_parameter(weight.name)
        rows_GRK = _rows(self.pruned.model, weight, use).to(dtype)
        n_groups, n_rows, _ = rows_GRK.shape
        key = (use.row_start, n_groups * n_rows, n_groups)
        if key not in into:
            into[key] = Moments.zeros(n_groups, n_rows, weight.fan_in, rows_GRK.device)
        moments, known = into[key], None if shared is None else shared.of(use.windows)
        here = (
            moments
            if shared is None or known is not None
            else Moments.zeros(n_groups, 0, weight.fan_in, rows_GRK.device)
        )
        is_padded = use.counts_B is not None or use.real_BP is not None
        for windows in self.chunks(weight, use):
            n_patches = windows.shape[: 2 + use.n_position_dims].numel() // n_groups
            if not left or left[-1].shape != (n_groups, n_rows, n_patches):
                sums.obstacle = _NOT_ALIGNED
                return
            dense_GRP = left.pop().to(dtype)
            patches_GKP = _patches(windows, use.n_position_dims, dtype)
            with exact_matmul(use.windows, parameter, allow_tf32=self.allow_tf32):
                gap_GRP = dense_GRP - rows_GRK @ patches_GKP
            mean_GK1 = None
            if not is_padded and self._lies_far(weight, patches_GKP):  # padding has to stay 0
                mean_GK1 = patches_GKP.mean(-1, keepdim=True)
                patches_GKP = patches_GKP - mean_GK1
            if known is None:
                operands = (use.windows,) if mean_GK1 is None else ()  # without their mean they are float32
                size = weight.fan_in**2 * n_patches
                splits = not self.allow_tf32 and gains_by_split(use.windows.device, use.windows.dtype, size)
                with exact_matmul(*operands, allow_tf32=self.allow_tf32 or splits):
                    xx_GKK = squared(patches_GKP, is_split=splits)
                here.add_inputs(xx_GKK, patches_GKP.sum(-1), mean_GK1, n_patches)
            with exact_matmul(allow_tf32=self.allow_tf32):  # gaps are float32
                moments.add_rows(patches_GKP, gap_GRP, dense_GRP, mean_GK1)
        if shared is not None:
            known = shared.keep(use.windows, here) if known is None else known
            moments.add_inputs(known.xx_GKK, known.x_GK)
        moments.n += float(n_patches_of(use) if use.counts_B is None else use.counts_B.sum())

    def _lies_far(self, weight: Weight, patches_GKP: Tensor) -> bool:
        """Whether the weight's inputs lie far from 0; decided once."""
        known = self.usage.is_far
        if known.get(weight.name) is None:
            known[weight.name] = lie_far(patches_GKP)
        return known[weight.name] is True

    def _run(
        self,
        side: Side,
        names: Sequence[str],
        i: int,
        batch: Batch,
        on_use: OnUse,
        modules: Mapping[str, nn.Module] | None = None,
        *,
        to_end: bool = False,
    ) -> ResidualInputs:
        """Calls `on_use` for each use of these weights on batch i, and stops after the last one and the last stream.

        With `to_end`, runs the whole block, because its output is needed next. The batch is an argument, and not read
        here: making it may run earlier blocks, which must happen outside of any replay or watch.
        """
        n_left, streams = sum(self.usage.n_uses[i][name] for name in names), ResidualInputs()
        if n_left == 0:
            return streams

        def stop_at_last() -> None:
            if n_left == 0 and len(streams) == len(modules or ()) and not to_end:
                raise StopForward

        def counted(weight: Weight, use: WeightUse, batch: Batch) -> None:
            nonlocal n_left
            if weight.name in names:
                on_use(weight, thinned(use, self.usage.strides[weight.name], i), batch)
                n_left -= 1
                stop_at_last()

        wanted = [layer for layer in side.layers if any(weight.name in names for weight in layer.weights.values())]
        watched = reading_residual_inputs(modules, streams, stop_at_last) if modules else nullcontext()
        with suppress(StopForward), float32_products(allow_tf32=self.allow_tf32), watched:
            read_uses(side.run, wanted, batch, counted, self.usage.maps[i])
        return streams

    def chunks(self, weight: Weight, use: WeightUse) -> Iterator[Tensor]:
        """The windows of a use in chunks that fit in memory, the same for both networks."""
        n_rows_per_group = n_rows_of(use, weight) // n_groups_of(use)
        per_window = BOUND_DTYPE.itemsize * (2 * weight.fan_in + 3 * n_rows_per_group)
        for _, windows in split_windows(use, bytes_per_window=per_window, chunk_bytes=self.chunk_bytes):
            yield windows


@dataclass(frozen=True)
class _KeptUse:
    """A use that is kept until the end of a pass, and the version of its windows, which an in-place write raises."""

    weight: Weight
    use: WeightUse
    batch: Batch
    version: int | None  # None: inference tensors have none

    @property
    def is_intact(self) -> bool:
        return self.version is not None and self.use.windows._version == self.version


def _hand_over(uses: list[_KeptUse], on_use: OnUse) -> bool:
    """Calls `on_use` for the uses and frees them, if there are any and none was written to; whether it did."""
    if not uses or not all(kept.is_intact for kept in uses):
        return False
    while uses:
        kept = uses.pop(0)
        on_use(kept.weight, kept.use, kept.batch)
    return True


@dataclass
class _Shared:
    """The sums over the last windows of a pass: neighbouring weights often share their input."""

    windows: Tensor | None = None  # kept alive, so that its address stays its own
    version: int = 0
    sums: Moments | None = None

    def of(self, windows: Tensor) -> Moments | None:
        """The sums of these windows, if they are the last ones and were not written to."""
        last = self.windows
        if last is None or windows.is_inference() or windows._version != self.version:
            return None
        is_same = (windows.data_ptr(), windows.shape, windows.stride()) == (last.data_ptr(), last.shape, last.stride())
        return self.sums if is_same and windows.dtype == last.dtype else None

    def keep(self, windows: Tensor, sums: Moments) -> Moments:
        self.windows, self.sums = windows, sums
        self.version = -1 if windows.is_inference() else windows._version
        return sums


def thinned(use: WeightUse, strides: tuple[int, ...], phase: int) -> WeightUse:
    """Subsamples positions, with a different phase per batch; padded uses are kept whole."""
    if math.prod(strides) == 1 or use.counts_B is not None or use.n_position_dims != len(strides):
        return use
    taken = (slice(phase % stride, None, stride) for stride in strides)
    return replace(use, windows=use.windows[(slice(None), slice(None), *taken)])


def _patches(windows: Tensor, n_position_dims: int, dtype: torch.dtype) -> Tensor:
    """The windows as patches_GKP, in the order of `patches_of`; those of a linear layer are a view, not a copy."""
    n_last = 2 + n_position_dims
    ordered = windows.permute(1, *range(n_last, windows.ndim), 0, *range(2, n_last))
    return ordered.reshape(windows.shape[1], windows.shape[n_last:].numel(), -1).to(dtype)


def _rows(model: nn.Module, weight: Weight, use: WeightUse) -> Tensor:
    """The rows of the use's groups (G x R x K) in the current model."""
    rows_FK = to_rows(weight, model.get_parameter(weight.name).detach())
    stop = weight.n_rows if use.n_rows is None else use.row_start + use.n_rows
    return rows_FK[use.row_start : stop].unflatten(0, (use.windows.shape[1], -1))
