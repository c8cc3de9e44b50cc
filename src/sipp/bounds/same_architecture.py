"""Checks that a network is the dense network with other weights, which bounds on weights need.

The tensors must have the same names and shapes, and the dense network with the given weights must compute what the
given network does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from sipp.errors import ModelError
from sipp.inputs import Batch, copy_of, run_batch, scoring_mode
from sipp.results import numerics

ALIKE = "compare a network with a pruned copy of itself"
# How far two runs of the same operations may differ by rounding, as a share of the largest output: in float64, and
# elsewhere in machine epsilons.
SAME_OUTPUT = 1e-9
FEW_UNITS = 64


def check_same_architecture(dense: nn.Module, given: nn.Module, batch: Batch) -> None:
    """Raises a ModelError unless `given` is the dense network with other weights, as far as one batch shows."""
    ours, theirs = _tensors("dense", dense), _tensors("pruned", given)
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
    copied = _with_weights(dense, theirs)
    try:
        outputs = [_outputs(model, batch, torch.float64) for model in (copied, given)]
    except Exception:  # a network that does not run in float64
        outputs = [_outputs(model, batch, next(given.parameters()).dtype) for model in (copied, given)]
    if not outputs[0] or [x.shape for x in outputs[0]] != [x.shape for x in outputs[1]]:
        raise ModelError("the two networks' outputs cannot be compared", fix="let forward return tensors")
    if not all(map(_alike, *outputs)):
        raise ModelError(
            f"the dense network with the pruned one's weights gives other outputs on {batch.where} than the pruned "
            "network itself: they differ in more than weights",
            fix=ALIKE,
        )


def _tensors(role: str, model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a network by name; raises a ModelError for one that has no values yet."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, value in state.items():
        if is_lazy(value) or value.is_meta:
            raise ModelError(
                f"{name} of the {role} network is not initialised, or on the meta device: it has no values",
                fix="run a lazy network once on a batch, or load the weights first",
            )
    return state


def _with_weights(dense: nn.Module, theirs: dict[str, Tensor]) -> nn.Module:
    """A float64 copy of the dense network with these tensors; raises a ModelError if tied tensors differ."""
    copied = copy_of(dense).to(torch.float64)
    ours = copied.state_dict()
    for name, value in theirs.items():
        ours[name].copy_(value)
    for name, value in theirs.items():
        # A later name of the same tensor was written last.
        if not torch.equal(ours[name].nan_to_num(), value.to(ours[name]).nan_to_num()):
            raise ModelError(
                f"{name} shares its memory with another tensor of the dense network (a tie), and in the pruned "
                "network the two hold other values",
                fix=ALIKE,
            )
    return copied


def _outputs(model: nn.Module, batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    """All tensors that a network returns for a batch in this precision; random layers draw the same numbers."""
    runs = copy_of(model).to(dtype)
    given: Any = batch.copied(numerics.device_of(model), dtype)
    with torch.random.fork_rng(), scoring_mode(runs, "running"):
        torch.manual_seed(0)
        return [leaf for leaf in tree_leaves(run_batch(runs, given)) if isinstance(leaf, Tensor)]


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two outputs agree up to rounding, with NaN and infinities in the same places."""
    is_exact = not ours.is_floating_point() or ours.dtype == torch.float64
    share = SAME_OUTPUT if is_exact else FEW_UNITS * torch.finfo(ours.dtype).eps
    ours, theirs = ours.to(torch.float64), theirs.to(ours.device, torch.float64)
    largest = float(torch.where(ours.isfinite(), ours, 0.0).abs().max()) if ours.numel() else 0.0
    return torch.allclose(theirs, ours, rtol=0.0, atol=share * largest, equal_nan=True)
