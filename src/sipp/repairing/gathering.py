"""Runs both networks over the points and sums up the moments that a fit of a few weights needs.

The dense network's outputs of a layer are compared with the pruned network's at the same patches of the same points,
each on its own inputs: what the layers before have lost is made up for as well.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from sipp.errors import DataError
from sipp.inputs.capture import runner
from sipp.inputs.layers import PrunableLayer, find_prunable_layers
from sipp.inputs.patches import patches_of, split_windows
from sipp.records.batches import Batch, WeightUse
from sipp.records.numerics import BOUND_DTYPE, SCORE_DTYPE, exact_matmul
from sipp.records.ranking import Weight, to_rows
from sipp.repairing.layer_usage import LayerUsage, Targets, is_same_tensor
from sipp.repairing.moments import Moments, lie_far
from sipp.repairing.replaying import Replay
from sipp.repairing.residual_connections import ResidualInputs, reading_residual_inputs

RowBlock = tuple[int, int, int]  # first row, number of rows and of groups of a use: each such block has sums of its own
OnUse = Callable[[Weight, WeightUse, Batch], None]


class _EnoughError(BaseException):
    """Ends a forward pass after the last use that is needed. Not an Exception, so that no model catches it."""


@dataclass
class WeightMoments:
    """The moments of one weight on the fit points and on the validation points, per block of rows."""

    fit: dict[RowBlock, Moments] = field(default_factory=dict)
    validation: dict[RowBlock, Moments] = field(default_factory=dict)
    obstacle: str = ""  # why the sums mean nothing


def solvable(sums: WeightMoments, *, validates: bool = True) -> tuple[list[RowBlock], str]:
    """The blocks of rows in order, and why they cannot be solved; empty if they can.

    Without `validates`, no validation points are needed.
    """
    if sums.obstacle:
        return [], sums.obstacle
    if not sums.fit or (validates and sums.fit.keys() != sums.validation.keys()):
        return [], "no inputs reach it"
    stop = 0
    for key in sorted(sums.fit):
        looked_at = (sums.fit[key], sums.validation[key]) if validates else (sums.fit[key],)
        start, n_rows, _ = key
        if start < stop:
            return [], "its uses take rows that overlap"
        if any(moments.n == 0 for moments in looked_at):
            return [], "no inputs reach it"
        if not all(moments.is_finite for moments in looked_at):
            return [], "its outputs or their squares are not finite"
        stop = start + n_rows
    return sorted(sums.fit), ""


def slice_of(key: RowBlock) -> slice:
    """The rows of a block."""
    return slice(key[0], key[0] + key[1])


def masked_layers(model: nn.Module, masks: Mapping[str, Tensor]) -> tuple[PrunableLayer, ...]:
    """The modules that hold masked weights, with those weights alone."""
    return layers_with(find_prunable_layers(model, include=[glob.escape(name) for name in masks]), masks)


def layers_with(layers: Iterable[PrunableLayer], names: Collection[str]) -> tuple[PrunableLayer, ...]:
    """The layers that hold these weights, with those alone."""
    chosen = (replace(layer, weights={l: w for l, w in layer.weights.items() if w.name in names}) for layer in layers)
    return tuple(layer for layer in chosen if layer.weights)


@dataclass(frozen=True)
class Side:
    """One of the two networks: what of it is run, on what, and where its weights lie."""

    model: nn.Module
    run: nn.Module  # the model, or one of its blocks on the states before it
    layers: tuple[PrunableLayer, ...]
    batches: Sequence[Batch]


@dataclass(frozen=True)
class Gatherer:
    """The two networks, the points, and what was found out about them."""

    dense: Side
    pruned: Side  # its weights change between calls
    is_validation: tuple[bool, ...]  # by batch; the others are fitted
    usage: LayerUsage
    chunk_bytes: int
    allow_tf32: bool = False  # in products and passes on a GPU
    finished: set[str] = field(default_factory=set)  # weights that change no more
    replay: Replay = field(default_factory=Replay)  # of the pruned network
    dense_replay: Replay = field(default_factory=lambda: Replay(is_off=True))

    def targets(
        self, names: Sequence[str], i: int, modules: Mapping[str, nn.Module] | None = None
    ) -> tuple[Targets, ResidualInputs]:
        """The outputs, without bias, of these weights of the dense network on batch i; and, in the same pass, what the
        outputs of the modules, by weight, are added to.

        Weights must come in the order of execution, in this call and from one to the next.
        """
        found: Targets = {name: [] for name in names}

        def on_use(weight: Weight, use: WeightUse, batch: Batch) -> None:
            dtype = BOUND_DTYPE if use.windows.dtype == BOUND_DTYPE else SCORE_DTYPE
            rows_GRK = _rows(self.dense.model, weight, use).to(dtype)
            parameter = self.dense.model.get_parameter(weight.name)
            with exact_matmul(use.windows, parameter, allow_tf32=self.allow_tf32):
                for windows in self.chunks(weight, use):
                    found[weight.name].append(rows_GRK @ patches_of(windows, use.n_position_dims, None, dtype))

        batch = self.dense.batches[i]
        to_end = not self.dense_replay.is_off and self.usage.order[-1][-1] in names  # what is kept inside is let go
        with self.dense_replay.running(self.dense.run, i, ()):
            return found, self._run(self.dense, names, i, batch, on_use, modules or {}, to_end=to_end)

    def gather(
        self,
        names: Sequence[str],
        targets_of: Callable[[int, ResidualInputs], Targets],
        modules: Mapping[str, nn.Module] | None = None,
    ) -> dict[str, WeightMoments]:
        """The moments of these weights, with the pruned network as it is now.

        `targets_of` gives the targets of a batch, from what the outputs of the modules, by weight, are added to in it.
        The weights must come in the order of execution, and must not change after the refit that follows.
        """
        sums = {name: WeightMoments() for name in names}
        self._check_replay(names)
        for i, is_validation in enumerate(self.is_validation):
            uses = list[_KeptUse]()
            targets = targets_of(i, self._uses_and_streams(names, i, uses, modules) if modules else {})
            left = {name: targets.pop(name)[::-1] for name in names}  # each is let go when it was taken
            shared = _Shared() if len(names) > 1 else None

            def on_use(
                weight: Weight,
                use: WeightUse,
                batch: Batch,
                left: Targets = left,
                is_validation: bool = is_validation,
                shared: _Shared | None = shared,
            ) -> None:
                both = sums[weight.name]
                self._add(both, both.validation if is_validation else both.fit, weight, use, left[weight.name], shared)

            if not _hand_over(uses, on_use):
                self._replayed(names, i, on_use)
            for name in names:
                if left.pop(name):  # and before those of the next batch are made
                    sums[name].obstacle = _NOT_ALIGNED
        self.finished.update(names)
        return sums

    def _replayed(
        self, names: Sequence[str], i: int, on_use: OnUse, modules: Mapping[str, nn.Module] | None = None
    ) -> ResidualInputs:
        """Hands over the uses of these weights of the pruned network, which is run from where it is new; and the
        streams, as in `targets`."""
        batch, layers = self.pruned.batches[i], self.pruned.layers
        unfinished = {s.module for s in layers if any(w.name not in self.finished for w in s.weights.values())}
        with self.replay.running(self.pruned.run, i, unfinished):
            return self._run(self.pruned, names, i, batch, on_use, modules)

    def _uses_and_streams(
        self, names: Sequence[str], i: int, uses: list[_KeptUse], modules: Mapping[str, nn.Module]
    ) -> ResidualInputs:
        """The streams on batch i, and in the same pass the uses."""

        def keep(weight: Weight, use: WeightUse, batch: Batch) -> None:
            version = None if use.windows.is_inference() else use.windows._version
            uses.append(_KeptUse(weight, use, batch, version))

        return self._replayed(names, i, keep, modules)

    def _check_replay(self, names: Sequence[str]) -> None:
        """Switches the replay off if it changes the inputs of the first batch: some modules have side effects."""
        if self.replay.is_off or self.replay.is_trusted or not self.replay.kept.get(0):
            return
        met: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._run(self.pruned, names, 0, self.pruned.batches[0], lambda _, use, __: met[0].append(use.windows.clone()))
        try:
            self._replayed(names, 0, lambda _, use, __: met[1].append(use.windows.clone()))
            is_same = len(met[0]) == len(met[1]) and all(map(is_same_tensor, *met))
        except DataError:
            is_same = False
        self.replay.is_checked = is_same
        if not is_same:
            self.replay.switch_off()

    def _add(
        self,
        sums: WeightMoments,
        into: dict[RowBlock, Moments],
        weight: Weight,
        use: WeightUse,
        left: list[Tensor],
        shared: _Shared | None,
    ) -> None:
        """Adds one use of the pruned network to the moments; `left` are the dense outputs, the next one last.

        What another weight has summed of the same windows is in `shared`.
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
            patches_GKP = patches_of(windows, use.n_position_dims, None, dtype)
            with exact_matmul(use.windows, parameter, allow_tf32=self.allow_tf32):
                gap_GRP = dense_GRP - rows_GRK @ patches_GKP
            mean_GK1 = None
            if not is_padded and self._lies_far(weight, patches_GKP):  # padding has to stay 0
                mean_GK1 = patches_GKP.mean(-1, keepdim=True)
                patches_GKP -= mean_GK1
            if known is None:
                with exact_matmul(use.windows, allow_tf32=self.allow_tf32):
                    here.add_inputs(patches_GKP @ patches_GKP.mT, patches_GKP.sum(-1), mean_GK1, n_patches)
            with exact_matmul(allow_tf32=self.allow_tf32):  # gaps are float32
                moments.add_rows(patches_GKP, gap_GRP, dense_GRP, mean_GK1)
        if shared is not None:
            known = shared.keep(use.windows, here) if known is None else known
            moments.add_inputs(known.xx_GKK, known.x_GK)
        n_all = use.windows.shape[: 2 + use.n_position_dims].numel() // n_groups
        moments.n += float(n_all if use.counts_B is None else use.counts_B.sum())

    def _lies_far(self, weight: Weight, patches_GKP: Tensor) -> bool:
        """Whether the weight's inputs lie far from 0, which is asked once."""
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
                raise _EnoughError

        def counted(weight: Weight, use: WeightUse, batch: Batch) -> None:
            nonlocal n_left
            if weight.name in names:
                on_use(weight, thinned(use, self.usage.strides[weight.name], i), batch)
                n_left -= 1
                stop_at_last()

        wanted = [layer for layer in side.layers if any(weight.name in names for weight in layer.weights.values())]
        watched = reading_residual_inputs(modules, streams, stop_at_last) if modules else nullcontext()
        with suppress(_EnoughError), exact_matmul(allow_tf32=self.allow_tf32), watched:
            runner(side.run, wanted, orders=self.usage.orders[i])(batch, counted)
        return streams

    def chunks(self, weight: Weight, use: WeightUse) -> Iterator[Tensor]:
        """The windows of a use in pieces that fit the memory, the same ones for both networks."""
        n_rows = weight.n_rows if use.n_rows is None else use.n_rows
        per_patch = BOUND_DTYPE.itemsize * (2 * use.windows.shape[1] * weight.fan_in + 3 * n_rows)
        for _, windows in split_windows(use, bytes_per_patch=per_patch, chunk_bytes=self.chunk_bytes):
            yield windows


