"""Checks that a network is the dense network with other weights, which bounds on weights need.

The tensors must have the same names and shapes, the modules the same types, and the dense network with the given
weights must compute what the given network does.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from sipp.bounds.operations import SAME_OUTPUT, device_in, hidden_behaviour, in_precision, same_output
from sipp.errors import ModelError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.results.batches import Batch
from sipp.results.options import NormStats

ALIKE = "compare a network with a pruned copy of itself"
# How far two runs of the same operations may differ by rounding, in machine epsilons of their dtype.
FEW_UNITS = 64


def check_same_architecture(dense: nn.Module, given: nn.Module, batch: Batch, norm_stats: NormStats) -> None:
    """Raises a ModelError unless `given` is the dense network with other weights, as far as one batch shows."""
    state = _plain_state("pruned", given)
    _check_same_tensors(_plain_state("dense", dense), state)
    if given is dense:
        return
    _check_same_modules(dense, given)
    with torch.no_grad():
        copied = _with_weights(dense, state)
        try:
            outputs = [_outputs(model, batch, norm_stats, torch.float64) for model in (copied, given)]
        except Exception:  # a network that does not run in float64
            outputs = [_outputs(model, batch, norm_stats, None) for model in (copied, given)]
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
    """The tensors of a network by name; raises a ModelError for tensors that are not plain (lazy, meta, quantised)."""
    try:
        state = {str(name): value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    except Exception as error:  # a network's own state_dict may raise anything
        raise ModelError(f"the {role} network's state_dict fails, {type(error).__name__}: {error}") from error
    for name, value in state.items():
        kind = f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        if not isinstance(value, Tensor) or is_lazy(value) or value.is_meta or value.is_quantized or value.is_sparse:
            raise ModelError(
                f"{name} of the {role} network is {kind} that is not initialised, on the meta device, quantised or "
                "sparse",
                fix="give a network of plain tensors, or masks",
            )
    return state


def _check_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Raises a ModelError unless the pruned network's tensors have the names and shapes of the dense one's."""
    for name in [*ours, *theirs]:
        if name not in ours or name not in theirs:
            side = "pruned" if name in theirs else "dense"
            raise ModelError(
                f"{name} is in the {side} network only; both must have the same names",
                fix="call sipp.release on both: it makes masks of torch.nn.utils.prune permanent; or give masks",
            )
        if ours[name].shape != theirs[name].shape:
            shapes = f"{tuple(ours[name].shape)} and {tuple(theirs[name].shape)}"
            raise ModelError(f"{name} has the shapes {shapes}", fix=ALIKE)


def _check_same_modules(dense: nn.Module, given: nn.Module) -> None:
    """Raises a ModelError if modules of the same name differ in type, or in hooks and patches."""
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
        if (hidden := hidden_behaviour(theirs[name])) != hidden_behaviour(ours[name]):
            raise ModelError(
                f"{hidden or hidden_behaviour(ours[name])} in module {where} of one of the two networks only",
                fix="take it off, or put it on both",
            )


def _with_weights(dense: nn.Module, theirs: dict[str, Tensor]) -> nn.Module:
    """A float64 copy of the dense network with these tensors; raises a ModelError if tied tensors differ."""
    try:
        copied = copy.deepcopy(dense).to(torch.float64)
    except Exception as error:
        raise ModelError(f"the dense network cannot be copied, {type(error).__name__}: {error}") from error
    ours = copied.state_dict()
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
    return copied


def _outputs(model: nn.Module, batch: Batch, norm_stats: NormStats, precision: torch.dtype | None) -> list[Any]:
    """All outputs of a network on a batch, in the given precision or in that of the batch."""
    values = (value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor))
    kinds = (value.dtype for value in values if value.is_floating_point())
    runs = copy.deepcopy(model).to(precision or next(kinds, torch.get_default_dtype()))
    with torch.random.fork_rng(), scoring_mode(runs, norm_stats):
        torch.manual_seed(0)
        return list(tree_leaves(run_batch(runs, in_precision(batch, device_in(model), precision))))


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two outputs agree up to rounding."""
    is_exact = not ours.is_floating_point() or ours.dtype == torch.float64
    share = SAME_OUTPUT if is_exact else FEW_UNITS * torch.finfo(ours.dtype).eps
    return same_output(theirs.to(ours.device, torch.float64), ours.to(torch.float64), share)
