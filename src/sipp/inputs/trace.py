"""`trace`: the structure of a model, found by running it on three inputs, and on them in reversed order.

Everything that asks about a model's structure asks this record, and runs nothing: which weights are used, in which
order and how often; whether the values that a weight reads belong to one input each; which modules pass a state along;
what a layer's output is added to; where an intercept goes; whether the network is a chain of fully-connected layers.

`read_uses` runs a whole batch and hands over every use of a weight, as the map says whose patches they are.

Dimension 0 is the input. If the patches of all uses of a weight move with their inputs when these are exchanged, the
weight is *assigned*; otherwise the map says why not. That is enough for a maximum over all inputs, but not for a mean,
or for a statement about a single input. Nothing is guessed: no other order of patches is tried.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.capture import OnUse, Run, evenly_spaced, tolerance_of
from sipp.inputs.data import AnyData, Batch, data_of
from sipp.inputs.layers import PrunableLayer, find_prunable_layers, unwrap
from sipp.inputs.patches import Weight, WeightUse, distinct_values, together, with_padding_zeroed
from sipp.inputs.recording import Recorder, Recording, refs_in
from sipp.inputs.structure import (
    Blocks,
    Place,
    Residual,
    find_blocks,
    places_in,
    residuals_in,
    why_no_chain,
)
from sipp.results import NormStats, Selector, numerics

N_RUN = 3  # inputs
MOST_COMPARED = 1 << 14  # values of an input that are compared in one use, evenly spaced: they show as much as all

_log = logging.getLogger("sipp")


@dataclass(frozen=True)
class ModelMap:
    """The structure of a model, found by running it on a few inputs. `print` it: a line for each weight."""

    n_points: int  # how many inputs were run: 3, or 1 if there was only one
    uses: dict[str, tuple[int, ...]]  # by weight, as they are first used: the calls of its layers, in `recording.calls`
    unassigned: dict[str, str]  # the weights whose patches are not assigned to inputs, and why
    recording: Recording  # all operations and calls of modules
    blocks: Blocks | None  # the modules that pass a state along, if there are such
    residuals: dict[str, Residual]  # by weight: the residual connection behind its layer
    places: dict[str, Place]  # by weight: where intercepts go
    no_chain: str  # why the network is no chain of fully-connected layers; "" if it is one (T12)
    returned: frozenset[str] = field(repr=False)  # modules that give what their adapter returns

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The weights as they are used, each once."""
        return tuple(self.uses)

    @cached_property
    def n_uses(self) -> dict[str, int]:
        """How often each weight is used."""
        return {name: len(calls) for name, calls in self.uses.items()}

    @cached_property
    def same_input(self) -> tuple[tuple[str, ...], ...]:
        """The weights as they are used, those that read the same tensor one after the other together."""
        groups: list[list[str]] = []
        last: tuple[str, tuple[int, ...]] = "", ()  # the module, and what it reads
        for name, calls in self.uses.items():
            call = self.recording.calls[calls[0]]
            reads = call.reads[:1] if len(calls) == 1 else ()
            if not reads or reads != last[1] or call.module == last[0]:
                groups.append([])
            groups[-1].append(name)
            last = call.module, reads
        return tuple(map(tuple, groups))

    def __str__(self) -> str:
        blocks = self.blocks.names if self.blocks is not None else ("none",)
        return "\n".join(
            [
                f"{len(self.recording.operations)} operations on {self.n_points} inputs",
                *(f"{name}: {', '.join(self._remarks(name))}" for name in self.order),
                f"blocks: {', '.join(blocks)}",
                self.no_chain or "a chain of fully-connected layers",
            ]
        )

    def _remarks(self, name: str) -> list[str]:
        """The remarks on a weight in the printed table."""
        remarks = [f"used {self.n_uses[name]} times" if self.n_uses[name] > 1 else "used once"]
        remarks += [f"intercept in {self.places[name].name}"] if self.places[name].name else []
        if name in self.residuals:
            remarks.append(f"added to what follows {self.residuals[name].latest or 'the inputs'}")
        return remarks + ([f"not assigned: {self.unassigned[name]}"] if name in self.unassigned else [])


def trace(
    model: nn.Module, data: AnyData, *, include: Selector | None = None, exclude: Selector | None = None
) -> ModelMap:
    """Returns the structure of a model, found by running it on three inputs of the data.

    Example:
        >>> import sipp.inputs.trace, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> print(sipp.inputs.trace.trace(model, torch.rand(8, 4)))
        5 operations on 3 inputs
        0.weight: used once, intercept in 0.bias
        2.weight: used once, intercept in 2.bias
        blocks: none
        a chain of fully-connected layers
    """
    model = unwrap(model)
    layers = find_prunable_layers(model, include=include, exclude=exclude)
    return trace_layers(model, layers, next(data_of(data, device=numerics.device_of(model)).batches()))


