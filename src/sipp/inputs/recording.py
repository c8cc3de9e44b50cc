"""A watched run of a model: every operation that PyTorch executes, every call of a module, and what each one reads.

What runs is what is seen, whatever the model's code looks like: modules, functions, methods and operators all end in
the same few operations of `torch.ops.aten`. Tensors become numbers, one for each tensor as it is between two writes:
an operation that writes in place gives all tensors that view the memory new numbers. So "the same number" means "the
same values", and a number is made by one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from sipp.errors import ModelError
from sipp.inputs.layer_checks import every_tensor

THE_MODEL = "the model itself"
# Operations that take a shape, a dtype or a device from their argument, and no values
VALUELESS = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
)
# Functions that take a tensor's values into Python, where branches on them cannot be seen, and are no operations
_TAKING = frozenset(("numpy", "__array__", "__dlpack__", "tolist", "apply_", "map_", "map2_"))
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
    """What is known of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""  # of the parameter or buffer whose memory it views
    of_inputs: bool = False  # whether it is an input of the model, or was computed from one
    by_values: bool = False  # whether other inputs may decide its shape, or which points it is about


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
        """Such as "convolution" or "add", without the _ of the form that overwrites its first argument."""
        name: str = self.function.overloadpacket.__name__
        return name[:-1] if self.is_in_place and name.endswith("_") else name

    @property
    def is_in_place(self) -> bool:
        """Whether it writes into one of its arguments."""
        return bool(self.function._schema.is_mutable)

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.function.tags


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module."""

    module: str
    kind: type[nn.Module]
    arguments: dict[int | str, Any]  # by position or name; a tensor, wherever it is, is its `Ref`
    output: Any  # likewise
    start: int  # its operations are `Recording.operations[start:stop]`, those of modules inside it among them
    stop: int
    writes_arguments: bool  # whether it changed a list or a dict that it was given

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


def refs_in(value: Any) -> tuple[int, ...]:
    """All tensors in the arguments or the output of a recorded call, in order."""
    found: list[int] = []
    _gather_refs((value,), found)
    return tuple(found)


def _gather_refs(values: Iterable[Any], found: list[int]) -> None:
    # called for containers only: this runs for every operation of a network
    for one in values:
        if isinstance(one, Ref):
            found.append(int(one))
        elif isinstance(one, (tuple, list)):
            _gather_refs(one, found)
        elif isinstance(one, dict):
            _gather_refs(one.values(), found)


Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (operation, args, kwargs) -> its result


class Watch(TorchDispatchMode):
    """A mode that hands every operation to a function, which runs it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False; otherwise torch would import its compiler, which takes a second, to exclude the method below."""
        return False

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

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


# Which arguments of an operation are the operand and the weight it is multiplied by
_OPERANDS = {
    torch.ops.aten.mm.default: slice(-2, None),
    torch.ops.aten.addmm.default: slice(-2, None),
    torch.ops.aten.mkldnn_rnn_layer.default: slice(0, 2),  # all steps of one layer of an LSTM, on a CPU
}
_BY_ID = {id(operation): places for operation, places in _OPERANDS.items()}  # operations hash slowly


class Operands:
    """What some weights are multiplied by, if an operation shows it (`_OPERANDS`): call it with each operation."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = tuple(weights)
        self._met: dict[int, list[Tensor]] = {extent_of(weight)[0]: [] for weight in weights}

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = _BY_ID.get(id(function))
        if places is not None:
            operand, weight = args[places]
            met = self._met.get(extent_of(weight)[0])
            if met is not None:
                met.append(operand)
        return function(*args, **kwargs)

    def pop(self, weight: Tensor) -> list[Tensor]:
        """What the weight was multiplied by since the last call for it."""
        at = extent_of(weight)[0]
        found, self._met[at] = self._met[at], []
        return found


