"""Runs a model over batches and hands every use of a prunable weight to a consumer: the only hooks there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from sipp.layers import Site
from sipp.records import Batch, NormStats, Use, Weight

OnUse = Callable[[Weight, Use, Batch], None]
OnOutput = Callable[[Any, Batch], None]


def capture(
    model: nn.Module,
    sites: Iterable[Site],
    batches: Iterable[Batch],
    *,
    on_use: OnUse,
    on_output: OnOutput,
    norm_stats: NormStats = "running",
) -> None:
    """Nothing; calls `on_use` for every use of a weight, in the order of execution, and `on_output` after each batch.

    A use is handed over before the layer runs and must be consumed at once: later operations may overwrite its
    input in place. The model is left exactly as it was, also when something raises.
    """
    current: list[Batch] = []

    def hook_for(site: Site) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            batch = current[-1]
            for use in site.adapter.uses(module, args, kwargs, batch.n_points):
                if use.parameter in site.weights:
                    on_use(site.weights[use.parameter], use, batch)

        return hook

    with ExitStack() as stack:
        stack.enter_context(scoring_mode(model, norm_stats))
        for site in sites:
            handle = site.module.register_forward_pre_hook(hook_for(site), with_kwargs=True)
            stack.callback(handle.remove)
        for batch in batches:
            current[:] = [batch]
            on_output(model(*batch.args, **batch.kwargs), batch)


@contextmanager
def scoring_mode(model: nn.Module, norm_stats: NormStats) -> Iterator[None]:
    """A context without gradients in which the model is in eval mode; every flag is as before afterwards.

    With `norm_stats="batch"` BatchNorm layers use the statistics of the batch and leave their buffers untouched.
    PyTorch's fused attention path is off: it runs a whole encoder layer without calling the layers inside it.
    """
    training = [(module, module.training) for module in model.modules()]
    norms: list[Any] = [m for m in model.modules() if _uses_batch(m)] if norm_stats == "batch" else []
    tracking = [(module, module.track_running_stats) for module in norms]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        for module in norms:
            module.training = True
            module.track_running_stats = False
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        for module, tracks in tracking:
            module.track_running_stats = tracks
        for module, was_training in training:
            module.training = was_training


def depends_on_batch(model: nn.Module, norm_stats: NormStats) -> bool:
    """Whether a point's activations depend on the other points of its batch (batch statistics somewhere)."""
    return any(_uses_batch(m) and (norm_stats == "batch" or m.running_mean is None) for m in model.modules())


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


def output_norms(output: Any, n_points: int) -> Tensor | None:
    """||f(x)|| for each point (float64), over all floating-point tensors of the output; None if they have no points."""
    tensors = [t for t in _tensors(output) if t.is_floating_point() and t.ndim > 0 and len(t) == n_points]
    if not tensors:
        return None
    squares = sum(t.detach().double().flatten(1).square().sum(1) for t in tensors)
    return torch.as_tensor(squares).sqrt()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
