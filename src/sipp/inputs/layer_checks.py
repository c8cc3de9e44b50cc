"""Finds layers that do not compute what was captured of them, which would make their scores wrong.

A subclass, a hook or a patched forward may change the input unseen, or use the weight in another way: the real output
is compared with the one that follows from what was captured. A weight may be read elsewhere: `ReadGuard`. If control
flow or shapes depend on values, a few points do not show what others do, which layers run, how often, and whose patches
they get: `OperationRecorder`.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from sipp.errors import ModelError
from sipp.inputs.layers import PrunableLayer, by_point
from sipp.inputs.patches import n_groups_of, n_patches_of, n_positions_of
from sipp.results.batches import Batch, WeightUse
from sipp.results.numerics import exact_matmul, places_of
from sipp.results.ranking import Weight, to_rows

_log = logging.getLogger("sipp")

# --- Outputs ----------------------------------------------------------------------------------------------------------

MOST_VALUES = 1 << 14  # compared in one use: some points and positions, far apart, show as much as all
FEW_POINTS = 8  # at least, if there are many positions to compare
MOST_ROWS = 64  # of a group, evenly spaced too

# How much two ways to compute a sum may differ, relative to the root of its squared terms. The precision of the
# products decides. A replay of many steps may differ ten times as much.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
COARSE_TOLERANCE = 5e-3  # half precision, TF32
MANY_STEPS = 10


@dataclass(frozen=True)
class Expected:
    """What the output of one call must be: all of it (as one point), or its values at some patches and rows."""

    values_BN: Tensor
    found_in: Callable[[Tensor], Tensor | None]  # the same values of a real output; None if it has another shape
    squares: Callable[[], Tensor | float]  # the sums of the squared terms of each point; 0 if only values are known
    tolerance: Callable[[Tensor], float]  # for a real output


def expected_output(
    layer: PrunableLayer, args: tuple[Any, ...], kwargs: dict[str, Any], by_use: list[Expected | None]
) -> Expected | None:
    """What this call must return, computed before the layer runs; None if that is not possible, which is logged.

    `by_use` holds the `expected_products` of each of its uses.
    """
    output = layer.adapter.output
    if callable(output):
        values = _first_tensor(output(layer.module, args, kwargs))
        if values is not None:
            # a copy: the result may be a view of an input that forward changes in place
            values_1N, shape, own = (
                values.detach().to(torch.float64, copy=True).reshape(1, -1),
                values.shape,
                values.dtype,
            )
            return Expected(
                values_1N,
                lambda real: real.reshape(1, -1) if real.shape == shape else None,
                float,
                lambda real: MANY_STEPS * max(tolerance_of(real.device, own), tolerance_of(real.device, real.dtype)),
            )
    elif not by_use or (output == "products" and len(by_use) == 1 and by_use[0] is not None):
        return by_use[0] if by_use else None  # in a call without patches there is nothing to check
    _log.warning("%s: sipp cannot compute its output, so it is not checked", layer.label)
    return None


def expected_products(layer: PrunableLayer, weight: Weight, use: WeightUse, n_points: int) -> Expected | None:
    """The products of some patches of a use with some rows, plus the bias; None unless it is a use of all rows."""
    if use.row_start != 0 or use.n_rows not in (None, weight.n_rows):
        return None
    windows, n_groups = use.windows, n_groups_of(use)
    points, positions = _compared_places(use)
    rows = _compared_rows(weight.n_rows, n_groups, windows.device)
    dtype = torch.float64 if windows.dtype == torch.float64 else torch.float32
    at: tuple[Any, ...] = (
        points[:, None],
        slice(None),
        *places_of(positions, windows.shape[2 : 2 + use.n_position_dims]),
    )
    patches_BPGK = windows[at].flatten(3).to(dtype)
    patches_GPK = patches_BPGK.flatten(0, 1).transpose(0, 1)
    rows_GRK = to_rows(weight, layer.parameter(use.parameter).detach())[rows].to(dtype).unflatten(0, (n_groups, -1))
    with exact_matmul():
        values_PF = torch.bmm(patches_GPK, rows_GRK.mT).transpose(0, 1).flatten(1)
    bias = getattr(layer.module, "bias", None)
    if isinstance(bias, Tensor) and bias.numel() == weight.n_rows:
        values_PF = values_PF + bias.detach().flatten()[rows].to(dtype)

    def squares_B() -> Tensor:
        # of a point's patches and these rows: sum_k (sum_p a_pk^2) (sum_r w_rk^2), no second product
        squares_BGK = patches_BPGK.double().square().sum(1)
        return (squares_BGK * rows_GRK.double().square().sum(1)).sum((1, 2))

    def found_in(real: Tensor) -> Tensor | None:
        n_dims = max(1, use.n_position_dims)  # rows come before those of positions, or last
        if real.ndim < n_dims or real.shape[-n_dims] != weight.n_rows:
            return None
        if real.numel() != n_patches_of(use) * weight.n_rows:
            return None
        rows_last = real.movedim(-n_dims, -1)
        if n_dims == 1:
            rows_last = by_point(rows_last, n_points).windows
        by_row = rows_last.reshape(len(windows), n_positions_of(use), weight.n_rows)
        return by_row[points[:, None, None], positions[:, None], rows].flatten(1)

    def tolerance(real: Tensor) -> float:
        return max(tolerance_of(windows.device, windows.dtype), tolerance_of(real.device, real.dtype))

    return Expected(values_PF.view(len(points), -1), found_in, squares_B, tolerance)


def _compared_places(use: WeightUse) -> tuple[Tensor, Tensor]:
    """The points and the (flat) positions whose patches are compared: evenly spaced, with the first and the last."""
    n_all, n_positions, device = len(use.windows), n_positions_of(use), use.windows.device
    n_patches = max(4, MOST_VALUES * n_all * n_positions // use.windows.numel())
    n_at = min(n_positions, max(2, n_patches // min(n_all, FEW_POINTS)))
    n_points = min(n_all, max(2, n_patches // n_at))
    return _evenly_spaced(n_all, n_points, device), _evenly_spaced(n_positions, n_at, device)


def _compared_rows(n_all_rows: int, n_groups: int, device: torch.device) -> Tensor:
    """The rows that are compared, the same number in each group."""
    n_rows = n_all_rows // n_groups
    within_R = _evenly_spaced(n_rows, min(n_rows, max(1, MOST_ROWS // n_groups)), device)
    starts_G = torch.arange(0, n_all_rows, n_rows, dtype=torch.int64, device=device)
    return (starts_G[:, None] + within_R).flatten()


def _evenly_spaced(n_all: int, n_taken: int, device: torch.device) -> Tensor:
    return torch.linspace(0, n_all - 1, n_taken, dtype=torch.float64, device=device).round().long()


def refuse_other_output(layer: PrunableLayer, expected: Expected, output: Any, batch: Batch) -> None:
    """Raises ModelError unless the finite part of an output is the expected one, relative to its squared terms.

    An overflow in the layer is refused by the layers after it.
    """
    not_the_map = (
        f"{layer.label}: its forward is not the known map of {layer.known_as} (its class, a patched forward or a "
        f"hook changes what goes in or comes out), so its scores would be wrong; leave it as it is with "
        f"exclude={layer.module_name!r}, or teach its type with sipp.inputs.layers.register. On {batch.where}"
    )
    real = _first_tensor(output)
    if real is None or not real.is_floating_point():
        raise ModelError(f"{not_the_map}: it gives no real numbers but a {type(output).__name__}")
    found_BN = expected.found_in(real)
    if found_BN is None:
        raise ModelError(f"{not_the_map}: its output has the shape {tuple(real.shape)}")
    distance_B = _norms(found_BN.double() - expected.values_BN.double())  # beyond the range of float32, too
    distance_B -= torch.finfo(real.dtype).tiny * found_BN.numel() ** 0.5  # what products that underflow may add up to
    size_B = _norms(expected.values_BN)
    size_B = torch.maximum(size_B, finite_or_zero(expected.squares() + size_B.square()).sqrt())
    ratio_B = distance_B / torch.where(size_B > 0, size_B, 1)
    if bool((ratio_B > expected.tolerance(real)).any()):
        raise ModelError(f"{not_the_map}: its output is off by {float(ratio_B.max()):.2g} of its size")


def _norms(values_BN: Tensor) -> Tensor:
    """The norm of the finite values of each point."""
    return torch.linalg.vector_norm(finite_or_zero(values_BN), dim=1, dtype=torch.float64)


def finite_or_zero(values: Tensor) -> Tensor:
    """The values, with 0 for those that are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def refuse_nan_biases(layers: Sequence[PrunableLayer]) -> None:
    """Raises ModelError if the bias of a layer is all NaN: no later layer could refuse the output of the last one."""
    named = [(layer, getattr(layer.module, "bias", None)) for layer in layers if layer.adapter.output == "products"]
    biases = [(layer, bias.detach()) for layer, bias in named if isinstance(bias, Tensor) and bias.numel() > 0]
    if not biases:
        return
    sums = torch.stack([bias.sum(dtype=torch.float64) for _, bias in biases]).tolist()  # the only GPU sync
    for (layer, bias), total in zip(biases, sums):
        if math.isnan(total) and bool(bias.isnan().all()):
            raise ModelError(
                f"{layer.label}: its output is all NaN, although its inputs and weights are finite",
                fix="look at its bias",
            )


