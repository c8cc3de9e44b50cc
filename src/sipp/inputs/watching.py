"""Detects what no module hook can: weights read elsewhere, and control flow that depends on values.

If control flow or shapes depend on values, a few points do not show what others do: which layers run, how often, and
whose patches they get.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from sipp.errors import ModelError
from sipp.inputs.layers import PrunableLayer

# These functions return tensors of an argument's shape or dtype and do not read its values ...
_BLIND = {
    "__get__",  # shape, dtype, ... and .T and .data, which are views
    *("new", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
}
# These return no tensor, but something that holds the values
_TAKING = {"numpy", "__array__", "__dlpack__", "tolist", "item", "__float__", "__int__", "__index__", "__complex__"}
_BLIND_BUT_FOR_FIRST = {"to", "type_as", "expand_as", "view_as", "reshape_as"}  # ... and these only the first one's

# Which arguments of an operation are the operand and the weight it is multiplied by
_OPERANDS = {
    torch.ops.aten.mm.default: slice(-2, None),
    torch.ops.aten.addmm.default: slice(-2, None),
    torch.ops.aten.mkldnn_rnn_layer.default: slice(0, 2),  # all steps of one layer of an LSTM, on a CPU
}
_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # tags of operations
# By the id of an operation: whether its result depends on values, whether it writes to one of its arguments, and the
# operation itself, so that no other gets its id. To ask torch takes longer than most operations of a few points.
_KINDS: dict[int, tuple[bool, bool, Any]] = {}


@dataclass(frozen=True)
class _WatchedWeight:
    start: int  # address of the first byte
    stop: int
    name: str
    holders: tuple[int, ...]  # ids of the modules that may read it


class Watch(TorchFunctionMode):
    """A mode in which a watched weight may be read only while a module that holds it is running (`enter`, `leave`).

    Memory is watched, not the Parameter object, so that `.T`, `.data` and slices are seen too. Reading shape, dtype or
    device, making a view and writing in place do not count. A read inside a torch.jit.script function, or under
    DisableTorchFunction, cannot be seen.
    """

    def __init__(self, layers: Sequence[PrunableLayer], where: str) -> None:
        super().__init__()
        self.where = where
        self.takes_values = False  # of any tensor into Python, where branches on them cannot be seen
        self.running: Counter[int] = Counter()
        holders: dict[str, list[int]] = {}
        parameters: dict[str, nn.Parameter] = {}
        for layer in layers:
            for local, weight in layer.weights.items():
                holders.setdefault(weight.name, []).append(id(layer.module))
                parameters[weight.name] = layer.parameter(local)
        found = [_WatchedWeight(*_extent(p), name, tuple(holders[name])) for name, p in parameters.items()]
        self.watched = sorted(found, key=lambda one: one.start)
        self.starts = [one.start for one in self.watched]
        self.by_id = {id(parameters[one.name]): one for one in self.watched}  # the model keeps them alive
        self.storages = set(map(_storage, parameters.values()))

    def enter(self, layer: PrunableLayer, *_: object) -> None:
        """Lets the layer's module read its weights from now on: a forward pre-hook."""
        self.running[id(layer.module)] += 1

    def leave(self, layer: PrunableLayer, *_: object) -> None:
        """Ends what `enter` began: a forward hook."""
        self.running[id(layer.module)] -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _BLIND:
            return result
        takes = name in _TAKING
        self.takes_values |= takes
        given = args[:1] if name in _BLIND_BUT_FOR_FIRST else (args, kwargs)
        for tensor in every_tensor(given):
            one = self._of(tensor)
            if one is None or any(self.running[holder] > 0 for holder in one.holders):
                continue
            if takes or any(self._of(tensor) is not one for tensor in every_tensor(result)):
                self._refuse(one, resolve_name(func) or name)
        return result

    def _of(self, tensor: Tensor) -> _WatchedWeight | None:
        """The watched weight whose memory the tensor views."""
        known = self.by_id.get(id(tensor))
        if known is not None or _storage(tensor) not in self.storages:
            return known
        start, stop = _extent(tensor)
        at = bisect_right(self.starts, start) - 1
        for one in self.watched[max(at, 0) : at + 2]:
            if start < one.stop and one.start < stop:
                return one
        return None

    def _refuse(self, one: _WatchedWeight, function: str) -> None:
        module = one.name.rpartition(".")[0] or "the model itself"
        raise ModelError(
            f"{one.name} is read by {function} while {module} is not running, so the weight has a use "
            "that is not scored",
            where=self.where,
            fix=f"call the module itself there, or leave the weight as it is with exclude={one.name!r}",
            option="exclude",
        )


