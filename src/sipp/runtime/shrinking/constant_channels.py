"""Removes the channels of a network whose values never change: what `sparse` compiles on the CPU.

Unlike `sipp.shrink`, this keeps channels that nothing reads: their values could overflow, which a dense layer shows as
NaN. A constant channel is finite whatever the input, as long as the input and everything computed from it are finite.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from sipp.runtime.graph import ATEN, CONV, Graph, Op, program_of
from sipp.runtime.shrinking.applying import apply, parameters_and_buffers
from sipp.runtime.shrinking.channels import channels_in
from sipp.runtime.shrinking.removing import plan_shrinking
from sipp.runtime.shrinking.rules import rule_of

_TAKE_SIZES = (ATEN.view.default, ATEN._unsafe_view.default, ATEN.reshape.default, ATEN.expand.default, CONV)


def without_constant_channels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """A smaller copy, which shares the weights that stay as they are with the model; None if it would not be smaller.

    Compare its graph with the model's (`has_same_numbers`) and its outputs on the example before use.
    """
    tensors = parameters_and_buffers(model)
    if not _has_dead_rows(model):  # with which constants begin
        return None
    channels = channels_in(model, program_of(model, args, kwargs, is_plain=False), rule_of)
    plan = plan_shrinking(channels, only_constant=True)
    if all(len(stays) == tensors[name].shape[dim] for (name, dim), stays in plan.stays.items()):
        return None
    small = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors.values()})
    with torch.no_grad():
        apply(small, plan)
    return small


def _has_dead_rows(model: nn.Module) -> bool:
    """Whether some row has no weights; an embedding's rows do not count, one of them is often for padding."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = [p for p in model.parameters() if p.ndim > 1 and p.numel() and id(p) not in tables]
    return any(bool((weight.flatten(1) == 0).all(1).any()) for weight in weights)


def has_same_numbers(small: Graph, graph: Graph) -> bool:
    """Whether both run the same operations with the same numbers among their arguments, sizes of views aside.

    A number that differs was computed from the number of channels (`x / x.shape[1]`).
    """
    return [_numbers(op) for op in small.ops] == [_numbers(op) for op in graph.ops]


def _numbers(op: Op) -> str:
    return repr((op.target, op.act, None if op.target in _TAKE_SIZES else (op.args, op.kwargs)))