def trace_layers(
    model: nn.Module, layers: Iterable[PrunableLayer], batch: Batch, norm_stats: NormStats = "running"
) -> ModelMap:
    """The ModelMap of a model for the layers that were found, from one batch.

    Three inputs that differ are run; if the model refuses three, all of the batch.
    """
    layers = tuple(layers)
    points = _inputs_to_run(batch)
    try:
        return _traced(model, layers, batch.at(points), norm_stats)
    except (DataError, ModelError):
        if len(points) == batch.n_points:
            raise
    return _traced(model, layers, batch, norm_stats)


def map_for(
    model: nn.Module,
    layers: Iterable[PrunableLayer],
    batch: Batch,
    known: ModelMap | None,
    norm_stats: NormStats = "running",
) -> ModelMap:
    """The map that is known, or a new one, with a warning about weights whose patches cannot be assigned to inputs.

    One input shows nothing of several. Uses that a map did not meet count as not assigned (`read_uses`).
    """
    if known is not None and (known.n_points > 1 or batch.n_points == 1):
        return known
    found = trace_layers(model, layers, batch, norm_stats)
    padding = "" if batch.real_BT is None else ", and padding is not left out"
    for name, why in found.unassigned.items():
        _log.warning(
            "%s: it is unknown which values in %s belong to which input (%s): no bounds for single inputs there%s",
            batch.where,
            name,
            why,
            padding,
        )
    return found


def read_uses(
    model: nn.Module,
    layers: Iterable[PrunableLayer],
    batch: Batch,
    on_use: OnUse,
    found: ModelMap | None = None,
    norm_stats: NormStats = "running",
) -> Any:
    """The model's output on a batch; `on_use` is called for every use of a weight, in the order of execution.

    A use is handed over before the layer runs and must be consumed at once: later operations may overwrite its input
    in place. The model is left exactly as it was, also when something raises. With a map, patches that it does not
    assign to inputs come together. Without one, uses come as their layers report them.
    """
    seen: Counter[str] = Counter()

    def assigned(weight: Weight, use: WeightUse, batch: Batch) -> None:
        seen[weight.name] += 1
        is_one = len(use.windows) == 1 and use.attributed  # one input owns all patches
        is_known = found is None or (weight.name not in found.unassigned and _is_met(found, weight))
        on_use(weight, with_padding_zeroed(use if is_one or is_known else together(use), batch), batch)

    def _is_met(found: ModelMap, weight: Weight) -> bool:
        return seen[weight.name] <= found.n_uses.get(weight.name, 0)

    return Run(batch, assigned, found.returned if found is not None else ()).of(model, layers, norm_stats)


def _inputs_to_run(batch: Batch) -> Tensor:
    """Which inputs of a batch are run: the first, and others from the end that differ from each other.

    If there are too few that differ, the last one is repeated. Two are not enough: where a b is repeated an odd number
    of times (a b a, b a b), the blocks of both seem to be exchanged with them.
    """
    if batch.n_points == 1:
        return numerics.integers(0, 1)
    different = dict[str, int]()
    for point in (0, *range(batch.n_points - 1, 0, -1)):
        (content,) = batch.at(slice(point, point + 1)).hashes()
        different.setdefault(content, point)
        if len(different) == N_RUN:
            break
    found = sorted(different.values())
    return torch.tensor(found + found[-1:] * (N_RUN - len(found)), dtype=torch.int64, device="cpu")


def _traced(model: nn.Module, layers: tuple[PrunableLayer, ...], few: Batch, norm_stats: NormStats) -> ModelMap:
    recorder = Recorder(model, _holders(layers), few.where)
    first = _Uses(recorder)
    watched = Run(few, first, recorder=recorder)
    recording = recorder.recording(watched.of(model, layers, norm_stats))
    unassigned = first.unassigned(*_exchanged(model, layers, few, norm_stats, watched.returned))
    order = tuple(first.samples)
    blocks = find_blocks(model, recording)
    return ModelMap(
        n_points=few.n_points,
        uses={name: tuple(calls) for name, calls in first.calls.items()},
        unassigned=unassigned,
        recording=recording,
        blocks=blocks,
        residuals=residuals_in(recording, layers, order, watched.products, blocks),
        places=places_in(model, recording, layers, watched.products),
        no_chain=why_no_chain(model, recording, set(order)),
        returned=frozenset(watched.returned),
    )


