"""`trace`: what sipp knows about a model, from one watched run of two inputs and one with the two exchanged.

Everything that asks about a model's structure asks this record, and runs nothing: which weights are used, in which
order and how often; whether the values that a use reads belong to one input each; which modules pass a state along;
what a layer's output is added to; where an intercept goes; whether the network is a chain of fully-connected layers.

Dimension 0 is the input. If the patches of a use move with their inputs when these are exchanged, the use is
*assigned*; otherwise it says why not. That is enough for a maximum over all inputs, but not for a mean, or for a
statement about a single input. Nothing is guessed: no other order of patches is tried.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.blocks import Blocks, find_blocks
from sipp.inputs.capture import Pass, recorded_parameters, run_pass
from sipp.inputs.data import AnyData, data_of, points_at, tensors_of_inputs
from sipp.inputs.layer_checks import tolerance_of
from sipp.inputs.layers import PrunableLayer, find_prunable_layers, unwrap
from sipp.inputs.patches import distinct_values, rows_of
from sipp.inputs.recording import Operands, Recorder, Recording, refs_in
from sipp.inputs.structure import Place, Sum, norm_behind, output_of, places_in, sums_in, why_no_chain
from sipp.results.batches import Batch, WeightUse
from sipp.results.numerics import device_of, integers, same_tensor
from sipp.results.options import NormStats, Selector
from sipp.results.ranking import Weight

MOST_COMPARED = 1 << 14  # values of an input that are compared in one use, evenly spaced: they show as much as all

_log = logging.getLogger("sipp")

Key = tuple[str, int]  # a weight, and which of its uses in a run, counted from 1


@dataclass(frozen=True)
class Use:
    """One use of a prunable weight: a matrix product of (some of) its rows with the patches of the inputs."""

    weight: str
    nth: int  # which use of the weight in the run, counted from 1
    module: str
    local: str  # name of the weight in the module
    call: int  # of the module, in `ModelMap.run.calls`
    positions: tuple[int, ...]  # the sizes of the positions of each input's patches
    rows: tuple[int, int]  # the first row, and the one after the last
    unassigned: str = ""  # why its patches cannot be assigned to inputs; "" if they are


@dataclass(frozen=True)
class ModelMap:
    """What a model did on one or two inputs, and what follows from it. `print` it: a table of contents."""

    kind: str  # the model's class
    weights: tuple[Weight, ...]  # that may be pruned, in the order of the model's parameters
    n_points: int  # how many inputs were run
    uses: tuple[Use, ...]  # in the order of execution
    run: Recording  # all operations and calls of modules
    blocks: Blocks | None  # the modules that pass a state along, if there are such
    sums: dict[str, Sum]  # by weight: what its layer's output alone is added to
    norms: dict[str, str]  # by weight: the module of the norm behind its layer; none without one
    places: dict[str, Place]  # by weight: where intercepts go
    no_chain: str  # why the network is no chain of fully-connected layers; "" if it is one (T12)
    checked: frozenset[str]  # modules whose output is known to follow from their uses
    output: Any = field(repr=False, compare=False)  # of these inputs
    points: Tensor = field(repr=False, compare=False)  # which inputs of the batch were run

    @property
    def depends_on_values(self) -> str:
        """What lets values decide which operations run, and where; "" if nothing does."""
        return self.run.depends_on_values

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The weights as they are used, each once."""
        return tuple(dict.fromkeys(use.weight for use in self.uses))

    @cached_property
    def n_uses(self) -> dict[str, int]:
        """How often each weight is used."""
        return dict(Counter(use.weight for use in self.uses))

    @cached_property
    def same_input(self) -> tuple[tuple[str, ...], ...]:
        """The weights as they are used, those that read the same tensor one after the other together."""
        groups: list[list[str]] = []
        last: tuple[str, tuple[int, ...]] = "", ()  # the module, and what it reads
        for use in (use for use in self.uses if use.nth == 1):
            call = self.run.calls[use.call]
            reads = call.reads[:1] if self.n_uses[use.weight] == 1 else ()
            if not reads or reads != last[1] or call.module == last[0]:
                groups.append([])
            groups[-1].append(use.weight)
            last = call.module, reads
        return tuple(map(tuple, groups))

    @cached_property
    def unassigned(self) -> dict[Key, str]:
        """The uses that are not assigned to inputs, and why."""
        return {(use.weight, use.nth): use.unassigned for use in self.uses if use.unassigned}

    @cached_property
    def _keys(self) -> frozenset[Key]:
        return frozenset((use.weight, use.nth) for use in self.uses)

    def is_assigned(self, weight: str, nth: int) -> bool:
        """Whether the n-th use of a weight was met, and its patches moved with the inputs."""
        return (weight, nth) in self._keys and (weight, nth) not in self.unassigned

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def trace(
    model: nn.Module, data: AnyData, *, include: Selector | None = None, exclude: Selector | None = None
) -> ModelMap:
    """Returns what sipp knows about a model, from a run of two inputs of the data.

    Example:
        >>> import sipp.inputs.trace, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> print(sipp.inputs.trace.trace(model, torch.rand(8, 4)))
        Sequential: 2 weights in 2 layers, 5 operations on 2 inputs
        a chain of fully-connected layers
        0.weight  Linear  3 x 4
        2.weight  Linear  2 x 3
    """
    model = unwrap(model)
    layers = find_prunable_layers(model, include=include, exclude=exclude)
    batch, _ = data_of(data, device=device_of(model)).first_batch()
    return trace_layers(model, layers, batch)


