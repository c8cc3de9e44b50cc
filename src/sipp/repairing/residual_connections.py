"""Finds residual connections: what the output of a layer is added to, seen in one watched pass (T21).

A layer at the end of a residual block can compensate for the error of the stream if its output reaches the addition
linearly: directly, or through copies, dropout in eval mode and norms with running statistics, which scale each row.
For nn.MultiheadAttention, that layer is its out_proj.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import fresh
from sipp.inputs.layer_checks import every_tensor
from sipp.inputs.layers import PrunableLayer
from sipp.inputs.patches import with_padding_zeroed
from sipp.results.batches import Batch, WeightUse

SMALLEST_SCALE = 1e-2  # of the largest: rows that a norm scales by less correct nothing

_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_COPIES = {"contiguous", "clone", "to", "view", "reshape", "view_as", "detach"}  # in the same shape
_SHAPE_ONLY = {"dim", "size", "numel", "__len__", "is_floating_point"}  # a norm asks for these before it reads


def reads_values(name: str, result: Any) -> bool:
    """Whether a function of this name, with this result, reads the values of its tensors, and not only their shape."""
    return name not in _SHAPE_ONLY and (name != "__get__" or isinstance(result, Tensor))


@dataclass(frozen=True)
class OutputMark:
    """Marks a tensor as the output of a weight's layer, each row times a factor."""

    weight: str
    scale_F: Tensor | None  # None: 1


# By weight: what its layer's output is added to, and the mark of that output
ResidualInputs = dict[str, tuple[OutputMark, Tensor]]


@contextmanager
def reading_residual_inputs(
    modules: Mapping[str, nn.Module], found: ResidualInputs, on_found: Callable[[], None]
) -> Iterator[None]:
    """A context for one pass that finds what the outputs of these modules, by weight, are added to."""

    def on_addition(mark: OutputMark, other: Tensor) -> None:
        found[mark.weight] = (mark, other.detach().clone())  # it may be written to
        on_found()

    with _watching(modules, _Watch({}, on_addition)):
        yield


def find_residual_connections(
    model: nn.Module,
    layers: Sequence[PrunableLayer],
    order: Sequence[str],
    batch: Batch,
    *,
    inputs_differ: bool = False,
) -> dict[str, Tensor]:
    """The weights whose layer's output is added to a stream, with that output on the batch.

    `order` are the weights in the order of execution. The stream must depend on earlier weights and on no later one: of
    two layers that are added, the later one corrects the earlier. Nothing else may read the output. With
    `inputs_differ`, the inputs of the batch depend on earlier weights too.
    """
    place = {name: i for i, name in enumerate(order, start=1)}
    modules = {}
    for layer in layers:
        if isinstance(layer.module, nn.MultiheadAttention):
            names = [weight.name for local, weight in layer.weights.items() if local == "out_proj.weight"]
        else:
            names = [weight.name for weight in layer.weights.values()] if layer.adapter.output == "products" else []
        if len(names) == 1 and names[0] in place:
            modules[names[0]] = layer.module
    n_found: Counter[str] = Counter()
    outputs: dict[str, Tensor] = {}
    ranks = {
        id(layer.module.get_parameter(local)): place[weight.name]
        for layer in layers
        for local, weight in layer.weights.items()
        if weight.name in place
    }
    batch = fresh(batch)
    if inputs_differ:
        ranks |= {id(tensor): 0 for tensor in every_tensor((batch.args, batch.kwargs)) if tensor.is_floating_point()}

    def on_addition(mark: OutputMark, other: Tensor) -> None:
        if 0 <= watch.ranks.get(id(other), -1) < place[mark.weight]:
            n_found[mark.weight] += 1

    watch = _Watch(ranks, on_addition, outputs)
    with scoring_mode(model, "running"), _watching(modules, watch):
        run_batch(model, batch)
    return {
        name: outputs[name]
        for name, n in n_found.items()
        if n == 1 and watch.n_calls[name] == 1 and watch.n_reads[name] == 0
    }


def output_as_use(module: nn.Module, tensor: Tensor, batch: Batch) -> WeightUse | None:
    """A tensor of the shape of a layer's output as windows of its patches, with rows in place of the fan-in.

    None if the points cannot be told apart.
    """
    if isinstance(module, _ConvNd):
        if tensor.ndim != len(module.kernel_size) + 2 or len(tensor) % batch.n_points:
            return None
        images = tensor.unflatten(0, (batch.n_points, -1)).movedim(2, 1)  # B x F x images x size
        windows = images.unflatten(1, (module.groups, -1)).movedim(2, -1)
        return WeightUse("", windows, n_position_dims=len(module.kernel_size) + 1)
    if isinstance(module, nn.MultiheadAttention) and tensor.ndim == 3 and not module.batch_first:
        tensor = tensor.transpose(0, 1)
    if tensor.ndim < 2 or len(tensor) % batch.n_points:
        return None
    return with_padding_zeroed(WeightUse("", tensor.reshape(batch.n_points, 1, -1, tensor.shape[-1])), batch)


