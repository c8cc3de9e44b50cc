"""Whether a network that was given is the dense one with other weights: statements about weights speak of no other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from sipp.bounds.sound.calls import disguise
from sipp.bounds.sound.tracing import close
from sipp.errors import ModelError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.numerics import device_of
from sipp.options import NormStats
from sipp.records import Batch

ALIKE = "compare a network with a pruned copy of itself"
# How far the same operations on the same numbers may lie apart, in units of the type that they run in.
FEW_UNITS = 64


def same_tensors(dense: nn.Module, given: nn.Module) -> None:
    """Raises a ModelError unless the given network's tensors have the names and shapes of the dense one's."""
    ours, theirs = (_plain_state(role, model) for role, model in (("dense", dense), ("pruned", given)))
    for name in [*ours, *theirs]:
        if name not in ours or name not in theirs:
            side = "pruned" if name in theirs else "dense"
            raise ModelError(
                f"{name} is in the {side} network only; both must have the same names",
                fix="make torch.nn.utils.prune permanent with its `remove`, call sipp.release, or give masks",
            )
        if ours[name].shape != theirs[name].shape:
            shapes = f"{tuple(ours[name].shape)} and {tuple(theirs[name].shape)}"
            raise ModelError(f"{name} has the shapes {shapes}", fix=ALIKE)


def same_network(dense: nn.Module, given: nn.Module, batch: Batch, norm_stats: NormStats) -> None:
    """Raises a ModelError unless the dense network with the given weights computes what the given network does."""
    if given is dense:
        return
    _same_modules(dense, given)
    with torch.no_grad():
        twin = _with_weights(dense, given)
        for precision in (torch.float64, None):  # the second where a network does not run in float64
            try:
                outputs = [_outputs(model, batch, norm_stats, precision) for model in (twin, given)]
                break
            except Exception:
                if precision is None:
                    raise
    if not any(isinstance(leaf, Tensor) for leaf in outputs[0]) or len(outputs[0]) != len(outputs[1]):
        raise ModelError("the two networks' outputs cannot be compared", fix="let forward return tensors")
    for ours, theirs in zip(*outputs):
        if isinstance(ours, Tensor) and not (isinstance(theirs, Tensor) and _alike(ours, theirs)):
            raise ModelError(
                f"the dense network with the pruned one's weights gives other outputs on {batch.where} than "
                "the pruned network itself: they differ in more than weights",
                fix=ALIKE,
            )


def _plain_state(role: str, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network by name; raises a ModelError for what holds no plain numbers."""
    try:
        state = {str(name): value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    except Exception as error:  # a network's own state_dict may raise anything
        raise ModelError(f"the {role} network's state_dict fails, {type(error).__name__}: {error}") from error
    for name, value in state.items():
        odd = ""
        if not isinstance(value, Tensor):
            odd = f"a {type(value).__name__}"
        elif is_lazy(value):
            odd = "not initialised: run the network once"
        elif value.is_meta:
            odd = "on the meta device, without values: load them"
        elif value.is_quantized:
            odd = "quantised"
        elif value.layout != torch.strided:
            odd = "sparse"
        if odd:
            raise ModelError(f"{name} of the {role} network is {odd}", fix="give a network of plain tensors, or masks")
    return state


def _same_modules(dense: nn.Module, given: nn.Module) -> None:
    """Raises a ModelError where modules of the same name are of another type, or only one is what it seems."""
    ours, theirs = (dict(model.named_modules(remove_duplicate=False)) for model in (dense, given))
    for name in [*ours, *theirs]:
        where = name or "the network itself"
        if name not in ours or name not in theirs:
            raise ModelError(f"module {where} is in one of the two networks only", fix=ALIKE)
        kinds = [f"{type(side[name]).__module__}.{type(side[name]).__qualname__}" for side in (ours, theirs)]
        if kinds[0] != kinds[1]:
            raise ModelError(
                f"module {where} is a {kinds[0]} and a {kinds[1]}: they differ in more than weights", fix=ALIKE
            )
        if (found := disguise(theirs[name])) != disguise(ours[name]):
            raise ModelError(
                f"{found or disguise(ours[name])} in module {where} of one of the two networks only",
                fix="take it off, or put it on both",
            )


def _with_weights(dense: nn.Module, given: nn.Module) -> nn.Module:
    """A float64 copy of the dense network with the given tensors; raises a ModelError where a tie does not hold."""
    try:
        twin = copy.deepcopy(dense).to(torch.float64)
    except Exception as error:
        raise ModelError(f"the dense network cannot be copied, {type(error).__name__}: {error}") from error
    ours, theirs = twin.state_dict(), _plain_state("pruned", given)
    for name, value in theirs.items():
        ours[name].copy_(value)
    for name, value in theirs.items():
        # A later name of the same tensor was written last.
        wanted = value.to(ours[name])
        if not bool(((ours[name] == wanted) | (wanted != wanted)).all()):
            raise ModelError(
                f"{name} shares its memory with another tensor of the dense network (a tie), and in the "
                "pruned network the two hold other values",
                fix=ALIKE,
            )
    return twin


def _outputs(model: nn.Module, batch: Batch, norm_stats: NormStats, precision: torch.dtype | None) -> list[Any]:
    """Everything that a network returns on a batch, run in a precision or in that of the batch."""
    device = device_of(model)

    def ready(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=ready(value.data))
        wanted = precision if precision is not None and value.is_floating_point() else value.dtype
        return value.to(device, wanted, copy=True)

    kind = precision or next((p.dtype for p in _floating(batch)), torch.get_default_dtype())
    runs = copy.deepcopy(model).to(kind)
    args, kwargs = tuple(ready(value) for value in batch.args), {k: ready(v) for k, v in batch.kwargs.items()}
    with torch.random.fork_rng(), scoring_mode(runs, norm_stats):
        torch.manual_seed(0)
        return list(tree_leaves(run_batch(runs, replace(batch, args=args, kwargs=kwargs))))


def _floating(batch: Batch) -> Iterator[Tensor]:
    values = (value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor))
    return (value for value in values if value.is_floating_point())


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two outputs agree up to rounding."""
    theirs = theirs.to(ours.device)
    if ours.shape != theirs.shape or not ours.is_floating_point() or ours.dtype == torch.float64:
        return close(ours.to(torch.float64), theirs.to(torch.float64)) if ours.shape == theirs.shape else False
    finite = ours[torch.isfinite(ours)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(
        theirs, ours, rtol=0.0, atol=FEW_UNITS * torch.finfo(ours.dtype).eps * largest, equal_nan=True
    )
