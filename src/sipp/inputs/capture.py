"""Runs a model over batches and hands every use of a prunable weight to a consumer, by hooks on its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.attribution import (
    ARRANGEMENTS,
    Arrangement,
    Grouper,
    Orders,
    Recorder,
    UseKey,
    orders_of,
    placements,
)
from sipp.inputs.batches import fresh, points_at, tensors_of_inputs
from sipp.inputs.grouped_attention import fused_attention
from sipp.inputs.independence import AT_ONCE, Alone, tensors_in
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.output_check import Expected, Gap, expected_output, gap_of, products, refuse_gaps, refuse_nan_biases
from sipp.inputs.patches import checked_use, with_padding_zeroed
from sipp.inputs.restore import ONE_AT_A_TIME, left_as_they_were, without_caches
from sipp.inputs.watching import Operations, Watch
from sipp.records.batches import Batch, WeightUse
from sipp.records.numerics import integers, is_out_of_memory
from sipp.records.options import NormStats
from sipp.records.ranking import Weight

OnUse = Callable[[Weight, WeightUse, Batch], None]
OnOutput = Callable[[Any, Batch], None]
Group = Callable[[Weight, WeightUse], WeightUse]  # groups a use's patches by point, before padding is zeroed
Run = Callable[[Batch, OnUse], Any]  # returns the output of a batch, and calls OnUse for its uses on the way

_log = logging.getLogger("sipp")


@dataclass(frozen=True)
class Probe:
    """What running some points of a batch showed, for all batches of the same form unless it names a `batch`."""

    orders: Orders  # of the patches of each use
    n_uses: dict[str, int]  # of each weight in one pass
    alone: Alone | None  # the outputs of the few points by themselves
    checked: set[str]  # modules whose output was compared with what was captured of it
    batch: Batch | None  # the one batch it holds for; None: it holds for all batches of this form

    @property
    def is_representative(self) -> bool:
        """Whether it holds for every batch of the same form."""
        return self.batch is None


Probes = dict[tuple[Any, ...], Probe]  # by shapes and dtypes of the inputs


def capture(
    model: nn.Module,
    layers: Iterable[PrunableLayer],
    batches: Iterable[Batch],
    *,
    on_use: OnUse,
    on_output: OnOutput,
    norm_stats: NormStats = "running",
) -> None:
    """Calls `on_use` for every use of a weight, in execution order, and `on_output` after each batch."""
    run = runner(model, layers, norm_stats)
    for batch in batches:
        on_output(run(batch, on_use), batch)


def runner(
    model: nn.Module,
    layers: Iterable[PrunableLayer],
    norm_stats: NormStats = "running",
    checked: Probes | None = None,
    orders: Orders | None = None,
) -> Run:
    """A function that runs a batch, with hooks on the prunable layers while it does, and hands over its uses.

    A use is handed over before the layer runs and must be consumed at once: later operations may overwrite its
    input in place. The model is left exactly as it was, also when something raises.
    With `checked`, the probes so far by form of batch, a batch of a new form is probed first (see `probe`).
    Without it, uses are grouped by point in the given `orders`, or else as their shapes suggest.
    """
    layers = tuple(layers)
    watched: set[int] = set()  # ids of the probes of which a whole batch was run

    def run(batch: Batch, on_use: OnUse) -> Any:
        known = None if checked is None else probe(model, layers, batch, norm_stats, checked)
        order = orders if known is None else known.orders
        group = _as_reported if order is None else Grouper(order)
        # the probe may have missed a branch that whole batches take
        is_new = known is not None and not (known.is_representative and id(known) in watched)
        watch = Watch(layers, batch.where) if is_new else None
        operations = _operations(layers, follows=False) if any(map(_caught, layers)) else None
        checked_modules = None if known is None else known.checked
        one_pass = _Pass(batch, group, on_use=on_use, checked=checked_modules, watch=watch, operations=operations)
        output = _run_hooked(model, layers, one_pass, norm_stats)
        watched.add(id(known))
        return output

    return run


def probe(
    model: nn.Module, layers: Iterable[PrunableLayer], batch: Batch, norm_stats: NormStats, known: Probes
) -> Probe:
    """What is known of batches of this form; if nothing is, a few of its points are run to find out.

    The run checks what hooks on layers cannot see: a layer whose output does not follow from its uses, a weight that
    is read elsewhere, patches that belong to another point. If a few points are not representative (control flow
    depends on values, or several orders fit), every batch is probed in full.
    """
    form = signature_of(batch)
    found = known.get(form)
    if found is None or not (found.is_representative or found.batch is batch):
        new = _probed(model, tuple(layers), batch, norm_stats, few=found is None)
        _warn_of_together(new, found, batch)
        found = known[form] = new
    return found


def is_new_form(batch: Batch, known: Probes) -> bool:
    """Whether no batch of this form was probed."""
    return signature_of(batch) not in known


def goes_by_form(batch: Batch, known: Probes) -> bool:
    """Whether all batches of this form, which was probed, use the weights alike: no control flow depends on values."""
    return known[signature_of(batch)].is_representative


def _probed(
    model: nn.Module, layers: tuple[PrunableLayer, ...], batch: Batch, norm_stats: NormStats, *, few: bool
) -> Probe:
    """The probe of a few points; of the whole batch if they are not representative or the model rejects them."""
    for arrangement in ARRANGEMENTS if few and batch.n_points > 1 else ():
        try:
            chosen = first_and_last(batch.n_points)[arrangement.points]
            found = _probe_few(model, layers, batch, chosen, arrangement, norm_stats)
        except (DataError, ModelError):
            continue
        if found.is_representative:
            return found
        break
    return _probe_all(model, layers, batch, norm_stats)


def _probe_few(
    model: nn.Module,
    layers: tuple[PrunableLayer, ...],
    batch: Batch,
    chosen: Tensor,
    arrangement: Arrangement,
    norm_stats: NormStats,
) -> Probe:
    """The probe of a few points, one of them given twice: a single run shows which patches the two copies share."""
    recorder = Recorder()
    one_pass = _checking_pass(points_at(batch, chosen), layers, recorder)
    output = _run_hooked(model, layers, one_pass, norm_stats)
    exchanged = torch.tensor(arrangement.exchanged, dtype=torch.int64, device="cpu")
    orders = orders_of(recorder, recorder, exchanged)
    return _probe_of(one_pass, orders, recorder, (chosen, output), batch)


def _probe_all(model: nn.Module, layers: tuple[PrunableLayer, ...], batch: Batch, norm_stats: NormStats) -> Probe:
    """The probe of a whole batch: runs it, then again with its points permuted.

    A second permutation is tried if the first is ambiguous: a batch may equal its own reversal.
    """
    n_points, alone, first = batch.n_points, None, Recorder()
    first_pass = _checking_pass(batch, layers, first)
    _run_hooked(model, layers, first_pass, norm_stats)
    orders = orders_of(first, Recorder(), integers(0, n_points))
    for placed in placements(n_points) if n_points > 1 else ():
        moved = Recorder()
        try:
            permuted = _Pass(points_at(batch, placed), moved, operations=_operations(layers, follows=False))
            alone = placed, _run_hooked(model, layers, permuted, norm_stats)
        except (DataError, ModelError):  # the permutation's fault: the first run had the same points
            continue
        orders = orders_of(first, moved, placed)
        if not any(one.is_tied and one.order == "together" for one in orders.values()):
            break
    return _probe_of(first_pass, orders, first, alone, batch)


def _probe_of(checked_pass: _Pass, orders: Orders, recorder: Recorder, alone: Alone | None, batch: Batch) -> Probe:
    """The probe after a checking pass; it holds for this batch only if control flow depends on values or orders tie."""
    assert checked_pass.watch is not None and checked_pass.operations is not None and checked_pass.checked is not None
    goes_by_values = checked_pass.operations.by_values or checked_pass.watch.takes_values
    holds_for_all = not goes_by_values and not any(order.is_tied for order in orders.values())
    return Probe(orders, recorder.n_uses, alone, checked_pass.checked, None if holds_for_all else batch)


def first_and_last(n_points: int) -> Tensor:
    """The first and the last point of a batch, which stand for all of it."""
    return integers(0, n_points)[:: max(1, n_points - 1)]


def _warn_of_together(probe: Probe, earlier: Probe | None, batch: Batch) -> None:
    """Warns about weights whose patches cannot be assigned to points, once per form of batch."""
    padding = "" if batch.real_BT is None else ", and padding is not left out"
    warned = set() if earlier is None else set(_together(earlier))
    new = (name for name, i in _together(probe) if (name, i) not in warned)
    for name in dict.fromkeys(new) if batch.n_points > 1 else ():
        _log.warning(
            "%s: sipp cannot tell which values in %s belong to which input, so statements about single inputs are "
            "unknown for it%s",
            batch.where,
            name,
            padding,
        )


def _together(probe: Probe) -> list[UseKey]:
    """The uses whose patches cannot be assigned to points."""
    return [key for key, one in probe.orders.items() if one.order == "together"]


def _ignored(weight: Weight, use: WeightUse, batch: Batch) -> None:
    pass


@dataclass(frozen=True)
class _Pass:
    """One run of a batch, as its hooks need it."""

    batch: Batch
    group: Group
    _: KW_ONLY
    on_use: OnUse = _ignored
    checked: set[str] | None = None  # modules whose output was compared already; None: none is to be compared
    watch: Watch | None = None
    operations: Operations | None = None
    gaps: list[Gap] = field(default_factory=list)  # of the outputs that are compared in this pass
    trusted: list[PrunableLayer] = field(default_factory=list)  # whose output need not be compared

    def unobserved(self) -> AbstractContextManager[Any]:
        """A context for our own operations, which `watch` and `operations` must not take for the model's."""
        unwatched: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
        return unwatched if self.operations is None else self._paused(unwatched, self.operations)

    @staticmethod
    @contextmanager
    def _paused(unwatched: AbstractContextManager[Any], operations: Operations) -> Iterator[None]:
        with unwatched, operations.paused():
            yield