@dataclass(frozen=True)
class _KeptUse:
    """A use that is kept to the end of a pass, and how often it had been written to: once more, and it is another."""

    weight: Weight
    use: WeightUse
    batch: Batch
    version: int | None  # None: nobody counts

    @property
    def is_intact(self) -> bool:
        return self.version is not None and self.use.windows._version == self.version


def _hand_over(uses: list[_KeptUse], on_use: OnUse) -> bool:
    """Hands over the uses, which are let go, if there are any and all are as they were; whether it did."""
    if not uses or not all(kept.is_intact for kept in uses):
        return False
    while uses:
        kept = uses.pop(0)
        on_use(kept.weight, kept.use, kept.batch)
    return True


@dataclass
class _Shared:
    """The sums of inputs of the last windows in a pass: neighbours meet the same ones."""

    windows: Tensor | None = None  # kept alive, so that an address stands for one tensor
    version: int = 0
    sums: Moments | None = None

    def of(self, windows: Tensor) -> Moments | None:
        """The sums of these windows, where they are the last ones and were not written to."""
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


_NOT_ALIGNED = "the pruned network sends it other inputs (tokens routed differently?)"


def _rows(model: nn.Module, weight: Weight, use: WeightUse) -> Tensor:
    """The rows of the use's groups (G x R x K) in the model as it is."""
    rows_FK = to_rows(weight, model.get_parameter(weight.name).detach())
    stop = weight.n_rows if use.n_rows is None else use.row_start + use.n_rows
    return rows_FK[use.row_start : stop].unflatten(0, (use.windows.shape[1], -1))