class _Taking(TorchFunctionMode):
    """Hands a tensor whose values Python takes, by a function that is no operation, to a function with its name."""

    def __init__(self, on_taken: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.on_taken = on_taken

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _TAKING and args and isinstance(args[0], Tensor):
            self.on_taken(name, args[0])
        return func(*args, **(kwargs or {}))


def _execute(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


@dataclass
class OpenCall:
    """A call that has not ended."""

    module: str
    kind: type[nn.Module]
    at: int  # in the list of calls
    arguments: dict[int | str, Any] = field(default_factory=dict)
    start: int = 0


class Recorder:
    """Records one run: `with recorder.watching(...)` around it, then `recorder.recording(output)`.

    A weight in `holders` may be read only while one of its holders, the modules named there, is running; elsewhere is
    a use that nobody sees, and a ModelError. Memory is watched, not the Parameter, so that `.T` and slices are seen
    too. A read inside a torch.jit.script function cannot be seen.
    """

    def __init__(
        self, model: nn.Module, holders: Mapping[str, frozenset[str]], where: str, execute: Run = _execute
    ) -> None:
        self.model, self.holders, self.where, self.execute = model, holders, where, execute
        self.operations: list[Operation] = []
        self.calls: list[ModuleCall | None] = []
        self.values: list[Value] = []
        self.inputs: tuple[int, ...] = ()
        self.depends_on_values = ""
        self.running: list[OpenCall] = [OpenCall("", type(model), -1)]
        self.watch = Watch(self._run)
        self._numbers = WeakTensorKeyDictionary()
        self._views: dict[int, list[TensorWeakRef]] = {}  # by the address of the memory: the tensors that view it
        self._named = _named_memory(model)

    @property
    def innermost(self) -> OpenCall:
        """The call that is under way."""
        return self.running[-1]

    @contextmanager
    def watching(self, args: Any, kwargs: Any) -> Iterator[None]:
        """A context for the one run with these inputs, in which all modules tell of their calls.

        The owner's own hooks have run when the arguments are noted, and so have they when the output is.
        """
        self.inputs = tuple(self._number(t, of_inputs=True) for t in every_tensor((args, kwargs)))
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                hooks = self._hooks(name, module) if not isinstance(module, torch.jit.ScriptModule) else ()
                for handle in hooks:
                    stack.callback(handle.remove)
            stack.enter_context(_Taking(self._on_taken))
            stack.enter_context(self.watch)
            try:
                yield
            finally:
                self.watch.run = self.execute  # or both would refer to each other, and stay for the garbage collector

    def recording(self, output: Any) -> Recording:
        """What was recorded, after the run."""
        outputs = tuple(map(self._number, every_tensor(output)))
        calls = tuple(call for call in self.calls if call is not None)  # one that raised is none
        return Recording(
            tuple(self.operations), calls, tuple(self.values), self.inputs, outputs, self.depends_on_values
        )

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor as it is now."""
        return self._number(tensor)

    # --- What the modules tell ----------------------------------------------------------------------------------------

    def _hooks(self, name: str, module: nn.Module) -> Iterator[Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.running.append(OpenCall(name, type(module), len(self.calls), start=len(self.operations)))
            self.calls.append(None)

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            with self.watch.paused():
                self.running[-1].arguments = dict(enumerate(self._with_refs(args))) | self._with_refs(kwargs)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with self.watch.paused():
                call = self.running[-1]
                after = _sizes(dict(enumerate(args)) | kwargs)
                given = call.module, call.kind, call.arguments, self._with_refs(output), call.start
                self.calls[call.at] = ModuleCall(*given, len(self.operations), after != _sizes(call.arguments))

        def left(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()

        yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        yield module.register_forward_pre_hook(note, with_kwargs=True)
        yield module.register_forward_hook(leave, with_kwargs=True)
        yield module.register_forward_hook(left, always_call=True)

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
        results = every_tensor(result)
        written = [
            leaf
            for one in (schema if function._schema.is_mutable else ())
            if one.alias_info is not None and one.alias_info.is_write
            for leaf in every_tensor(given.get(one.name))
        ]
        by_shape = function.overloadpacket.__name__ in VALUELESS
        flags = {
            "of_inputs": not by_shape and any(self.values[read].of_inputs for read in reads),
            "by_values": not by_shape
            and any(self.values[read].by_values for read in _of_its_form(function, arguments)),
        }
        self._look_at_values(function, arguments, reads, flags)
        makes = self._numbers_of_results(results, written, flags)
        call = self.running[-1]
        operation = Operation(function, call.module, call.at, arguments, reads, makes)
        self.operations.append(operation)
        self._refuse_reads_elsewhere(operation)
        return result

    def _numbers_of_results(
        self, results: list[Tensor], written: list[Tensor], flags: dict[str, bool]
    ) -> tuple[int, ...]:
        """New numbers for the results, and for all tensors that view what was written."""
        changed = [view for tensor in written for view in self._that_view_memory_of(tensor)]
        rewritten = {id(tensor) for tensor in (*written, *changed)}
        found = {}
        for tensor in (*results, *written, *changed):
            if id(tensor) in found:
                continue
            is_new = id(tensor) in rewritten or tensor not in self._numbers  # `alias` may return what it was given
            found[id(tensor)] = self._number(tensor, is_new=is_new, **flags)
        return tuple(dict.fromkeys(found.values()))

    def _number(self, tensor: Tensor, *, is_new: bool = False, of_inputs: bool = False, by_values: bool = False) -> int:
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
        name = self._name_of(tensor, memory)
        self.values.append(Value(tuple(tensor.shape), tensor.dtype, name, of_inputs, by_values))
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

    def _refuse_reads_elsewhere(self, operation: Operation) -> None:
        if operation.name in VALUELESS:
            return
        makes = {self.values[made].name for made in operation.makes}
        for read in operation.reads:
            name = self.values[read].name
            if name and makes != {name}:  # a view of it, or a write to it, reads nothing
                self._refuse_elsewhere(name, operation.name)

    def _refuse_elsewhere(self, name: str, function: str) -> None:
        holders = self.holders.get(name)
        if holders is None or any(call.module in holders for call in self.running):
            return
        module = name.rpartition(".")[0] or THE_MODEL
        raise ModelError(
            f"{name} is read by {function} while {module} is not running, so the weight has a use that is not scored",
            where=self.where,
            fix=f"call the module itself there, or leave the weight as it is with exclude={name!r}",
            option="exclude",
        )

    def _look_at_values(
        self, function: Any, arguments: dict[str, Any], reads: tuple[int, ...], flags: dict[str, bool]
    ) -> None:
        """Notes whether an operation gives a number, or a shape, that goes by the values of inputs."""
        if not flags["of_inputs"] or {_GIVES_NUMBERS, _GIVES_SHAPES}.isdisjoint(function.tags):
            return
        if function is torch.ops.aten.index.Tensor:  # its result has another shape only if it goes by a mask
            indices = [self.values[ref] for ref in refs_in(arguments["indices"])]
            if not any(one.of_inputs and one.dtype in (torch.bool, torch.uint8) for one in indices):
                return
        flags["by_values"] = True
        self._note_dependence(function.overloadpacket.__name__)

    def _on_taken(self, function: str, tensor: Tensor) -> None:
        value = self.values[self._number(tensor)]
        if value.name:
            self._refuse_elsewhere(value.name, function)
        if value.of_inputs:
            self._note_dependence(function)

    def _note_dependence(self, function: str) -> None:
        self.depends_on_values = self.depends_on_values or f"{function} in {self.running[-1].module or THE_MODEL}"


def _of_its_form(function: Any, arguments: dict[str, Any]) -> tuple[int, ...]:
    """The tensors that decide how many results an operation has: what is written in place, or into, stays as it was."""
    if function._schema.is_mutable:
        return ()
    is_into = function.overloadpacket.__name__ in _INTO
    return refs_in(arguments["self"] if is_into else arguments)


def _sizes(arguments: dict[int | str, Any]) -> list[int]:
    """How many entries the lists and dicts among the arguments have."""
    return [len(value) for value in arguments.values() if isinstance(value, list | dict)]


def _named_memory(model: nn.Module) -> dict[int, list[tuple[str, tuple[int, int]]]]:
    """By address of memory, the parameters and buffers that lie in it, and from where to where."""
    found: dict[int, list[tuple[str, tuple[int, int]]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        memory = storage_of(tensor)
        if memory:
            found.setdefault(memory, []).append((name, extent_of(tensor)))
    return found


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
