"""Runs a model on a batch, leaving no trace in it; hooks on its layers hand every use of a weight to a consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.batches import Batch, Weight, WeightUse
from sipp.inputs.data import fresh, tensors_of_inputs
from sipp.inputs.layer_checks import (
    Expected,
    expected_output,
    expected_products,
    refuse_nan_biases,
    refuse_other_output,
)
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.patches import has_patches, with_padding_zeroed
from sipp.inputs.recording import Operands, Recorder, Watch
from sipp.inputs.restore import ONE_AT_A_TIME, fused_attention, restoring, without_caches
from sipp.results import NormStats, numerics

OnUse = Callable[[Weight, WeightUse, Batch], None]
Group = Callable[[Weight, WeightUse], WeightUse]  # groups a use's patches by point, before padding is zeroed


# --- A model on a batch -----------------------------------------------------------------------------------------------


def run_batch(model: nn.Module, batch: Batch, own_errors: Sequence[Exception] = ()) -> Any:
    """The model's output on a batch; if the model raises, a DataError names the batch and its shapes.

    Errors of sipp's own (also those listed in `own_errors`) and out-of-memory errors are raised unchanged.
    """
    try:
        return model(*batch.args, **batch.kwargs)
    except (DataError, ModelError, OptionError):
        raise
    except Exception as error:  # their network, their data: anything may be raised
        if numerics.is_out_of_memory(error) or any(error is one for one in own_errors):
            raise
        raise DataError(_failure(model, batch, error)) from error


def _described(value: Any) -> str:
    """The dtype and shape of a tensor, or the type of anything else."""
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
    # restores training and track_running_stats too: they are attributes like others
    with ONE_AT_A_TIME, restoring(modules), without_caches(modules):
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


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


# --- With hooks on its layers -----------------------------------------------------------------------------------------


def _ignored(weight: Weight, use: WeightUse, batch: Batch) -> None:
    pass


@dataclass(frozen=True)
class Pass:
    """One run of a batch, as its hooks need it."""

    batch: Batch
    group: Group
    on_use: OnUse = _ignored
    checked: set[str] | None = None  # modules whose output was looked at already; None: none is to be looked at
    recorder: Recorder | None = None
    operands: Operands | None = None  # of the weights whose adapters ask for them
    checked_layers: list[PrunableLayer] = field(default_factory=list)  # in this pass
    own_errors: list[Exception] = field(default_factory=list)  # raised by `on_use`: not the model's fault

    def unobserved(self) -> AbstractContextManager[Any]:
        """A context for our own operations, which no watch must take for the model's."""
        return torch._C.DisableTorchFunction() if self.watch is None else self.watch.paused()

    @cached_property
    def watch(self) -> Watch | None:
        """The mode that sees every operation, if any is needed."""
        if self.recorder is not None:
            return self.recorder.watch
        return Watch(self.operands) if self.operands is not None and self.operands.weights else None

    def hand_over(self, weight: Weight, use: WeightUse) -> None:
        """Calls `on_use` with the patches of a use by point, without its padding."""
        use = with_padding_zeroed(self.group(weight, use), self.batch)
        try:
            self.on_use(weight, use, self.batch)
        except Exception as error:
            self.own_errors.append(error)
            raise


