"""Residual streams: what the output of a layer is added to, met again in each run, as patches of the layer (T21)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sipp.inputs import Batch, ModelMap, Operation, Ref, Watch, WeightUse, with_padding_zeroed

SMALLEST_SCALE = 1e-2  # of the largest: rows that a norm scales by less correct nothing
_ADDS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}


@dataclass(frozen=True)
class Stream:
    """Where a layer's output is added to a stream: at the n-th sum of two tensors of one shape after its call."""

    module: str
    nth: int
    at: int  # the place of the stream among the two
    norms: tuple[str, ...]  # BatchNorms on the way, each of which scales the rows
    operation: int  # that adds, in the recorded run


def streams_in(found: ModelMap, *, inputs_differ: bool) -> dict[str, Stream]:
    """By weight, the residual stream to which its layer's output is added and which depends on earlier weights.

    The sum must be met before the block of the layer ends. With `inputs_differ`, weights of earlier blocks count too,
    which made the inputs.
    """
    blocks = () if found.blocks is None else found.blocks.names
    streams, ends = {}, [found.run.calls_of[name][0].stop for name in blocks]
    for weight, one in found.sums.items():
        if not (one.latest or (inputs_differ and found.run.values[one.stream].of_inputs)):
            continue
        begun = found.run.calls_of[one.module][0].stop
        if any(begun <= end <= one.operation for end in ends):
            continue
        sums = [at for at in range(begun, one.operation + 1) if _is_sum(found, found.run.operations[at])]
        at = _operands(found.run.operations[one.operation]).index(one.stream)
        streams[weight] = Stream(one.module, len(sums), at, one.norms, one.operation)
    return streams


def _operands(operation: Operation) -> list[Any]:
    return [operation.arguments.get("self"), operation.arguments.get("other")]


def _is_sum(found: ModelMap, operation: Operation) -> bool:
    """Whether it adds two tensors of one shape."""
    if operation.function not in _ADDS:
        return False
    operands = _operands(operation)
    if not all(isinstance(one, Ref) for one in operands):
        return False
    return found.run.values[operands[0]].shape == found.run.values[operands[1]].shape


@contextmanager
def reading(model: nn.Module, streams: Mapping[str, Stream], on_found: Callable[[str, Tensor], None]) -> Iterator[None]:
    """A context for one run that calls `on_found` with each weight's stream, a copy, when it is met."""
    n_left: dict[str, int] = {}  # sums to go, by weight whose layer has been called

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if n_left and function in _ADDS and isinstance(args[1], Tensor) and args[0].shape == args[1].shape:
            for weight in list(n_left):
                n_left[weight] -= 1
                if n_left[weight] == 0:
                    del n_left[weight]
                    on_found(weight, args[streams[weight].at].detach().clone())
        return function(*args, **kwargs)

    def called(weight: str) -> Callable[..., None]:
        return lambda module, args, output: n_left.update({weight: streams[weight].nth})

    with ExitStack() as stack:
        for weight, stream in streams.items():
            module = model.get_submodule(stream.module)
            stack.callback(module.register_forward_hook(called(weight)).remove)
        stack.enter_context(Watch(run))
        yield


def stream_as_use(model: nn.Module, stream: Stream, tensor: Tensor, like: WeightUse, batch: Batch) -> WeightUse:
    """A stream in units of the layer's output, laid out like a use of it, with rows in place of the fan-in."""
    module = model.get_submodule(stream.module)
    tensor = _in_units_of_output(model, stream, module, tensor)
    n_blocks = len(like.windows)  # the points; 1 if they cannot be told apart
    if isinstance(module, _ConvNd):
        if tensor.ndim == len(module.kernel_size) + 1:  # one image without a batch dimension
            tensor = tensor[None]
        images = tensor.unflatten(0, (n_blocks, -1)).movedim(2, 1)  # B x F x images x size
        windows = images.unflatten(1, (module.groups, -1)).movedim(2, -1)
        return WeightUse("", windows, n_position_dims=len(module.kernel_size) + 1)
    if isinstance(module, nn.MultiheadAttention) and tensor.ndim == 3 and not module.batch_first:
        tensor = tensor.transpose(0, 1)
    use = WeightUse("", tensor.reshape(n_blocks, 1, -1, tensor.shape[-1]), attributed=like.attributed)
    return with_padding_zeroed(use, batch)


def _in_units_of_output(model: nn.Module, stream: Stream, module: nn.Module, tensor: Tensor) -> Tensor:
    """The stream divided by the scales of the norms behind the layer, row by row."""
    if not stream.norms:
        return tensor
    scale_F = torch.ones((), dtype=torch.float64, device=tensor.device)
    for name in stream.norms:
        norm: Any = model.get_submodule(name)
        by_norm_F = (norm.running_var.double() + norm.eps).rsqrt()
        scale_F = scale_F * (by_norm_F if norm.weight is None else by_norm_F * norm.weight.detach().double())
    is_large_F = scale_F.abs() > SMALLEST_SCALE * scale_F.abs().max()
    factor_F = torch.where(is_large_F, scale_F.reciprocal(), 0.0).to(tensor.dtype)
    return tensor * factor_F.view(-1, *[1] * (tensor.ndim - 2 if isinstance(module, _ConvNd) else 0))