def _checking_pass(batch: Batch, layers: tuple[PrunableLayer, ...], recorder: Recorder) -> _Pass:
    """A pass that compares every layer's output, and watches what the model reads and goes by."""
    watch = Watch(layers, batch.where)
    return _Pass(batch, recorder, checked=set(), watch=watch, operations=_operations(layers, follows=True))


def _as_reported(weight: Weight, use: WeightUse) -> WeightUse:
    return use


def run_batch(model: nn.Module, batch: Batch, ours: Sequence[Exception] = ()) -> Any:
    """The model's output on a batch; if the model raises, a DataError names the batch and its shapes.

    Errors of sipp's own (also those listed in `ours`) and out-of-memory errors are raised unchanged.
    """
    try:
        return model(*batch.args, **batch.kwargs)
    except (DataError, ModelError, OptionError):
        raise
    except Exception as error:  # their network, their data: anything may be raised
        if is_out_of_memory(error) or any(error is one for one in ours):
            raise
        raise DataError(_failure(model, batch, error)) from error


def _described(value: Any) -> str:
    """The dtype and shape of a tensor; the type of what is none."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype)[6:]} {' x '.join(map(str, value.shape))}"


def _failure(model: nn.Module, batch: Batch, error: Exception) -> str:
    """The message for a forward that failed: on which inputs, with which error, and what to try."""
    inputs = tensors_of_inputs(batch)
    given = ", ".join(f"{name}: {_described(value)}" for name, value in inputs.items())
    text = f"{batch.where} ({given}): the model raised {type(error).__name__}: {error}"
    if isinstance(error, TypeError) and batch.labels is not None and batch.kwargs:
        text += " (the labels of a dict batch are not passed; if the model takes them, give the pair (dict, labels))"
    wanted = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if wanted and not {t.dtype for t in inputs.values() if isinstance(t, Tensor)} <= wanted and "type" in str(error):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wanted))
        return f"{text}; its parameters are {names}: convert the inputs to that if it takes no others"
    return f"{text}; give inputs of the shape and type that the model takes"


def _run_hooked(model: nn.Module, layers: Iterable[PrunableLayer], one_pass: _Pass, norm_stats: NormStats) -> Any:
    """The model's output on a batch, with hooks on the prunable layers that hand over its uses and check outputs.

    The model is given a copy: a first layer that works in place must not change the caller's data.
    """
    ours: list[Exception] = []  # raised by `on_use` or `group`: not the model's fault

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            try:
                return call(*args)
            except Exception as error:
                ours.append(error)
                raise

        return noted

    one_pass = replace(one_pass, on_use=noting(one_pass.on_use), group=noting(one_pass.group))
    with ExitStack() as stack:
        modules = stack.enter_context(scoring_mode(model, norm_stats))  # no other thread runs the model meanwhile
        if any(map(_is_compiled, modules)):  # torch.compile would compile our hooks too
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_hooked(layers, one_pass))
        if one_pass.watch is not None:
            stack.enter_context(one_pass.watch)
        given = fresh(one_pass.batch)
        if one_pass.operations is not None:
            stack.enter_context(one_pass.operations)
            if one_pass.operations.follows:
                one_pass.operations.follow((given.args, given.kwargs))
        output = run_batch(model, given, ours)
    looked_at = [*one_pass.trusted, *(gap.layer for gap in one_pass.gaps)]
    refuse_nan_biases(looked_at)
    refuse_gaps(one_pass.gaps, one_pass.batch)
    if one_pass.checked is not None:
        one_pass.checked.update(layer.module_name for layer in looked_at)
    return output


@contextmanager
def _hooked(layers: Iterable[PrunableLayer], one_pass: _Pass) -> Iterator[None]:
    """A context in which the layers have their hooks."""
    handles: list[RemovableHandle] = []
    try:
        for layer in layers:
            handles.extend(_hooks(layer, one_pass))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(layer: PrunableLayer, one_pass: _Pass) -> Iterator[RemovableHandle]:
    """Registers the hooks of one layer. The user's own hooks run first, so ours see what the layer really gets."""
    module = layer.module
    checks = one_pass.checked is not None and layer.module_name not in one_pass.checked
    is_torchs_own = checks and layer.is_torchs_own  # asked before our own hooks are there
    n_ours: list[int] = []  # hooks of the module, once ours are there
    awaited: list[Expected | None] = []  # one for each checked call under way

    def n_hooks() -> int:
        return len(module._forward_hooks) + len(module._forward_pre_hooks)

    def operands() -> dict[str, list[Tensor]]:
        """What the weights of this layer were multiplied by since the last call, where that is recorded."""
        seen = one_pass.operations
        return {} if seen is None else {name: seen.pop_operands(layer.parameter(name)) for name in _caught(layer)}

    def report_uses(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with one_pass.unobserved():
            by_use = []
            compares = checks and not (is_torchs_own and n_hooks() == n_ours[0])  # a hook may have come meanwhile
            reported = layer.adapter.uses(module, args, kwargs, one_pass.batch.n_points)
            for weight, whole, use in _uses(layer, reported, one_pass.batch, one_pass.group):
                if compares and not callable(layer.adapter.output):
                    by_use.append(products(layer, weight, whole))
                one_pass.on_use(weight, use, one_pass.batch)
            if compares:
                awaited.append(expected_output(layer, args, kwargs, by_use))
            elif checks:
                one_pass.trusted.append(layer)
            operands()  # drops those of earlier calls

    def report_uses_after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        assert layer.adapter.uses_after is not None
        with one_pass.unobserved():
            reported = layer.adapter.uses_after(module, args, kwargs, output, operands(), one_pass.batch.n_points)
            for weight, _, use in _uses(layer, reported, one_pass.batch, one_pass.group):
                one_pass.on_use(weight, use, one_pass.batch)

    def compare_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        expected = awaited.pop() if awaited else None
        if expected is not None:
            with one_pass.unobserved():
                one_pass.gaps.append(gap_of(layer, expected, output, one_pass.batch))

    if layer.adapter.uses_after is not None:  # before the user's own hooks, which may change the output
        yield module.register_forward_hook(report_uses_after, prepend=True, with_kwargs=True)
    if checks:
        yield module.register_forward_hook(compare_output)
    if one_pass.watch is not None:  # reads by the user's own hooks of the module are the module's
        yield module.register_forward_pre_hook(partial(one_pass.watch.enter, layer), prepend=True)
        yield module.register_forward_hook(partial(one_pass.watch.leave, layer), always_call=True)
    yield module.register_forward_pre_hook(report_uses, with_kwargs=True)
    n_ours.append(n_hooks())


def _caught(layer: PrunableLayer) -> list[str]:
    """The chosen weights of a layer whose operands are recorded while it runs."""
    return [name for name in layer.adapter.caught(layer.module) if name in layer.weights]


def _operations(layers: Iterable[PrunableLayer], *, follows: bool) -> Operations:
    """The mode that records them; if it `follows` the data, it also sees whether control flow depends on values."""
    return Operations([layer.parameter(name) for layer in layers for name in _caught(layer)], follows)


def _uses(
    layer: PrunableLayer, reported: Iterable[WeightUse], batch: Batch, group: Group
) -> Iterator[tuple[Weight, WeightUse, WeightUse]]:
    """The uses of one call: the weight, the use as its adapter reports it, and by point without its padding."""
    reported = iter(reported)
    while True:
        try:
            use = next(reported, None)
            if use is None:
                return
            weight = layer.weights.get(use.parameter)
            if weight is None:  # not chosen, or tied to an embedding
                continue
            fits = checked_use(use, weight, layer.parameter(use.parameter).device, batch)
        except (DataError, ModelError) as error:
            raise type(error)(f"{layer.label} {error.what}", where=batch.where, fix=error.fix) from None
        if fits is not None:
            yield weight, use, with_padding_zeroed(group(weight, use), batch)


def signature_of(batch: Batch) -> tuple[Any, ...]:
    """The shapes and dtypes of its inputs, except for the number of points."""
    inputs = tensors_of_inputs(batch)
    return (batch.n_points > 1, *((name, str(t.dtype), tuple(t.shape[1:])) for name, t in inputs.items()))


@contextmanager
def scoring_mode(model: nn.Module, norm_stats: NormStats) -> Iterator[list[nn.Module]]:
    """A context without gradients in which the model is in eval mode; flags and buffers are restored afterwards.

    Yields all modules of the model.
    With `norm_stats="batch"` BatchNorm layers use the statistics of the batch and leave their buffers untouched.
    PyTorch's fused attention path is off: it runs a whole encoder layer without calling the layers inside it.
    Threads wait for each other, so that none mistakes the state another one set for the model's own.
    """
    modules = list(model.modules())
    norms: list[Any] = [m for m in modules if _uses_batch(m)] if norm_stats == "batch" else []
    with (
        ONE_AT_A_TIME,
        left_as_they_were(modules),
        without_caches(modules),
    ):  # training and track_running_stats are attributes like others
        fastpath = torch.backends.mha.get_fastpath_enabled()
        try:
            if any(module.training for module in modules):
                model.eval()
            for module in norms:
                module.training = True
                module.track_running_stats = False
            torch.backends.mha.set_fastpath_enabled(False)
            with torch.no_grad(), fused_attention(modules):
                yield modules
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)


def depends_on_batch(model: nn.Module, norm_stats: NormStats) -> bool:
    """Whether a point's activations depend on the other points of its batch (batch statistics somewhere)."""
    return any(_uses_batch(m) and (norm_stats == "batch" or m.running_mean is None) for m in model.modules())


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile, or the module's own `compile`, was called for it."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


def output_norms(output: Any, n_points: int) -> Tensor | None:
    """||f(x)|| for each point (float64), over all floating-point tensors of the output; None if they have no points."""
    tensors = [t for t in tensors_in(output) if t.ndim > 0 and len(t) == n_points]
    if not tensors:
        return None
    return reduce(torch.add, map(_squared_norms, tensors)).sqrt()


def _squared_norms(tensor: Tensor) -> Tensor:
    """The squared norm of each row (float64), a few rows at a time if they are large."""
    rows = tensor.detach().reshape(len(tensor), -1)
    parts = rows.split(max(1, AT_ONCE // max(1, rows.shape[1])))
    return torch.cat([part.double().square().sum(1) for part in parts])
