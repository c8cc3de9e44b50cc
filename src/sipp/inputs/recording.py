"""A watched run of a model: every operation that PyTorch executes, every call of a module, and what each one reads.

What runs is what is seen, whatever the model's code looks like: modules, functions, methods and operators all end in
the same few operations of `torch.ops.aten`. Tensors become numbers, one for each tensor as it is between two writes:
an operation that writes in place gives all tensors that view the memory new numbers. So "the same number" means "the
same values", and a number is made by one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from sipp.errors import ModelError

THE_MODEL = "the model itself"
# Operations that take a shape, a dtype or a device from their argument, and no values
VALUELESS = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
)
# Operations that write into a copy of their first argument, at places that they are given
_INTO = frozenset(
    ("index_add", "index_put", "index_copy", "scatter", "scatter_add", "scatter_reduce", "masked_scatter")
)
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_GIVES_NUMBERS, _GIVES_SHAPES = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape


class Ref(int):
    """The number of a tensor, in the place that it has among the arguments of an operation or a call."""


@dataclass(frozen=True)
class Value:
    """A tensor's shape, dtype and origin, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""  # of the parameter or buffer whose memory it views
    of_inputs: bool = False  # whether it is an input of the model, or was computed from one
    by_values: bool = False  # whether other inputs may decide its shape, or which points it is about


def name_of_operation(function: Any) -> str:
    """The name of one of torch's operations, without the _ of the form that overwrites its first argument."""
    name: str = function.overloadpacket.__name__
    return name[:-1] if function._schema.is_mutable and name.endswith("_") else name


@dataclass(frozen=True)
class Operation:
    """One operation that was executed, and the module that ran it."""

    function: Any  # torch._ops.OpOverload: its schema and tags
    module: str  # the innermost one; "" is the model itself
    call: int  # of that module, in `Recording.calls`
    arguments: dict[str, Any]  # by name, with their defaults; a tensor is its `Ref`
    reads: tuple[int, ...]  # the tensors among them, in order
    makes: tuple[int, ...]  # its results first; then all other tensors that view what it wrote

    @cached_property
    def name(self) -> str:
        """Such as "convolution" or "add"."""
        return name_of_operation(self.function)

    @property
    def is_in_place(self) -> bool:
        """Whether it writes into one of its arguments."""
        return bool(self.function._schema.is_mutable)


@dataclass
class ModuleCall:
    """One call of a module."""

    module: str
    kind: type[nn.Module]
    at: int  # in `Recording.calls`
    start: int  # its operations are `Recording.operations[start:stop]`, those of modules inside it among them
    stop: int = -1  # until it ends
    arguments: dict[int | str, Any] = field(default_factory=dict)  # by position or name; a tensor is its `Ref`
    output: Any = None  # likewise; None if it raised

    @property
    def reads(self) -> tuple[int, ...]:
        """All tensors among its arguments."""
        return refs_in(self.arguments)

    @property
    def makes(self) -> tuple[int, ...]:
        """All tensors in its output."""
        return refs_in(self.output)


@dataclass(frozen=True)
class Recording:
    """Everything that one run of a model executed, in order."""

    operations: tuple[Operation, ...]
    calls: tuple[ModuleCall, ...]  # in the order in which they began
    values: tuple[Value, ...]  # by number
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    depends_on_values: str  # the first thing that lets values decide what runs, and where; "" if nothing does

    @cached_property
    def maker(self) -> dict[int, int]:
        """By tensor, the operation that made it; none of inputs, parameters and other constants."""
        return {made: i for i, operation in enumerate(self.operations) for made in operation.makes}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """By tensor, the operations that read its values, in order; those that read its shape alone do not count."""
        found: dict[int, list[int]] = {}
        for i, operation in enumerate(self.operations):
            for read in dict.fromkeys(operation.reads) if operation.name not in VALUELESS else ():
                found.setdefault(read, []).append(i)
        return {read: tuple(at) for read, at in found.items()}

    @cached_property
    def calls_of(self) -> dict[str, tuple[ModuleCall, ...]]:
        """The calls of each module."""
        found: dict[str, list[ModuleCall]] = {}
        for call in self.calls:
            found.setdefault(call.module, []).append(call)
        return {name: tuple(calls) for name, calls in found.items()}


def every_tensor(value: Any) -> list[Tensor]:
    """All tensors in a value, in order: itself, or those of a tuple, a list or a dict, however deep."""
    found: list[Tensor] = []
    _gather(value if isinstance(value, (tuple, list)) else (value,), Tensor, found)
    return found


def refs_in(value: Any) -> tuple[int, ...]:
    """All tensors in the arguments or the output of a recorded call, in order."""
    found: list[int] = []
    _gather((value,), Ref, found)
    return tuple(found)