def trace_layers(
    model: nn.Module, layers: Iterable[PrunableLayer], batch: Batch, norm_stats: NormStats = "running"
) -> ModelMap:
    """The same for the layers that were found, and a batch.

    Two inputs that differ are run; if the model refuses two, all of the batch.
    """
    layers = tuple(layers)
    points = _two_that_differ(batch)
    try:
        return _traced(model, layers, batch, points, norm_stats)
    except (DataError, ModelError):
        if len(points) == batch.n_points:
            raise
    return _traced(model, layers, batch, integers(0, batch.n_points), norm_stats)


def record(model: nn.Module, batch: Batch) -> Recording:
    """A watched run of two inputs of a batch, of a model whose layers do not matter."""
    few = points_at(batch, _two_that_differ(batch))
    recorder = Recorder(model, {}, batch.where)
    return recorder.recording(run_pass(model, (), Pass(few, _as_it_is, recorder=recorder), "running"))


def _as_it_is(weight: Weight, use: WeightUse) -> WeightUse:
    return use


def _two_that_differ(batch: Batch) -> Tensor:
    """The first input of a batch and the last one that differs from it; the last one, if none does."""
    last = batch.n_points - 1
    for other in range(last, 0, -1):
        if not all(same_tensor(t[0], t[other]) for t in tensors_of_inputs(batch).values() if len(t) == batch.n_points):
            return torch.tensor([0, other], dtype=torch.int64, device="cpu")
    return integers(0, batch.n_points)[:: max(1, last)]