def _holders(layers: Sequence[PrunableLayer]) -> dict[str, frozenset[str]]:
    """By weight, the modules that may read it."""
    found: dict[str, set[str]] = {}
    for layer in layers:
        for weight in layer.weights.values():
            found.setdefault(weight.name, set()).add(layer.module_name)
    return {name: frozenset(modules) for name, modules in found.items()}


# --- Do the patches of a use move with the inputs? --------------------------------------------------------------------

ELSEWHERE = "the inputs do not run along dimension 0 of what it reads"
NOT_MOVED = "its output did not follow the inputs when they were reordered"
ALIKE = "its patches are the same for all inputs that were run, and may belong to others"
BY_VALUES = "values decide which patches it reads"
REFUSED = "the model refuses its inputs in another order"


def _exchanged(
    model: nn.Module,
    layers: tuple[PrunableLayer, ...],
    few: Batch,
    norm_stats: NormStats,
    returned: Collection[str],
) -> tuple[Tensor, _Uses | None]:
    """Another order of the inputs, and the uses of a run in it; None if the model refuses it.

    A reversed batch has the same statistics. If a model refuses that (it wants the longest sequence first), the last
    input but one takes the place of the last, too.
    """
    reverse = numerics.integers(few.n_points - 1, -1, -1)
    sorted_still = numerics.integers(0, few.n_points).clamp(max=few.n_points - 2)
    for placed in (reverse, sorted_still) if few.n_points > 1 else ():
        seen = _Uses()
        try:
            Run(few.at(placed), seen, returned).of(model, layers, norm_stats)
        except (DataError, ModelError):  # the order's fault: the first run had the same inputs
            continue
        return placed, seen
    return reverse, None


@dataclass
class _Sample:
    """Some values of each input's patches in one use: a copy, so that no input is kept alive. Or why there are none."""

    why: str  # it is not assigned to inputs, whatever their order; "" if that is open
    values_BN: Tensor
    is_folded: bool  # whether the layer's input has other things than the inputs along dimension 0


class _Uses:
    """The uses of one run, with samples of their patches."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.calls = defaultdict[str, list[int]](list)  # by weight, in the order of execution
        self.samples = defaultdict[str, list[_Sample]](list)  # likewise

    def __call__(self, weight: Weight, use: WeightUse, batch: Batch) -> None:
        """Records one use of a weight, with some of its values."""
        why = "" if use.attributed else ELSEWHERE
        is_folded = False
        if self.recorder is not None:
            call = self.recorder.innermost
            given = [self.recorder.values[read] for read in refs_in(call.arguments)]
            why = BY_VALUES if any(one.by_values for one in given) else why
            is_folded = not given or given[0].shape[:1] != use.windows.shape[:1]
            self.calls[weight.name].append(call.at)
        self.samples[weight.name].append(_Sample(why, _sampled(use.windows), is_folded))

    def unassigned(self, placed_B: Tensor, moved: _Uses | None) -> dict[str, str]:
        """The weights with patches that did not move with the inputs to their new places, and why.

        The nth use of a weight is compared with its nth use in the run `moved`, if there was one.
        """
        found = dict[str, str]()
        for weight, mine in self.samples.items():
            theirs = moved.samples[weight][: len(mine)] if moved is not None else []
            for sample, other in zip_longest(mine, theirs):
                why = sample.why
                if not why and len(sample.values_BN) > 1:
                    why = REFUSED if moved is None else _why_not_moved(sample, other, placed_B)
                if why:
                    found.setdefault(weight, why)
        return found


def _sampled(windows: Tensor) -> Tensor:
    """Some values of each point's windows, evenly spaced in memory (B x N)."""
    values_BN = distinct_values(windows).detach()
    n = values_BN.shape[1]
    return values_BN[:, evenly_spaced(n, min(n, MOST_COMPARED), windows.device)]


def _why_not_moved(first: _Sample, second: _Sample | None, placed_B: Tensor) -> str:
    """Why a use is not assigned, if its patches did not move with the inputs to these places; "" if they did."""
    before_BN = first.values_BN
    if second is None or second.values_BN.shape != before_BN.shape:
        return BY_VALUES
    gap, size = (before_BN[placed_B.to(before_BN.device)] - second.values_BN).abs().amax(), before_BN.abs().amax()
    if not bool(gap <= tolerance_of(before_BN.device, before_BN.dtype) * size):  # nor if anything is NaN
        return NOT_MOVED
    return ALIKE if first.is_folded and bool((before_BN == before_BN[:1]).all()) else ""