def tolerance_of(device: torch.device, dtype: torch.dtype) -> float:
    """How much values may change with the order of summation, relative to their size."""
    # a GPU's convolutions use TF32 by default
    is_coarse = device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    if dtype == torch.float32 and is_coarse:
        return COARSE_TOLERANCE
    return TOLERANCE.get(dtype, COARSE_TOLERANCE)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, PackedSequence):
        return output.data
    if isinstance(output, tuple | list) and output:
        return _first_tensor(output[0])
    return output if isinstance(output, Tensor) else None


def every_tensor(value: Any) -> list[Tensor]:
    """All tensors in a value, in order: itself, or those of a tuple, a list or a dict, however deep."""
    found: list[Tensor] = []
    _gather(value if isinstance(value, (tuple, list)) else (value,), found)
    return found


def _gather(values: Iterable[Any], found: list[Tensor]) -> None:
    # not a generator, and called for containers only: this runs for every operation of a network
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            _gather(one, found)
        elif isinstance(one, dict):
            _gather(one.values(), found)


# --- Weights that are read elsewhere, and control flow that goes by values --------------------------------------------

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


class ReadGuard(TorchFunctionMode):
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
        self.watched = [_WatchedWeight(*_extent(p), name, tuple(holders[name])) for name, p in parameters.items()]
        self.by_id = {id(parameters[one.name]): one for one in self.watched}  # the model keeps them alive
        self.storages = set(map(_storage, parameters.values()))

    def enter(self, module: nn.Module, *_: object) -> None:
        """Lets the module read its weights from now on: a forward pre-hook."""
        self.running[id(module)] += 1

    def leave(self, module: nn.Module, *_: object) -> None:
        """Ends what `enter` began: a forward hook."""
        self.running[id(module)] -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _BLIND:
            return result
        takes = name in _TAKING
        self.takes_values |= takes
        given = args[:1] if name in _BLIND_BUT_FOR_FIRST else (args, kwargs) if kwargs else args
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
        return next((one for one in self.watched if start < one.stop and one.start < stop), None)

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