def _traced(
    model: nn.Module, layers: tuple[PrunableLayer, ...], batch: Batch, points: Tensor, norm_stats: NormStats
) -> ModelMap:
    few = points_at(batch, points)
    operands = Operands([one for layer in layers for one in recorded_parameters(layer).values()])
    recorder = Recorder(model, _holders(layers), batch.where, operands)
    seen, checked = _Uses(recorder), set[str]()
    one_pass = Pass(few, seen, checked=checked, recorder=recorder, operands=operands)
    output = run_pass(model, layers, one_pass, norm_stats)
    run = recorder.recording(output)
    seen.compare(_exchanged(model, layers, few, norm_stats))
    uses = tuple(seen.uses)
    order = tuple(dict.fromkeys(use.weight for use in uses))
    tensors = {weight.name: output_of(run, layer) for layer in layers for weight in layer.weights.values()}
    behind = {name: norm_behind(run, tensor) for name, tensor in tensors.items() if tensor is not None}
    return ModelMap(
        kind=type(model).__name__,
        weights=tuple({weight.name: weight for layer in layers for weight in layer.weights.values()}.values()),
        n_points=few.n_points,
        uses=uses,
        run=run,
        blocks=find_blocks(model, run),
        sums=sums_in(run, layers, order),
        norms={name: norm for name, norm in behind.items() if norm},
        places=places_in(model, run, layers),
        no_chain=why_no_chain(model, run, set(order)),
        checked=frozenset(checked),
        output=output,
        points=points,
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
NOT_MOVED = "its patches did not move with the inputs when two were exchanged"
BY_VALUES = "values decide which patches it reads"
REFUSED = "the model refuses its inputs in another order"


def _exchanged(model: nn.Module, layers: tuple[PrunableLayer, ...], few: Batch, norm_stats: NormStats) -> _Uses | None:
    """The uses of a run with the inputs in reversed order; None if the model refuses that."""
    seen = _Uses(None)
    if few.n_points == 1:
        return seen
    operands = Operands([one for layer in layers for one in recorded_parameters(layer).values()])
    back = points_at(few, integers(few.n_points - 1, -1, -1))
    try:
        run_pass(model, layers, Pass(back, seen, operands=operands), norm_stats)
    except (DataError, ModelError):  # the order's fault: the first run had the same inputs
        return None
    return seen


@dataclass(frozen=True)
class _Sample:
    """Some values of each input's patches in a use: a copy, so that no input is kept alive."""

    values_BN: Tensor
    tolerance: float


class _Uses:
    """The uses of one run, with samples of their patches."""

    def __init__(self, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self.uses: list[Use] = []
        self.samples: dict[Key, _Sample] = {}
        self._seen: Counter[str] = Counter()

    def __call__(self, weight: Weight, use: WeightUse) -> WeightUse:
        """Notes a use, and returns it."""
        self._seen[weight.name] += 1
        key, windows = (weight.name, self._seen[weight.name]), use.windows
        if use.attributed:
            self.samples[key] = _Sample(_sampled(windows), tolerance_of(windows.device, windows.dtype))
        if self.recorder is not None:
            call, rows = self.recorder.innermost, rows_of(use, weight)
            positions = tuple(windows.shape[2 : 2 + use.n_position_dims])
            by_values = any(self.recorder.values[read].by_values for read in refs_in(call.arguments))
            why = BY_VALUES if by_values else "" if use.attributed else ELSEWHERE
            self.uses.append(Use(*key, call.module, use.parameter, call.at, positions, (rows.start, rows.stop), why))
        return use

    def compare(self, exchanged: _Uses | None) -> None:
        """Marks the uses whose patches did not move with the inputs; None: the model refuses another order."""
        for i, use in enumerate(self.uses):
            key = use.weight, use.nth
            if use.unassigned or len(self.samples[key].values_BN) == 1:
                continue
            if exchanged is None:
                why = REFUSED
            else:
                why = _why_not_moved(self.samples[key], exchanged.samples.get(key))
            self.uses[i] = replace(use, unassigned=why)


def _sampled(windows: Tensor) -> Tensor:
    """Some values of each point's windows, evenly spaced in memory (B x N)."""
    values_BN = distinct_values(windows).detach()
    n = values_BN.shape[1]
    if n > MOST_COMPARED:
        at = torch.linspace(0, n - 1, MOST_COMPARED, dtype=torch.float64, device=windows.device).round().long()
        return values_BN[:, at]
    return values_BN.clone()


def _why_not_moved(first: _Sample, second: _Sample | None) -> str:
    """Why patches did not move with their inputs, which the second run has in reversed order."""
    if second is None or first.values_BN.shape != second.values_BN.shape:
        return BY_VALUES
    moved_BN = second.values_BN.flip(0)
    size = torch.maximum(first.values_BN.abs().amax(), moved_BN.abs().amax())
    distance = (first.values_BN - moved_BN).abs().amax()
    if bool(distance <= first.tolerance * size):  # not if anything is NaN
        return ""
    return NOT_MOVED


# --- The table of contents --------------------------------------------------------------------------------------------

MOST_NAMED = 4  # blocks


def _lines(found: ModelMap) -> Iterator[str]:
    """What `print` shows: the network in a line, what it is made of, and then each weight as it is used."""
    n_layers = len({use.module for use in found.uses})
    uses = f"{len(found.order)} weights in {n_layers} layers"
    yield f"{found.kind}: {uses}, {len(found.run.operations)} operations on {found.n_points} inputs"
    if found.blocks is not None:
        names = found.blocks.names
        some = ", ".join(names if len(names) <= MOST_NAMED else (*names[:2], "...", names[-1]))
        at = found.blocks.at
        state = f"argument {at}" if isinstance(at, int) else at
        yield f"{len(names)} blocks pass a state along ({state}): {some}"
    yield "a chain of fully-connected layers" if not found.no_chain else f"no chain of the paper's: {found.no_chain}"
    if found.depends_on_values:
        yield f"values decide what runs: {found.depends_on_values}"
    yield from _table([_row(found, name) for name in found.order])
    missing = [weight.name for weight in found.weights if weight.name not in found.order]
    if missing:
        yield f"not used by these inputs: {', '.join(missing)}"
    why = Counter(found.unassigned.values())
    for reason in why:
        names = dict.fromkeys(name for (name, _), one in found.unassigned.items() if one == reason)
        yield f"not assigned to inputs, {reason}: {', '.join(names)}"


def _row(found: ModelMap, name: str) -> tuple[str, ...]:
    """A weight, its layer, its size, how often it is used, the norm behind it, and what its output is added to."""
    weight = next(one for one in found.weights if one.name == name)
    n_uses = found.n_uses[name]
    one = found.sums.get(name)
    added = (
        ""
        if one is None
        else f"added to what follows {one.latest}"
        if one.latest
        else "added to what comes before any weight"
    )
    norm = found.norms.get(name, "")
    return (
        name,
        weight.layer_type,
        f"{weight.n_rows} x {weight.fan_in}",
        "" if n_uses == 1 else f"used {n_uses} times",
        f"then {norm}" if norm else "",
        added,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """The rows with their columns aligned; empty columns are left out."""
    columns = [column for column in zip(*rows) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns):
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip()
