"""Runs a model on a batch and hands every use of a weight to a consumer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sipp.errors import DataError, ModelError
from sipp.inputs.batches import Batch, Weight, WeightUse
from sipp.inputs.layer_checks import LayerChecks
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.patches import has_patches
from sipp.inputs.recording import Recorder
from sipp.inputs.running import run_batch, scoring_mode
from sipp.results import NormStats

OnUse = Callable[[Weight, WeightUse, Batch], None]


@dataclass
class Run:
    """One run of a batch, whose layers run `_Reading`s of themselves."""

    batch: Batch
    on_use: OnUse
    replaced: Collection[str] = ()  # modules whose forward is known to give what their adapter returns
    recorder: Recorder | None = None
    checks: LayerChecks | None = None
    own_errors: list[Exception] = field(default_factory=list)  # raised by `on_use`: not the model's fault

    def of(self, model: nn.Module, layers: Iterable[PrunableLayer], norm_stats: NormStats) -> Any:
        """The model's output. It is given a copy: a first layer that works in place must not change the caller's data.

        The model is left exactly as it was, also when something raises.
        """
        with ExitStack() as stack:
            modules = stack.enter_context(scoring_mode(model, norm_stats))
            if any(map(_is_compiled, modules)):  # torch.compile would compile what reads the layers too
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            given = self.batch.copied()
            if self.recorder is not None:
                stack.enter_context(self.recorder.watching(given.args, given.kwargs))
            for layer in layers:
                reading = _Reading(layer, self, layer.module.forward)
                layer.module.forward = reading.forward  # scoring_mode puts it back
                if self.checks is not None:  # after the owner's own hooks, which may change the output
                    stack.callback(layer.module.register_forward_hook(reading.compare).remove)
            return run_batch(model, given, self.own_errors)

    def paused(self) -> Any:
        """A context for our own operations, which no watch must take for the model's."""
        return torch._C.DisableTorchFunction() if self.recorder is None else self.recorder.watch.paused()


@dataclass(frozen=True)
class _Reading:
    """One layer in a run: its uses are handed over before it does its work."""

    layer: PrunableLayer
    run: Run
    own_forward: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives."""
        run, layer, uses = self.run, self.layer, list[tuple[Weight, WeightUse]]()
        with run.paused():
            reported = _uses(layer, args, kwargs, run.batch)
            while True:
                try:
                    weight, use = next(reported)
                except StopIteration as end:
                    returned = end.value
                    break
                try:
                    run.on_use(weight, use, run.batch)
                except Exception as error:
                    run.own_errors.append(error)
                    raise
                uses += [(weight, use)] if run.checks is not None else []
            if run.checks is not None:
                run.checks.expect(layer, uses, returned)
        if returned is not None and layer.module_name in run.replaced:
            return returned
        return self.own_forward(*args, **kwargs)

    def compare(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Raises if the output is not the one that follows from the uses."""
        assert self.run.checks is not None
        with self.run.paused():
            self.run.checks.compare(self.layer, output)


def _uses(
    layer: PrunableLayer, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch
) -> Generator[tuple[Weight, WeightUse], None, Any]:
    """The uses of one call that have patches of a chosen weight, as its adapter reports them, and what it returns."""
    reported = iter(layer.adapter.uses(layer.module, args, kwargs, batch.n_points))
    try:
        while True:
            use = next(reported)
            weight = layer.weights.get(use.parameter)  # None: not chosen, or tied to an embedding
            if weight is not None and has_patches(use, weight, layer.parameter(use.parameter).device, batch):
                yield weight, use
    except StopIteration as end:
        return end.value
    except (DataError, ModelError) as error:
        raise type(error)(f"{layer.label} {error.what}", where=batch.where, fix=error.fix) from None


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile, or the module's own `compile`, was called for it."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
