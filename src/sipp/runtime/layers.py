"""Convolution and linear layers of a traced graph, and their dense implementation by torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sipp.runtime import steps
from sipp.runtime.graph import CONV, Op, Ref
from sipp.runtime.steps import Step, Values, apply_epilogue, is_enough_faster, kept_share


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer with defaults filled in, without its weight."""

    op: Op
    shape: tuple[int, ...]  # R x C x KH x KW, a linear layer's R x C
    bias: Tensor | None
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def read_layer(op: Op, constants: dict[int, Tensor]) -> tuple[Layer, Tensor]:
    """The layer of an operation with constant weights, and its weight."""
    weight = constants[op.args[1].value].contiguous()
    bias_ref = op.args[2] if len(op.args) > 2 else None
    bias = None if bias_ref is None else constants[bias_ref.value].contiguous()
    defaults: list[Any] = [(1, 1), (0, 0), (1, 1), 1]
    options = [*op.args[3:], *defaults[len(op.args[3:]) :]] if op.target is CONV else defaults
    stride, padding, dilation = (pair(option) for option in options[:3])
    return Layer(op, tuple(weight.shape), bias, stride, padding, dilation, options[3]), weight


def constant_weights(op: Op, constants: Mapping[int, Tensor]) -> list[Tensor] | None:
    """The weight of a product and its bias, if it has one; None if they are not constants, or it has other options."""
    refs = [ref for ref in op.args[1:3] if ref is not None]
    if op.kwargs or not all(isinstance(ref, Ref) and ref.value in constants for ref in refs):
        return None
    return [constants[ref.value] for ref in refs]


def run_dense(layer: Layer, weight: Tensor, values: Values) -> Tensor:
    """Runs the layer and its epilogue (sum, activation) with torch."""
    x = values[layer.op.args[0].value]
    if len(layer.shape) == 4:
        x = x.contiguous(memory_format=_format_of(weight))
        result = F.conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    else:
        result = F.linear(x.contiguous(), weight, layer.bias)
    return apply_epilogue(values, layer.op, result)


def dense_step(layer: Layer, weight: Tensor, values: Values) -> Step:
    """The dense layer in the faster memory format, timed on inputs that already have this format."""
    choices = [weight]
    if len(layer.shape) == 4 and layer.groups == 1:
        choices.append(weight.contiguous(memory_format=torch.channels_last))
    times = [_time_dense(layer, choice, values) for choice in choices]
    best = choices[times.index(min(times))]

    def run_step(current: Values) -> None:
        current[layer.op.out] = run_dense(layer, best, current)

    return Step(
        layer.op.name, "dense", run_step, layer.op.out, kept_share(weight), weight.nbytes, weight.nbytes, None,
        min(times), held=(best,),
    )  # fmt: skip


def faster_step(sparse: Step, dense: Step, values: Values) -> Step:
    """The sparse step if it is enough faster than the dense one, which has run; its result is added to the values."""
    assert sparse.seconds is not None and dense.dense_seconds is not None
    chosen = sparse if is_enough_faster(sparse.seconds, dense.dense_seconds) else dense
    chosen.run(values)
    return chosen


def _time_dense(layer: Layer, weight: Tensor, values: Values) -> float:
    x = values[layer.op.args[0].value]
    form = _format_of(weight) if x.ndim == 4 and len(layer.shape) == 4 else torch.contiguous_format
    ready = {**values, layer.op.args[0].value: x.contiguous(memory_format=form)}
    if layer.op.addend is not None:
        addend = values[layer.op.addend]
        ready[layer.op.addend] = addend.contiguous(memory_format=form)
    return steps.dense_time(lambda: run_dense(layer, weight, ready))


def _format_of(weight: Tensor) -> Any:
    is_last = not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def pair(option: Any) -> tuple[int, int]:
    """(rows, columns) from one number for both or a pair."""
    numbers = list(option) if isinstance(option, (list, tuple)) else [option]
    return (numbers * 2)[0], (numbers * 2)[1]