def run_pass(model: nn.Module, layers: Iterable[PrunableLayer], one_pass: Pass, norm_stats: NormStats) -> Any:
    """The model's output on a batch, with hooks on the prunable layers that hand over its uses and check outputs.

    The model is given a copy: a first layer that works in place must not change the caller's data.
    """
    handles: list[RemovableHandle] = []
    with ExitStack() as stack:
        modules = stack.enter_context(scoring_mode(model, norm_stats))  # no other thread runs the model meanwhile
        if any(map(_is_compiled, modules)):  # torch.compile would compile our hooks too
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(_remove, handles)
        given = fresh(one_pass.batch)
        hooks = [_LayerHooks(layer, one_pass) for layer in layers]  # while only the owner's hooks are there
        if one_pass.recorder is not None:  # its hooks run before those of layers
            stack.enter_context(one_pass.recorder.watching(given.args, given.kwargs))
        elif one_pass.watch is not None:
            stack.enter_context(one_pass.watch)
        for one in hooks:
            handles.extend(one.register())
        output = run_batch(model, given, one_pass.own_errors)
    refuse_nan_biases(one_pass.checked_layers)
    if one_pass.checked is not None:
        one_pass.checked.update(layer.module_name for layer in one_pass.checked_layers)
    return output


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class _LayerHooks:
    """The hooks of one layer in one pass. The user's own hooks run first, so ours see what the layer really gets."""

    __slots__ = ("awaited", "checks", "is_plain_torch", "layer", "n_hooks", "one_pass")

    def __init__(self, layer: PrunableLayer, one_pass: Pass) -> None:
        self.layer, self.one_pass = layer, one_pass
        self.checks = one_pass.checked is not None and layer.module_name not in one_pass.checked
        self.is_plain_torch = self.checks and layer.is_plain_torch  # asked before our own hooks are there
        self.n_hooks = 0  # of the module, once ours are there
        self.awaited: list[Expected | None] = []  # one for each checked call under way

    def register(self) -> Iterator[RemovableHandle]:
        """Registers them, and returns what removes each."""
        module = self.layer.module
        if self.layer.adapter.uses_after is not None:  # before the user's own hooks, which may change the output
            yield module.register_forward_hook(self.report_uses_after, prepend=True, with_kwargs=True)
        if self.checks:
            yield module.register_forward_hook(self.compare_output)
        yield module.register_forward_pre_hook(self.report_uses, with_kwargs=True)
        self.n_hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)

    def report_uses(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hands over what is known before the layer runs, and computes its output if that is to be compared."""
        one_pass, adapter = self.one_pass, self.layer.adapter
        with one_pass.unobserved():
            by_use = []
            n_hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)  # one may have come meanwhile
            compares = self.checks and not (self.is_plain_torch and n_hooks == self.n_hooks)
            reported = adapter.uses(module, args, kwargs, one_pass.batch.n_points)
            for weight, use in _uses(self.layer, reported, one_pass.batch):
                if compares and not callable(adapter.output):
                    by_use.append(expected_products(self.layer, weight, use, one_pass.batch.n_points))
                one_pass.hand_over(weight, use)
            if compares:
                self.awaited.append(expected_output(self.layer, args, kwargs, by_use))
            if self.checks:
                one_pass.checked_layers.append(self.layer)
            self._operands()  # drops those of earlier calls

    def report_uses_after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Hands over what is known when the layer has run."""
        one_pass, uses_after = self.one_pass, self.layer.adapter.uses_after
        assert uses_after is not None
        with one_pass.unobserved():
            reported = uses_after(module, args, kwargs, output, self._operands(), one_pass.batch.n_points)
            for weight, use in _uses(self.layer, reported, one_pass.batch):
                one_pass.hand_over(weight, use)

    def compare_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Raises if the output is not the one that follows from the uses."""
        expected = self.awaited.pop() if self.awaited else None
        if expected is not None:
            with self.one_pass.unobserved():
                refuse_other_output(self.layer, expected, output, self.one_pass.batch)

    def _operands(self) -> dict[str, list[Tensor]]:
        """What the weights of this layer were multiplied by since the last call, where that is recorded."""
        operands = self.one_pass.operands
        if operands is None:
            return {}
        return {name: operands.pop(one) for name, one in recorded_parameters(self.layer).items()}


def recorded_parameters(layer: PrunableLayer) -> dict[str, nn.Parameter]:
    """The chosen weights of a layer whose operands are recorded while it runs."""
    names = layer.adapter.recorded(layer.module)
    return {name: layer.parameter(name) for name in names if name in layer.weights}


def _uses(layer: PrunableLayer, reported: Iterable[WeightUse], batch: Batch) -> Iterator[tuple[Weight, WeightUse]]:
    """The uses of one call that have patches of a chosen weight, as its adapter reports them."""
    try:
        for use in reported:
            weight = layer.weights.get(use.parameter)  # None: not chosen, or tied to an embedding
            if weight is not None and has_patches(use, weight, layer.parameter(use.parameter).device, batch):
                yield weight, use
    except (DataError, ModelError) as error:
        raise type(error)(f"{layer.label} {error.what}", where=batch.where, fix=error.fix) from None


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile, or the module's own `compile`, was called for it."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
