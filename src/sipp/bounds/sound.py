"""T13: how far a pruned network's output can be from the dense one's, by a rule for each operation that torch executes.

The dense network runs in float64. Every value of it carries e, for each input a bound on ||a^ - a||, where a is this
value and a^ the pruned network's. An operation op becomes op^ in the pruned network, with changed weights, and

    ||op^(a^) - op(a)|| <= Lip(op^) e + ||op^(a) - op(a)||.

RULES gives the first term; the second is measured on the dense network's actual values. Only the last e is divided by
||f(x)||. An operation without a rule has no bound, and is named. No assumption is needed, but the product of norms
grows with depth and says nothing of deep networks: for these, use a certificate (T14).

Values hold the inputs along the first axis, each as one row or several that follow each other (its positions). The
slack ROUND_UP covers rounding in float64. Axis B: the inputs of a batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from sipp.bounds.operator_norms import ROUND_UP, average_pool_norm, conv_norm, linear_norm, max_pool_gain
from sipp.errors import DataError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import AnyData, data_of, fresh, on_device, tensors_of_inputs, with_dtype
from sipp.inputs.point_hashes import point_hashes
from sipp.inputs.recording import THE_MODEL, VALUELESS, Watch
from sipp.results.batches import Batch
from sipp.results.bounds import MOST_SHARE, NetworkBound, coverage, no_bound
from sipp.results.network_hash import tensors_hash
from sipp.results.numerics import device_of
from sipp.results.ranking import Sensitivities

MEASURED = 1e-13  # of the output: the error of a distance that is measured in float64
# Rounding depends on the order of sums, which differs between batches and machines: the measured error counts twice.
ROUNDING_FACTOR = 2.0


class NoBound(Exception):
    """Why there is no bound."""


# --- The statement about new inputs -----------------------------------------------------------------------------------


def sound_network_bound(
    dense: nn.Module, pruned: nn.Module, points: AnyData, scores: Sensitivities, *, confidence: float
) -> NetworkBound:
    """The largest bound over `points`, which says something of new inputs if the pruning never saw them (T18).

    The bound depends on the pruned weights, so points that chose these cannot represent other inputs: those that equal
    a scored point do not count. The rounding error of both networks is measured against float64 at each point and
    added, so that the statement is about the networks as they run.
    """
    try:
        if scores.batch_dependent or scores.dependence:
            raise NoBound(scores.dependence or "BatchNorm on batch statistics has no bound for a single input")
        data = data_of(points, device=device_of(dense), role="holdout")
        if data.is_empty:
            raise NoBound("too few inputs to hold one back: pass more, or a holdout")
        worst, keys, is_same = 0.0, set[str](), tensors_hash(dense) == tensors_hash(pruned)
        for batch in data.batches():
            error_B, size_B = error_bounds(dense, pruned, batch)
            if not is_same:
                error_B, size_B = _as_run(dense, pruned, batch, error_B)
            worst = max(worst, float(relative(error_B, size_B).max()))
            keys |= set(point_hashes(batch))
    except NoBound as why:
        return no_bound(str(why), None, mode="sound")
    covered = coverage(len(keys - scores.all_seen_keys), 1, confidence)
    causes = [] if math.isfinite(worst) else ["the output is zero, or not finite, for one of the inputs"]
    if covered.share > MOST_SHARE:
        causes.append(
            f"{covered.n} inputs that are new to the pruning are too few: nothing follows for most new inputs"
        )
    return NetworkBound("sound", worst, None, None, "; ".join(causes), {}, covered)


def relative(error_B: Tensor, size_B: Tensor) -> Tensor:
    """The bounds as shares of ||f(x)||: 0 without an error, infinite where f(x) is 0 or anything is not finite."""
    share_B = torch.where(error_B == 0, 0.0, error_B / size_B)
    return torch.where(torch.isfinite(size_B), _nan_as_inf(share_B), math.inf)


def _as_run(dense: nn.Module, pruned: nn.Module, batch: Batch, error_B: Tensor) -> tuple[Tensor, Tensor]:
    """The same for what the networks give in their own precision.

    ||f^_run - f_run|| <= ||f^_run - f^|| + ||f^ - f|| + ||f - f_run||, the middle by T13, the others as measured.
    """
    runs = [_rounding(model, batch) for model in (dense, pruned)]
    for rounding_B, _ in runs:
        error_B = error_B + ROUNDING_FACTOR * rounding_B.to(error_B)
    return error_B, runs[0][1].to(error_B) / ROUND_UP**2  # norm_B rounds up; this rounds down


def _rounding(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """How far a network's output lies from that of its float64 copy, and its norm, point by point.

    Of a network that runs in float64 a float32 copy is measured: rounding goes with the unit.
    """
    kinds = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    given = {value.dtype for value in tensors_of_inputs(batch).values() if value.is_floating_point()}
    run = _output(model, batch, kinds[0] if not given <= set(kinds) else None)
    low, share = run, 1.0
    if run.dtype == torch.float64:
        low = _output(copy.deepcopy(model).to(torch.float32), batch, torch.float32)
        share = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    exact = _output(copy.deepcopy(model).to(torch.float64), batch, torch.float64)
    norms_B = norm_B(run, batch.n_points)
    rounding_B = share * norm_B(low.to(torch.float64) - exact, batch.n_points)
    return torch.maximum(rounding_B, torch.finfo(run.dtype).eps * norms_B), norms_B


def _output(model: nn.Module, batch: Batch, dtype: torch.dtype | None) -> Tensor:
    """The one tensor that a network returns for a batch; inputs are cast to `dtype` (None: left as they are)."""
    with scoring_mode(model, "running"):
        return _one_tensor(run_batch(model, _ready(model, batch, dtype)))


def _ready(model: nn.Module, batch: Batch, dtype: torch.dtype | None) -> Batch:
    """A copy of the batch on the model's device, its real numbers in `dtype` (None: as they are)."""
    copied = on_device(fresh(batch), device_of(model))
    return copied if dtype is None else with_dtype(copied, dtype)


