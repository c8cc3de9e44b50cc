"""Checks that a network is the dense network with other weights, which bounds on weights need."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs import check_has_values

ALIKE = "compare a network with a pruned copy of itself"


def check_same_architecture(dense: nn.Module, given: nn.Module) -> None:
    """Raises a ModelError unless both have tensors of the same names and shapes, in modules that print alike."""
    check_has_values("dense", dense)
    check_has_values("pruned", given)
    ours, theirs = (
        {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        for model in (dense, given)
    )
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
    ours_by_name, theirs_by_name = (dict(model.named_modules()) for model in (dense, given))
    for name in ours_by_name | theirs_by_name:
        kind, other = _kind(ours_by_name.get(name)), _kind(theirs_by_name.get(name))
        if kind != other:
            raise ModelError(f"{name or 'the network'} is {kind} in the dense network, {other} in the other", fix=ALIKE)
    first: dict[int, str] = {}
    for name, tensor in dense.state_dict(keep_vars=True).items():
        other = first.setdefault(id(tensor), name)  # a tensor with two names is one in a copy with other weights, too
        if name in theirs and not torch.equal(theirs[name].nan_to_num(), theirs[other].nan_to_num()):
            raise ModelError(
                f"{name} and {other} are one tensor in the dense network (a tie), but differ in the pruned one",
                fix=ALIKE,
            )


def _kind(module: nn.Module | None) -> str:
    return "missing" if module is None else f"{type(module).__name__}({module.extra_repr()})"