def _storage(tensor: Tensor) -> int | None:
    """The address of all the memory that the tensor views part of; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses without storage
        return None


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the tensor's first byte and of the one after its last; (0, 0) if it has no memory."""
    n = tensor.numel()
    if tensor.layout != torch.strided or not n:
        return (0, 0)
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # a subclass without storage
        return (0, 0)
    if start == 0:  # meta tensors
        return (0, 0)
    if not tensor.is_contiguous():
        n = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + n * tensor.element_size()


def every_tensor(value: Any) -> list[Tensor]:
    """All tensors in a value, in order: itself, or those of a tuple, a list or a dict, however deep."""
    found: list[Tensor] = []
    if isinstance(value, (Tensor, tuple, list, dict)):
        _gather(value, found)
    return found


def _gather(value: Any, found: list[Tensor]) -> None:
    # not a generator, and called for containers only: this runs for every operation of a network
    if isinstance(value, Tensor):
        found.append(value)
        return
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list, dict)):
            _gather(one, found)


def _kind_of(operation: Any) -> tuple[bool, bool, Any]:
    kind = not _BY_VALUES.isdisjoint(operation.tags), operation._schema.is_mutable, operation
    return _KINDS.setdefault(id(operation), kind)


class Operations(TorchDispatchMode):
    """A mode that records what some weights are multiplied by, if an operation shows it (`_OPERANDS`).

    If it `follows` the data, it also sees whether shapes or Python numbers are computed from its values. Python can
    branch on nothing else of a tensor, except through `tolist` and `numpy`, which are not dispatched (see `Watch`).
    Values computed from positions or weights alone do not count: they are the same for all data, as transformers
    checks of its masks.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False; otherwise torch would import its compiler, which takes a second, to exclude the method below."""
        return False

    def __init__(self, weights: Sequence[Tensor], follows: bool) -> None:
        super().__init__()
        self.by_values = False
        self.follows = follows
        self.of_data: dict[int, weakref.ref[Tensor]] = {}  # by id: tensors that were computed from the data
        self._operands = {id(operation): places for operation, places in _OPERANDS.items()}  # operations hash slowly
        self._met: dict[int, list[Tensor]] = {_extent(weight)[0]: [] for weight in weights}

    def pop_operands(self, weight: Tensor) -> list[Tensor]:
        """What the weight was multiplied by since the last call for it."""
        at = _extent(weight)[0]
        found, self._met[at] = self._met[at], []
        return found

    def follow(self, data: Any) -> None:
        """Marks these tensors as data, or as computed from it."""
        for tensor in every_tensor(data):
            self.of_data[id(tensor)] = weakref.ref(tensor)

    def _is_of_data(self, tensor: Tensor) -> bool:
        found = self.of_data.get(id(tensor))  # the id may have belonged to a tensor that is gone
        return found is not None and found() is tensor

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for operations that are not the model's own, in which this mode is off.

        If the model has entered a mode of its own on top, this one stays on, and the model may seem to go by values.
        """
        is_on_top = _get_current_dispatch_mode() is self
        if is_on_top:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if is_on_top:
                self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = self._operands.get(id(func)) if self._met else None
        if places is not None:
            operand, weight = args[places]
            met = self._met.get(_extent(weight)[0])
            if met is not None:
                met.append(operand)
        is_known = self.by_values or not self.follows
        if is_known or not any(map(self._is_of_data, every_tensor((args, kwargs)))):
            return func(*args, **(kwargs or {}))
        goes_by_values, writes, _ = _KINDS.get(id(func)) or _kind_of(func)
        if goes_by_values:
            self.by_values = func is not torch.ops.aten.index.Tensor or self._has_mask(args[1])
        result = func(*args, **(kwargs or {}))
        self.follow(result)
        if writes:
            written = every_tensor((args, kwargs))
            self.follow([written, [tensor._base for tensor in written if tensor._is_view()]])
        return result

    def _has_mask(self, indices: Any) -> bool:
        """Whether one of the indices is a boolean mask computed from the data: it sets the size of the result."""
        return any(one.dtype in (torch.bool, torch.uint8) and self._is_of_data(one) for one in every_tensor(indices))
