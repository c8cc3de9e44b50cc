"""`trace`: what sipp knows about a model, from one watched run of three inputs and one with them in reversed order.

Everything that asks about a model's structure asks this record, and runs nothing: which weights are used, in which
order and how often; whether the values that a use reads belong to one input each; which modules pass a state along;
what a layer's output is added to; where an intercept goes; whether the network is a chain of fully-connected layers.

`read_uses` runs a whole batch and hands over every use of a weight, as the map says whose patches they are.

Dimension 0 is the input. If the patches of a use move with their inputs when these are exchanged, the use is
*assigned*; otherwise it says why not. That is enough for a maximum over all inputs, but not for a mean, or for a
statement about a single input. Nothing is guessed: no other order of patches is tried.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.batches import Batch, Weight, WeightUse
from sipp.inputs.blocks import Blocks, find_blocks
from sipp.inputs.capture import Group, OnUse, Pass, recorded_parameters, run_pass
from sipp.inputs.data import AnyData, data_of, form_of, points_at, tensors_of_inputs
from sipp.inputs.layer_checks import every_tensor, tolerance_of
from sipp.inputs.layers import PrunableLayer, find_prunable_layers, unwrap
from sipp.inputs.patches import distinct_values, rows_of, together
from sipp.inputs.recording import Operands, Recorder, Recording, refs_in
from sipp.inputs.structure import Place, Sum, norm_behind, output_of, places_in, sums_in, why_no_chain
from sipp.results import NormStats, Selector, numerics

N_RUN = 3  # inputs
MOST_COMPARED = 1 << 14  # values of an input that are compared in one use, evenly spaced: they show as much as all

MOST_KEPT = 1 << 22  # numbers of the output: logits of long texts may be larger than the network

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
    """What a model did on a few inputs, and what follows from it. `print` it: a table of contents."""

    kind: str  # the model's class
    weights: tuple[Weight, ...]  # that may be pruned, in the order of the model's parameters
    n_points: int  # how many inputs were run: 3, or 1 if there was only one
    uses: tuple[Use, ...]  # in the order of execution
    run: Recording  # all operations and calls of modules
    blocks: Blocks | None  # the modules that pass a state along, if there are such
    sums: dict[str, Sum]  # by weight: what its layer's output alone is added to
    norms: dict[str, str]  # by weight: the module of the norm behind its layer; none without one
    places: dict[str, Place]  # by weight: where intercepts go
    no_chain: str  # why the network is no chain of fully-connected layers; "" if it is one (T12)
    checked: frozenset[str]  # modules whose output is known to follow from their uses
    output: Any = field(repr=False, compare=False)  # of these inputs; None if it is large
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
    """Returns what sipp knows about a model, from a run of three inputs of the data.

    Example:
        >>> import sipp.inputs.trace, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> print(sipp.inputs.trace.trace(model, torch.rand(8, 4)))
        Sequential: 2 weights in 2 layers, 5 operations on 3 inputs
        a chain of fully-connected layers
        0.weight  Linear  3 x 4
        2.weight  Linear  2 x 3
    """
    model = unwrap(model)
    layers = find_prunable_layers(model, include=include, exclude=exclude)
    batch, _ = data_of(data, device=numerics.device_of(model)).first_batch()
    return trace_layers(model, layers, batch)


def trace_layers(
    model: nn.Module, layers: Iterable[PrunableLayer], batch: Batch, norm_stats: NormStats = "running"
) -> ModelMap:
    """The same for the layers that were found, and a batch.

    Three inputs that differ are run; if the model refuses three, all of the batch.
    """
    layers = tuple(layers)
    points = _inputs_to_run(batch)
    try:
        return _traced(model, layers, batch, points, norm_stats)
    except (DataError, ModelError):
        if len(points) == batch.n_points:
            raise
    return _traced(model, layers, batch, numerics.integers(0, batch.n_points), norm_stats)


Maps = dict[tuple[Any, ...], ModelMap]  # by form of batch: the shapes and dtypes of its inputs


def map_for(
    model: nn.Module, layers: Iterable[PrunableLayer], batch: Batch, maps: Maps, norm_stats: NormStats = "running"
) -> ModelMap:
    """The map for batches of this form: one that is known, or a new one, which is added.

    A loop over steps uses a weight as often as there are steps: forms with other sizes may be used in other ways.
    """
    form = form_of(batch)
    found = maps.get(form)
    if found is None:
        found = maps[form] = trace_layers(model, layers, batch, norm_stats)
        _warn_of_unassigned(found, [one for one in maps.values() if one is not found], batch)
    return found


def _warn_of_unassigned(found: ModelMap, others: Sequence[ModelMap], batch: Batch) -> None:
    """Warns about weights whose patches cannot be assigned to inputs, unless it was said already."""
    padding = "" if batch.real_BT is None else ", and padding is not left out"
    said = {name for other in others for name, _ in other.unassigned}
    for name in dict.fromkeys(name for name, _ in found.unassigned if name not in said):
        _log.warning(
            "%s: sipp cannot tell which values in %s belong to which input, so statements about single inputs are "
            "unknown for it%s",
            batch.where,
            name,
            padding,
        )


def read_uses(
    model: nn.Module,
    layers: Iterable[PrunableLayer],
    batch: Batch,
    on_use: OnUse,
    found: ModelMap | None = None,
    norm_stats: NormStats = "running",
    *,
    watches: bool = False,
) -> Any:
    """The model's output on a batch; `on_use` is called for every use of a weight, in the order of execution.

    A use is handed over before the layer runs and must be consumed at once: later operations may overwrite its input
    in place. The model is left exactly as it was, also when something raises. With a map, patches that it does not
    assign to inputs come together, and layers that it did not meet are checked. Without one, uses come as their layers
    report them. If it `watches`, a weight that is read elsewhere is refused, as in a trace.
    """
    layers = tuple(layers)
    operands = _operands(layers)
    if found is None:
        return run_pass(model, layers, Pass(batch, _as_it_is, on_use, operands=operands), norm_stats)
    recorder = Recorder(model, _holders(layers), batch.where, operands) if watches else None
    one_pass = Pass(batch, _assigning(found), on_use, set(found.checked), recorder, operands)
    return run_pass(model, layers, one_pass, norm_stats)


def _assigning(found: ModelMap) -> Group:
    """A function for the uses of one pass, in order: those that are not assigned are put together."""
    seen: Counter[str] = Counter()

    def group(weight: Weight, use: WeightUse) -> WeightUse:
        seen[weight.name] += 1
        is_one = len(use.windows) == 1 and use.attributed  # one input owns all patches
        return use if is_one or found.is_assigned(weight.name, seen[weight.name]) else together(use)

    return group


def record(model: nn.Module, batch: Batch) -> Recording:
    """A watched run of three inputs of a batch, of a model whose layers do not matter."""
    few = points_at(batch, _inputs_to_run(batch))
    recorder = Recorder(model, {}, batch.where)
    return recorder.recording(run_pass(model, (), Pass(few, _as_it_is, recorder=recorder), "running"))


def _as_it_is(weight: Weight, use: WeightUse) -> WeightUse:
    return use


def _inputs_to_run(batch: Batch) -> Tensor:
    """Which inputs of a batch are run: the first, and others from the end that differ from each other.

    If there are too few that differ, the last one is repeated. Two are not enough: where a b is repeated an odd number
    of times (a b a, b a b), the blocks of both seem to be exchanged with them.
    """
    if batch.n_points == 1:
        return numerics.integers(0, 1)
    chosen = {0: _content(batch, 0)}
    for other in range(batch.n_points - 1, 0, -1):
        content = _content(batch, other)
        if not any(all(map(numerics.same_tensor, content, known)) for known in chosen.values()):
            chosen[other] = content
        if len(chosen) == N_RUN:
            break
    found = sorted(chosen)
    return torch.tensor(found + found[-1:] * (N_RUN - len(found)), dtype=torch.int64, device="cpu")


def _content(batch: Batch, point: int) -> list[Tensor]:
    """The tensors of one input of a batch."""
    return list(tensors_of_inputs(points_at(batch, slice(point, point + 1))).values())


def _traced(
    model: nn.Module, layers: tuple[PrunableLayer, ...], batch: Batch, points: Tensor, norm_stats: NormStats
) -> ModelMap:
    few = points_at(batch, points)
    operands = _operands(layers)
    recorder = Recorder(model, _holders(layers), batch.where, operands)
    seen, checked = _Uses(recorder), set[str]()
    one_pass = Pass(few, seen, checked=checked, recorder=recorder, operands=operands)
    output = run_pass(model, layers, one_pass, norm_stats)
    run = recorder.recording(output)
    seen.compare(*_moved(model, layers, few, norm_stats))
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
        output=output if sum(t.numel() for t in every_tensor(output)) <= MOST_KEPT else None,
        points=points,
    )


def _operands(layers: Iterable[PrunableLayer]) -> Operands:
    """What the weights whose adapters ask for it are multiplied by."""
    return Operands([one for layer in layers for one in recorded_parameters(layer).values()])


def _holders(layers: Sequence[PrunableLayer]) -> dict[str, frozenset[str]]:
    """By weight, the modules that may read it."""
    found: dict[str, set[str]] = {}
    for layer in layers:
        for weight in layer.weights.values():
            found.setdefault(weight.name, set()).add(layer.module_name)
    return {name: frozenset(modules) for name, modules in found.items()}


# --- Do the patches of a use move with the inputs? --------------------------------------------------------------------

ELSEWHERE = "the inputs do not run along dimension 0 of what it reads"
NOT_MOVED = "its patches did not move with the inputs when these came in another order"
ALIKE = "its patches are the same for all inputs that were run, and may belong to others"
BY_VALUES = "values decide which patches it reads"
REFUSED = "the model refuses its inputs in another order"


def _moved(
    model: nn.Module, layers: tuple[PrunableLayer, ...], few: Batch, norm_stats: NormStats
) -> tuple[Tensor, _Uses | None]:
    """Another order of the inputs, and the uses of a run in it; None if the model refuses it.

    A reversed batch has the same statistics. If a model refuses that (it wants the longest sequence first), the last
    input but one takes the place of the last, too.
    """
    reverse = numerics.integers(few.n_points - 1, -1, -1)
    sorted_still = numerics.integers(0, few.n_points).clamp(max=few.n_points - 2)
    for placed in (reverse, sorted_still) if few.n_points > 1 else ():
        seen = _Uses(None)
        try:
            run_pass(model, layers, Pass(points_at(few, placed), seen, operands=_operands(layers)), norm_stats)
        except (DataError, ModelError):  # the order's fault: the first run had the same inputs
            continue
        return placed, seen
    return reverse, None


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
        self.folded: set[Key] = set()  # uses of layers whose input has other things than the inputs along dimension 0
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
            given = [self.recorder.values[read] for read in refs_in(call.arguments)]
            by_values = any(one.by_values for one in given)
            why = BY_VALUES if by_values else "" if use.attributed else ELSEWHERE
            if not given or given[0].shape[:1] != windows.shape[:1]:
                self.folded.add(key)
            self.uses.append(Use(*key, call.module, use.parameter, call.at, positions, (rows.start, rows.stop), why))
        return use

    def compare(self, placed_B: Tensor, moved: _Uses | None) -> None:
        """Marks the uses whose patches did not move with the inputs to their new places; None: none are known."""
        open_ = [
            use for use in self.uses if not use.unassigned and len(self.samples[use.weight, use.nth].values_BN) > 1
        ]
        why = dict[Key, str]()
        shown = list[tuple[Key, Tensor]]()
        for key in ((use.weight, use.nth) for use in open_):
            first, second = self.samples[key], None if moved is None else moved.samples.get(key)
            if second is None or first.values_BN.shape != second.values_BN.shape:
                why[key] = REFUSED if moved is None else BY_VALUES
            else:
                shown.append((key, _has_moved_and_differs(first, second, placed_B)))
        on_one = [both.to(shown[0][1].device) for _, both in shown]
        found = torch.stack(on_one).tolist() if shown else []  # a GPU is waited for only here
        for (key, _), (has_moved, differs) in zip(shown, found):
            why[key] = "" if has_moved and (differs or key not in self.folded) else ALIKE if has_moved else NOT_MOVED
        self.uses = [replace(use, unassigned=why.get((use.weight, use.nth), use.unassigned)) for use in self.uses]


def _sampled(windows: Tensor) -> Tensor:
    """Some values of each point's windows, evenly spaced in memory (B x N)."""
    values_BN = distinct_values(windows).detach()
    n = values_BN.shape[1]
    if n > MOST_COMPARED:
        at = torch.linspace(0, n - 1, MOST_COMPARED, dtype=torch.float64, device=windows.device).round().long()
        return values_BN[:, at]
    return values_BN.clone()


def _has_moved_and_differs(first: _Sample, second: _Sample, placed_B: Tensor) -> Tensor:
    """Whether the patches moved with the inputs, which have these places in the second run, and whether they differ."""
    wanted_BN, found_BN = first.values_BN[placed_B.to(first.values_BN.device)], second.values_BN
    size = torch.maximum(first.values_BN.abs().amax(), found_BN.abs().amax())
    has_moved = (wanted_BN - found_BN).abs().amax() <= first.tolerance * size  # not if anything is NaN
    return torch.stack((has_moved, (first.values_BN != first.values_BN[:1]).any()))


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
        of_reason = dict.fromkeys(name for (name, _), one in found.unassigned.items() if one == reason)
        yield f"not assigned to inputs, {reason}: {', '.join(of_reason)}"


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