def bias_of(module: nn.Module) -> Tensor | None:
    """The bias in a layer's output."""
    bias = getattr(module.out_proj if isinstance(module, nn.MultiheadAttention) else module, "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def along_rows(module: nn.Module, vector_F: Tensor, n_dims: int) -> Tensor:
    """One number per row, shaped to multiply the layer's output."""
    return vector_F.view(-1, *[1] * (n_dims - 2)) if isinstance(module, _ConvNd) else vector_F


def per_row(module: nn.Module, stream: Tensor, scale_F: Tensor | None) -> Tensor:
    """The stream in units of the layer's output: divided by the scale of the norms after it."""
    if scale_F is None:
        return stream
    is_large_F = scale_F.abs() > SMALLEST_SCALE * scale_F.abs().max()
    factor_F = torch.where(is_large_F, scale_F.reciprocal(), 0.0).to(stream.dtype)
    return stream * along_rows(module, factor_F, stream.ndim)


@contextmanager
def _watching(modules: Mapping[str, nn.Module], watch: _Watch) -> Iterator[None]:
    """A context in which the outputs of the modules are marked and followed."""
    with ExitStack() as stack:
        stack.callback(watch.forget)
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(_marking_hook(watch, name)).remove)
        stack.enter_context(watch)
        yield


def _marking_hook(watch: _Watch, name: str) -> Callable[..., None]:
    def mark(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention) and isinstance(output, tuple):
            output = output[0]  # beside the attention weights
        if isinstance(output, Tensor):
            with torch._C.DisableTorchFunction():  # only the model's own reads are watched
                watch.mark(output, OutputMark(name, None))

    return mark


class _Watch(TorchFunctionMode):
    """Follows marked tensors to the additions that read them, and tracks the latest weight each tensor depends on."""

    def __init__(
        self,
        ranks: dict[int, int],
        on_addition: Callable[[OutputMark, Tensor], None],
        outputs: dict[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.ranks, self.on_addition, self.outputs = ranks, on_addition, outputs
        self.n_calls: Counter[str] = Counter()
        self.n_reads: Counter[str] = Counter()  # by functions other than additions and those that pass a mark on
        self._marks: dict[int, OutputMark] = {}
        self._alive: list[Tensor] = []  # so that ids stay unique

    def mark(self, tensor: Tensor, mark: OutputMark) -> None:
        """Marks the output of a module."""
        self._marks[id(tensor)] = mark
        self._alive.append(tensor)
        self.n_calls[mark.weight] += 1
        if self.outputs is not None:
            self.outputs[mark.weight] = tensor.detach().clone()

    def forget(self) -> None:
        """Frees the tensors of the pass, because a callback may keep the watch alive."""
        self._alive.clear()
        self._marks.clear()
        self.ranks, self.outputs = {}, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._marks and not self.ranks:  # before the first output that matters, nothing is to be followed
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        inputs = list(every_tensor((args, kwargs)))
        read = [self._marks[id(tensor)] for tensor in inputs if id(tensor) in self._marks]
        is_addition = name in _ADDITIONS and _is_plain_sum(args, kwargs)
        if is_addition and read:
            for output, other in (inputs, inputs[::-1]):
                if id(output) in self._marks and output is not other:
                    self.on_addition(self._marks[id(output)], other)
        passed = _mark_passed_on(func, name, args, kwargs, read)
        result = func(*args, **kwargs)
        if name in _COPIES and len(read) == 1 and _repeats(inputs[0], result) and id(inputs[0]) in self._marks:
            passed = read[0]
        if not is_addition and passed is None and reads_values(name, result):
            self.n_reads.update(mark.weight for mark in read)
        self._note(inputs, result, passed, name)
        return result

    def _note(self, inputs: list[Tensor], result: Any, passed: OutputMark | None, name: str) -> None:
        """Marks the results; tensors that were written to lose their marks."""
        if name == "__setitem__" and inputs:
            self._marks.pop(id(inputs[0]), None)
        rank = max((self.ranks[id(tensor)] for tensor in inputs if id(tensor) in self.ranks), default=-1)
        for tensor in every_tensor(result):
            if passed is None and name != "__get__":
                self._marks.pop(id(tensor), None)
            elif passed is not None:
                self._marks[id(tensor)] = passed
            if rank >= 0 and self.outputs is not None:
                self.ranks[id(tensor)] = max(rank, self.ranks.get(id(tensor), -1))
            if id(tensor) in self._marks or (rank >= 0 and self.outputs is not None):
                self._alive.append(tensor)


def _mark_passed_on(func: Any, name: str, args: Any, kwargs: Any, read: list[OutputMark]) -> OutputMark | None:
    """The mark of a result that is a marked tensor with scaled rows; None: it is something else."""
    if len(read) != 1:
        return None
    if name in _DROPOUTS:
        training = kwargs.get("training", args[2] if len(args) > 2 else True)
        return read[0] if training is False else None
    if func is not F.batch_norm:
        return None
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    call = dict(zip(names, args)) | kwargs
    variance_F, gain_F = call.get("running_var"), call.get("weight")
    if call.get("training", False) or variance_F is None:
        return None
    scale_F = (variance_F.detach().double() + call.get("eps", 1e-5)).rsqrt()
    scale_F = scale_F if gain_F is None else scale_F * gain_F.detach().double()
    before_F = read[0].scale_F
    return replace(read[0], scale_F=scale_F if before_F is None else scale_F * before_F)


def _repeats(given: Tensor, result: Any) -> bool:
    return isinstance(result, Tensor) and (result.shape, result.dtype) == (given.shape, given.dtype)


def _is_plain_sum(args: Any, kwargs: Any) -> bool:
    """Whether two tensors of one shape are added, without a factor."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return len(given) == 2 == len(args) and not kwargs and given[0].shape == given[1].shape