def _gather(values: Iterable[Any], kind: type, found: list[Any]) -> None:
    # not a generator, and called for containers only: this runs for every operation of a network
    for one in values:
        if isinstance(one, kind):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            _gather(one, kind, found)
        elif isinstance(one, dict):
            _gather(one.values(), kind, found)


Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (operation, args, kwargs) -> its result


def _execute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class Watch(TorchDispatchMode):
    """A mode that hands every operation to a function, which runs it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False; otherwise torch would import its compiler, which takes a second, to exclude the method below."""
        return False

    def __init__(self, execute: Execute) -> None:
        super().__init__()
        self.execute = execute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.execute(func, args, kwargs or {})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context for operations that are not the model's own.

        If the model has entered a mode of its own on top, this one stays on, and sees them.
        """
        is_on_top = _get_current_dispatch_mode() is self
        if is_on_top:
            self.__exit__(None, None, None)
        try:
            with torch._C.DisableTorchFunction():
                yield
        finally:
            if is_on_top:
                self.__enter__()


class Recorder:
    """Records one run: `with recorder.watching(...)` around it, then `recorder.recording(output)`.

    A weight in `holders` may be read only while one of its holders, the modules named there, is running; elsewhere is
    a use that nobody sees, and a ModelError. Memory is watched, not the Parameter, so that `.T` and slices are seen
    too. `execute` runs the operations.
    """

    def __init__(
        self, model: nn.Module, holders: Mapping[str, frozenset[str]], where: str, execute: Execute = _execute
    ) -> None:
        self.model, self.holders, self.where, self.execute = model, holders, where, execute
        self.operations: list[Operation] = []
        self.calls: list[ModuleCall] = []
        self.values: list[Value] = []
        self.inputs: tuple[int, ...] = ()
        self.depends_on_values = ""
        self.running = [ModuleCall("", type(model), -1, 0)]
        self.watch = Watch(self._run)
        self._numbers = WeakTensorKeyDictionary()
        self._views: dict[int, list[TensorWeakRef]] = {}  # by the address of the memory: the tensors that view it
        self._named: dict[int, list[tuple[str, tuple[int, int]]]] = {}  # by address: what lies there, and its extent

    @property
    def innermost(self) -> ModuleCall:
        """The call that is under way."""
        return self.running[-1]

    @contextmanager
    def watching(self, args: Any, kwargs: Any) -> Iterator[None]:
        """A context for the one run with these inputs, in which all modules tell of their calls.

        The owner's own hooks have run when the arguments are noted, and so have they when the output is.
        """
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if memory := storage_of(tensor):
                self._named.setdefault(memory, []).append((name, extent_of(tensor)))
        self.inputs = tuple(self._number(t, of_inputs=True) for t in every_tensor((args, kwargs)))
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                for handle in () if isinstance(module, torch.jit.ScriptModule) else self._hooks(name, module):
                    stack.callback(handle.remove)
            with self.watch:
                yield
        # or these would refer to each other, and stay for the garbage collector
        self.watch.execute = self.execute = _execute

    def recording(self, output: Any) -> Recording:
        """What was recorded, after the run."""
        outputs = tuple(map(self._number, every_tensor(output)))
        found = tuple(self.operations), tuple(self.calls), tuple(self.values)
        return Recording(*found, self.inputs, outputs, self.depends_on_values)

    # --- What the modules tell ----------------------------------------------------------------------------------------

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(ModuleCall(name, type(module), len(self.calls), len(self.operations)))
            self.calls.append(self.innermost)

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            with self.watch.paused():
                self.innermost.arguments = dict(enumerate(self._with_refs(args))) | self._with_refs(kwargs)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            with self.watch.paused():
                call = self.running.pop()
                call.output, call.stop = self._with_refs(output), len(self.operations)

        yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        yield module.register_forward_pre_hook(note, with_kwargs=True)
        yield module.register_forward_hook(leave, always_call=True)

    def _with_refs(self, value: Any) -> Any:
        """The value with a `Ref` for every tensor, and the type of whatever may hold tensors unseen (a cache)."""
        if isinstance(value, Tensor):
            return Ref(self._number(value))
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, dict):
            return {name: self._with_refs(one) for name, one in value.items()}
        if isinstance(value, (list, tuple)):
            found = [self._with_refs(one) for one in value]
            return found if isinstance(value, list) else tuple(found)
        return type(value)

    # --- What torch executes ------------------------------------------------------------------------------------------

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = function._schema.arguments
        given = dict(zip((one.name for one in schema), args)) | kwargs
        arguments = {one.name: one.default_value for one in schema} | self._with_refs(given)
        reads = refs_in(arguments)
        result = self.execute(function, args, kwargs)
        written = [
            leaf
            for one in (schema if function._schema.is_mutable else ())
            if one.alias_info is not None and one.alias_info.is_write
            for leaf in every_tensor(given.get(one.name))
        ]
        has_values = function.overloadpacket.__name__ not in VALUELESS
        of_inputs = has_values and any(self.values[read].of_inputs for read in reads)
        by_values = of_inputs and self._goes_by_values(function, arguments)
        makes = self._numbers_of_results(every_tensor(result), written, of_inputs=of_inputs, by_values=by_values)
        self.operations.append(Operation(function, self.innermost.module, self.innermost.at, arguments, reads, makes))
        for read in reads if has_values else ():
            name = self.values[read].name
            if name and {self.values[made].name for made in makes} != {name}:  # a view of it, or a write, reads nothing
                self._refuse_elsewhere(name, self.operations[-1].name)
        return result

    def _numbers_of_results(
        self, results: list[Tensor], written: list[Tensor], *, of_inputs: bool, by_values: bool
    ) -> tuple[int, ...]:
        """New numbers for the results, and for all tensors that view what was written."""
        changed = [view for tensor in written for view in self._that_view_memory_of(tensor)]
        rewritten = {id(tensor) for tensor in (*written, *changed)}
        found = {}
        for tensor in (*results, *written, *changed):
            if id(tensor) in found:
                continue
            is_new = id(tensor) in rewritten or tensor not in self._numbers  # `alias` may return what it was given
            found[id(tensor)] = self._number(tensor, is_new=is_new, of_inputs=of_inputs, by_values=by_values)
        return tuple(dict.fromkeys(found.values()))

    def _number(self, tensor: Tensor, *, is_new: bool = False, of_inputs: bool = False, by_values: bool = False) -> int:
        """The number of a tensor as it is now."""
        known: int | None = self._numbers.get(tensor)
        if known is not None and not is_new:
            return known
        memory = storage_of(tensor)
        if known is None and memory is not None:
            self._views.setdefault(memory, []).append(TensorWeakRef(tensor))
        elif known is not None:  # it was written to: what it held before counts, too
            of_inputs |= self.values[known].of_inputs
            by_values |= self.values[known].by_values
        self._numbers[tensor] = number = len(self.values)
        self.values.append(
            Value(tuple(tensor.shape), tensor.dtype, self._name_of(tensor, memory), of_inputs, by_values)
        )
        return number

    def _that_view_memory_of(self, tensor: Tensor) -> Iterator[Tensor]:
        memory = storage_of(tensor)
        for ref in self._views.get(memory, ()) if memory is not None else ():
            view = ref()
            if view is not None and storage_of(view) == memory:
                yield view

    def _name_of(self, tensor: Tensor, memory: int | None) -> str:
        """The name of the parameter or buffer that a tensor views."""
        named = self._named.get(memory, ()) if memory is not None else ()
        if not named:
            return ""
        start, stop = extent_of(tensor)
        return next((name for name, (first, last) in named if start < last and first < stop), "")

    # --- What must not be, and what must be known ---------------------------------------------------------------------

    def _refuse_elsewhere(self, name: str, function: str) -> None:
        holders = self.holders.get(name)
        if holders is None or any(call.module in holders for call in self.running):
            return
        raise ModelError(
            f"{name} is read by {function} outside its module, so this use would not be scored",
            where=self.where,
            fix=f"call the module itself there, or leave the weight as it is with exclude={name!r}",
            option="exclude",
        )

    def _goes_by_values(self, function: Any, arguments: dict[str, Any]) -> bool:
        """Whether values decide the shape of an operation's results, or which points they are about."""
        name = function.overloadpacket.__name__
        decides = not {_GIVES_NUMBERS, _GIVES_SHAPES}.isdisjoint(function.tags)
        if decides and function is torch.ops.aten.index.Tensor:  # only if it goes by a mask
            indices = [self.values[ref] for ref in refs_in(arguments["indices"])]
            decides = any(one.of_inputs and one.dtype in (torch.bool, torch.uint8) for one in indices)
        if decides:
            where = f"{name} in {self.innermost.module or THE_MODEL}"
            self.depends_on_values = self.depends_on_values or where
        if decides or function._schema.is_mutable:  # what is written in place stays as it was
            return decides
        return any(self.values[ref].by_values for ref in refs_in(arguments["self"] if name in _INTO else arguments))


def storage_of(tensor: Tensor) -> int | None:
    """The address of all the memory that the tensor views part of; None if it has none."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # sparse tensors, and subclasses without storage
        return None


def extent_of(tensor: Tensor) -> tuple[int, int]:
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