def _kind_of(operation: Any) -> tuple[bool, bool, Any]:
    kind = not _BY_VALUES.isdisjoint(operation.tags), operation._schema.is_mutable, operation
    return _KINDS.setdefault(id(operation), kind)


class OperationRecorder(TorchDispatchMode):
    """A mode that records what some weights are multiplied by, if an operation shows it (`_OPERANDS`).

    If it `follows` the data, it also sees whether shapes or Python numbers are computed from its values. Python can
    branch on nothing else of a tensor, except through `tolist` and `numpy`, which are not dispatched (see `ReadGuard`).
    Values computed from positions or weights alone do not count: they are the same for all data, as transformers
    checks of its masks.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False; otherwise torch would import its compiler, which takes a second, to exclude the method below."""
        return False

    def __init__(self, weights: Sequence[Tensor], follows: bool) -> None:
        super().__init__()
        self.depends_on_values = False
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
        """A context for operations that are not the model's own, which neither this mode nor `ReadGuard` sees.

        If the model has entered a mode of its own on top, this one stays on, and the model may seem to go by values.
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = self._operands.get(id(func)) if self._met else None
        if places is not None:
            operand, weight = args[places]
            met = self._met.get(_extent(weight)[0])
            if met is not None:
                met.append(operand)
        is_known = self.depends_on_values or not self.follows
        given = [] if is_known else every_tensor((args, kwargs) if kwargs else args)
        if not any(map(self._is_of_data, given)):
            return func(*args, **(kwargs or {}))
        depends_on_values, writes, _ = _KINDS.get(id(func)) or _kind_of(func)
        if depends_on_values:
            self.depends_on_values = func is not torch.ops.aten.index.Tensor or self._has_mask(args[1])
        result = func(*args, **(kwargs or {}))
        self.follow(result)
        if writes:
            self.follow([given, [tensor._base for tensor in given if tensor._is_view()]])
        return result

    def _has_mask(self, indices: Any) -> bool:
        """Whether one of the indices is a boolean mask computed from the data: it sets the size of the result."""
        return any(one.dtype in (torch.bool, torch.uint8) and self._is_of_data(one) for one in every_tensor(indices))