def _one_tensor(output: Any) -> Tensor:
    if isinstance(output, tuple | list) and len(output) == 1:
        output = output[0]
    if not isinstance(output, Tensor):
        raise NoBound(f"no bound: the model returns a {type(output).__name__}, not one tensor")
    return output


# --- The bound at given points ----------------------------------------------------------------------------------------


def error_bounds(dense: nn.Module, pruned: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """For each input, a bound on ||f^(x) - f(x)|| in exact arithmetic, and ||f(x)||; raises NoBound if there is none.

    `pruned` is the dense network with other weights. It runs too: if its output were ever further off than the bound,
    something in the model would not show among its operations, and there is no bound.
    """
    first, second = (copy.deepcopy(model).to(torch.float64) for model in (dense, pruned))
    ready = _ready(first, batch, torch.float64)
    walk = _Walk(first, second, ready)
    try:
        with scoring_mode(first, "running"), Watch(walk):
            output = _one_tensor(run_batch(first, ready, walk.refusals))
    except DataError as error:
        raise NoBound(f"no bound: the model does not run in float64: {error}") from error
    if walk.refusals:  # the model caught it
        raise walk.refusals[0]
    if output not in walk.errors or output.dim() == 0 or len(output) != batch.n_points:
        raise NoBound("no bound: the model does not return one tensor with a row per sample that depends on the input")
    error_B = walk.errors[output] * ROUND_UP
    size_B = norm_B(output, batch.n_points) / ROUND_UP**2  # rounded down
    moved_B = norm_B(_output(second, batch, torch.float64).to(output) - output, batch.n_points)
    if bool((moved_B > error_B * ROUND_UP + MEASURED * size_B).any()):
        raise NoBound("no bound: the output moves further than what the operations show")
    return error_B, size_B


class _Walk:
    """Follows errors through the operations of the dense network, which a watch hands to it."""

    def __init__(self, dense: nn.Module, pruned: nn.Module, batch: Batch) -> None:
        inputs = [leaf for leaf in tree_leaves((batch.args, batch.kwargs)) if isinstance(leaf, Tensor)]
        zeros_B = torch.zeros(batch.n_points, dtype=torch.float64, device=device_of(dense))
        self.errors = WeakTensorKeyDictionary(dict.fromkeys(inputs, zeros_B))  # of values: they depend on the input
        theirs = _tensors(pruned)
        pairs = {tensor: theirs[name] for name, tensor in _tensors(dense).items()}
        self.pruned = WeakTensorKeyDictionary(pairs)  # of constants: the same in the pruned network
        self.refusals: list[Exception] = []
        self.running = [(THE_MODEL, type(dense).__name__)]  # the modules that run, the innermost last
        for name, module in dense.named_modules():
            entered = name or THE_MODEL, type(module).__name__
            module.register_forward_pre_hook(lambda _, __, entered=entered: self.running.append(entered), prepend=True)
            module.register_forward_hook(lambda _, __, ___: self.running.pop() and None, always_call=True)

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation in the dense network; its error is then known."""
        operation = _Operation(function, args, kwargs)
        try:
            if torch.Tag.nondeterministic_seeded in function.tags:
                raise NoBound("it is random, also in eval mode")
            if not any(tensor in self.errors for tensor in operation.tensors):
                return self._on_constants(operation)
            return operation.run() if operation.name in VALUELESS else self._on_values(operation)
        except NoBound as why:
            reason, (module, kind) = f": {why}" if str(why) else "", self.running[-1]
            self.refusals.append(NoBound(f"no bound: op {operation.name} in module {module} ({kind}){reason}"))
            raise self.refusals[-1] from None

    def _on_constants(self, operation: _Operation) -> Any:
        """The result of an operation on constants, which is known in both networks."""
        if not any(tensor in self.pruned for tensor in operation.tensors):
            return operation.run()
        if operation.is_in_place:
            raise NoBound("it changes a constant in place")
        result, other = operation.run(), operation.run(self._in_pruned)
        for ours, theirs in zip(tree_leaves(result), tree_leaves(other), strict=True):
            if isinstance(ours, Tensor):
                self.pruned[ours] = theirs
            elif ours != theirs:
                raise NoBound("it differs between the two networks")
        return result

    def _in_pruned(self, tensor: Tensor) -> Tensor:
        """A constant of the pruned network in the place of the dense one's; the value itself of a value."""
        other: Tensor = self.pruned.get(tensor, tensor)
        return other

    def _on_values(self, operation: _Operation) -> Any:
        """The result of an operation on values; one that overwrites its first argument changes all views of it."""
        overwritten = self._overwritten(operation) if operation.is_in_place else []
        before = {id(tensor): tensor.clone() for tensor in overwritten[:1]}
        result = operation.run()

        def known(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf in self.errors:
                return Value(before.get(id(leaf), leaf), self.errors[leaf])
            return self._in_pruned(leaf) if isinstance(leaf, Tensor) else leaf

        def on(value: Tensor) -> Any:
            return operation.run(lambda tensor: value if tensor in self.errors else self._in_pruned(tensor))

        call = Call(operation.name, tree_map(known, operation.options), result, on)
        if call.name not in RULES:
            raise NoBound
        error_B = RULES[call.name](call)
        changed = any(not torch.equal(tensor, self._in_pruned(tensor)) for tensor in operation.tensors)
        if changed:
            other = _first(operation.run(lambda tensor: before.get(id(tensor), self._in_pruned(tensor))))
            if other.shape != call.out.shape:
                raise NoBound("its result has another shape in the pruned network")
            error_B = error_B + norm_B(other - call.out, call.n_samples)
        is_finite_B = call.out.isfinite().reshape(call.n_samples, -1).all(dim=1)
        error_B = torch.where(is_finite_B, _nan_as_inf(error_B), math.inf)
        for i, piece in enumerate(result if isinstance(result, tuple | list) else [result]):
            # Indices and statistics that come with a value have no bound; all pieces of a movement have one.
            has_bound = i == 0 or (call.name in MOVEMENTS and not changed)
            self.errors[piece] = error_B if has_bound else torch.full_like(error_B, math.inf)
        for view in overwritten:
            self.errors[view] = error_B
        return result

    def _overwritten(self, operation: _Operation) -> list[Tensor]:
        """The value that an operation overwrites, and all others in the same memory."""
        target = operation.args[0] if operation.args else None
        if "out" in operation.kwargs:
            raise NoBound("it writes its result into another tensor")
        if operation.name in MOVEMENTS or not isinstance(target, Tensor) or target not in self.errors:
            raise NoBound("it changes a shape or a constant in place")
        memory = target.untyped_storage().data_ptr()
        views = [one for one in self.errors if one is not target and one.untyped_storage().data_ptr() == memory]
        if any(view.numel() != target.numel() for view in views):
            raise NoBound("it overwrites a part of a value that may be used later")
        return [target, *views]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all their names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple | list) else result


@dataclass(frozen=True)
class _Operation:
    """One operation that torch executes."""

    function: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """Such as "convolution" or "add", without the _ of the form that overwrites its first argument."""
        name: str = self.function.overloadpacket.__name__
        return name[:-1] if self.is_in_place and name.endswith("_") else name

    @property
    def is_in_place(self) -> bool:
        return bool(self.function._schema.is_mutable)

    @property
    def options(self) -> dict[str, Any]:
        """All arguments by name, with their defaults."""
        schema = self.function._schema.arguments
        given = dict(zip((one.name for one in schema), self.args)) | self.kwargs
        return {one.name: one.default_value for one in schema} | given

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def run(self, instead: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
        """The result of the operation, with other tensors in the place of its own."""
        given = self.args, self.kwargs
        args, kwargs = tree_map(lambda leaf: instead(leaf) if isinstance(leaf, Tensor) else leaf, given)
        return self.function(*args, **kwargs)


def norm_B(value: Tensor, n_samples: int) -> Tensor:
    """The Euclidean norm of each sample, rounded up; no square over- or underflows, and NaN comes back as infinity."""
    rows = value.reshape(n_samples, -1).to(torch.float64)
    if rows.shape[1] == 0:
        return rows.new_zeros(n_samples)
    scale_B1 = rows.abs().amax(dim=1, keepdim=True)
    safe_B1 = torch.where(scale_B1 > 0, scale_B1, 1.0)
    return _nan_as_inf(torch.linalg.vector_norm(rows / safe_B1, dim=1) * scale_B1.squeeze(1) * ROUND_UP)


def _nan_as_inf(error_B: Tensor) -> Tensor:
    """The errors with NaN (an overflow, or 0 times infinity) as infinity: an unknown error is never a small one."""
    return torch.where(torch.isnan(error_B), math.inf, error_B)


# --- Lip(op^) e for each operation ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """A value of the dense network, and the bound on the distance of the pruned network's value for each input."""

    tensor: Tensor
    error_B: Tensor


@dataclass(frozen=True)
class Call:
    """One operation as the pruned network has it, on values of the dense one."""

    name: str
    options: dict[str, Any]  # its arguments by name: a tensor is a `Value`, or else the pruned network's constant
    result: Any  # in the dense network
    on: Callable[[Tensor], Any]  # its result on another value

    @property
    def out(self) -> Tensor:
        """The result, or the first of several."""
        out: Tensor = _first(self.result)
        return out

    @property
    def values(self) -> list[Value]:
        return [leaf for leaf in tree_leaves(self.options) if isinstance(leaf, Value)]

    @property
    def n_samples(self) -> int:
        return len(self.values[0].error_B)

    def only(self, name: str = "self") -> Value:
        """The value with this name, the only one among the arguments."""
        value = self.options.get(name)
        if not isinstance(value, Value) or len(self.values) > 1:
            raise NoBound("it combines two network values, or its first argument is not one")
        return value


Rule = Callable[[Call], Tensor]


def times(gain: float | Callable[[Call], float], name: str = "self") -> Rule:
    """The rule of an operation on one value, the argument `name`, with this Lipschitz constant."""
    return lambda call: call.only(name).error_B * (gain(call) if callable(gain) else gain)


def _linear(call: Call) -> float:
    if call.options.get("beta", 1) != 1 or call.options.get("alpha", 1) != 1:
        raise NoBound("its factors are not 1")
    return linear_norm(call.options["mat2"])


def _convolution(call: Call) -> float:
    if call.options["transposed"]:
        raise NoBound("it is transposed")
    windows = {name: call.options[name] for name in ("stride", "padding", "dilation", "groups")}
    return conv_norm(call.options["weight"], input_size=call.only("input").tensor.shape[2:], **windows)


def _batch_norm(call: Call) -> float:
    options = call.options
    if options.get("training") or options["running_mean"] is None or options["running_var"] is None:
        raise NoBound("it uses the statistics of the batch")
    scale = torch.rsqrt(options["running_var"] + options.get("eps", options.get("epsilon")))
    scale = scale if options["weight"] is None else scale * options["weight"]
    return float(scale.abs().max()) * ROUND_UP


def _sum(call: Call) -> Tensor:
    """The errors of a sum or a difference add up."""
    scaled = "self" if call.name == "rsub" else "other"
    error_B = torch.zeros_like(call.values[0].error_B)
    for name in ("self", "other"):
        term, factor = call.options[name], abs(float(call.options["alpha"])) if name == scaled else 1.0
        if isinstance(term, Value):
            error_B = error_B + factor * _spread(term.tensor, call.out) * term.error_B
    return error_B


def _product(call: Call) -> Tensor:
    """A value times a constant, or divided by one."""
    left, right = call.options["self"], call.options["other"]
    value, other = (left, right) if isinstance(left, Value) else (right, left)
    if isinstance(other, Value) or (call.name == "div" and value is right):
        raise NoBound("it combines two network values, or divides by one")
    if call.options.get("rounding_mode") is not None:
        raise NoBound("it rounds")
    factor = torch.as_tensor(other, dtype=torch.float64)
    factor = 1.0 / factor if call.name == "div" else factor
    return value.error_B * float(factor.abs().max()) * _spread(value.tensor, call.out) * ROUND_UP


def _spread(value: Tensor, out: Tensor) -> float:
    """sqrt of how often broadcasting to `out` repeats each value."""
    if value.dim() != out.dim() or len(value) != len(out):
        raise NoBound("broadcasting moves the batch axis")
    return math.sqrt(out.numel() / value.numel()) if value.numel() else 1.0


def _joined(call: Call) -> Tensor:
    """The root of the sum of squares."""
    if call.options["dim"] % call.out.dim() == 0:
        raise NoBound("it joins along the batch axis")
    return torch.stack([value.error_B for value in call.values]).square().sum(0).sqrt() * ROUND_UP


def _movement(call: Call) -> float:
    """sqrt of how often one value is written, read off from what the operation does to numbered values."""
    value, n_samples = call.only().tensor, call.n_samples
    if call.out.dtype != value.dtype:
        raise NoBound("it reads the values as another type")
    numbers = torch.arange(1, value.numel() + 1, dtype=value.dtype, device=value.device).reshape(value.shape)
    sample_B1 = torch.arange(n_samples, dtype=torch.int64, device=value.device)[:, None]
    runs, most = (call.on(numbers), call.on(torch.zeros_like(numbers))), 0
    for after, fill in zip(*runs) if isinstance(call.result, tuple | list) else [runs]:
        number = (after - fill).long()  # of a value, or 0 for a constant
        if number.dim() == 0 or len(number) % n_samples:
            raise NoBound("it moves the batch axis")
        number = number.reshape(n_samples, -1)
        if bool(((number > 0) & ((number - 1) * n_samples // max(value.numel(), 1) != sample_B1)).any()):
            raise NoBound("it mixes the samples of the batch")
        counts = number[number > 0].bincount()
        most = max(most, int(counts.max()) if len(counts) else 0)
    return math.sqrt(most)


def _max_pool(call: Call) -> float:
    _, windows = _windows(call)
    return max_pool_gain(**windows, dilation=call.options["dilation"], n_out=call.out.shape[2:])


def _avg_pool(call: Call) -> float:
    size, windows = _windows(call)
    if call.options["divisor_override"] is not None:
        raise NoBound("it overrides the divisor")
    rest = {name: call.options[name] for name in ("padding", "ceil_mode", "count_include_pad")}
    return average_pool_norm(size, **windows, **rest)


def _windows(call: Call) -> tuple[torch.Size, dict[str, Any]]:
    """The spatial sizes of a pooling's input, and its kernel and stride (that of the kernel where none is given)."""
    kernel, size = call.options["kernel_size"], call.only().tensor.shape[2:]
    if len(size) != len(kernel):
        raise NoBound("its input has no batch axis")
    return size, {"kernel": kernel, "stride": call.options["stride"] or kernel}


def _reduced(call: Call) -> int:
    """The number of values of one sample that a mean, a sum or a softmax joins."""
    shape, dim = call.only().tensor.shape, call.options.get("dim")
    dims = [d % len(shape) for d in (dim if isinstance(dim, Sequence) else [dim])] if dim not in (None, [], ()) else [0]
    if 0 in dims:
        raise NoBound("it acts along the batch axis or without naming its axis")
    if call.options.get("dtype") is not None or call.options.get("half_to_float"):
        raise NoBound("it changes the data type")
    return math.prod(shape[d] for d in dims)


def _softmax(call: Call) -> float:
    _reduced(call)
    return 0.5  # diag(p) - p p' has row sums of magnitude 2 p (1 - p) (Gershgorin)


def _elu(call: Call) -> float:
    """scale * max(x, alpha (exp(x input_scale) - 1)): its slope above zero, and just below."""
    alpha = float(call.options["alpha"])
    scale, input_scale = (float(call.options.get(name, 1.0)) for name in ("scale", "input_scale"))
    if input_scale <= 0:
        raise NoBound("its input_scale is not positive")
    return abs(scale) * max(1.0, abs(alpha * input_scale)) * ROUND_UP


# Operations that only move, copy or leave out values, or fill in constants
MOVEMENTS = frozenset(
    (
        *("view", "_unsafe_view", "permute", "transpose", "t", "squeeze", "unsqueeze", "clone", "alias", "detach"),
        *("select", "slice", "split", "split_with_sizes", "unsafe_split", "unbind", "expand", "repeat", "flip", "roll"),
        *("index", "index_select", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "constant_pad_nd"),
        *(f"{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3)),
    )
)
SLOPES = {  # the largest of each activation, rounded up
    **dict.fromkeys(("relu", "tanh", "hardtanh", "clamp", "clamp_min", "abs", "neg", "log_sigmoid_forward"), 1.0),
    "sigmoid": 0.25,  # p (1 - p) at zero
    "gelu": 1.1290,  # exact form 1.128904.. at sqrt(2); tanh form 1.128993..
    "silu": 1.0999,  # 1.099839..
    "mish": 1.0885,  # 1.088498..
    "hardsigmoid": 0.1666667,  # 1/6, as PyTorch stores it in float32 (0.16666667163..)
    "hardswish": 1.5000001,  # (2x + 3) / 6 at x = 3, with the same 1/6
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(MOVEMENTS, times(_movement)),
    **{name: times(slope) for name, slope in SLOPES.items()},
    "addmm": times(_linear, "mat1"),
    "mm": times(_linear),
    "convolution": times(_convolution, "input"),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), times(_batch_norm, "input")),
    **dict.fromkeys(("_native_batch_norm_legit_no_training", "_batch_norm_no_update"), times(_batch_norm, "input")),
    **dict.fromkeys(("add", "sub", "rsub"), _sum),
    **dict.fromkeys(("mul", "div"), _product),
    "cat": _joined,
    **{f"max_pool{rank}d_with_indices": times(_max_pool) for rank in (2, 3)},
    **{f"avg_pool{rank}d": times(_avg_pool) for rank in (2, 3)},
    "mean": times(lambda call: 1.0 / math.sqrt(_reduced(call))),
    "sum": times(lambda call: math.sqrt(_reduced(call))),
    "_softmax": times(_softmax),
    # I - 1 p' is a projection, as long as 1 p' is: ||1|| ||p|| <= sqrt(n)
    "_log_softmax": times(lambda call: math.sqrt(_reduced(call))),
    "leaky_relu": times(lambda call: max(1.0, abs(float(call.options["negative_slope"])))),
    "elu": times(_elu),
}
