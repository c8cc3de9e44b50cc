"""Runs a model on a batch and leaves it as it was; hands every use of a weight to a consumer; copies models.

A subclass, a hook or a patched forward may change the input of a layer unseen, or use the weight in another way, which
would make its scores wrong. So, in a recorded run of a few points, the real output of each layer is compared with the
one that follows from its uses: the products of patches and rows, or what its adapter returns.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.data import Batch
from sipp.inputs.grouped_attention import RepeatedHeads
from sipp.inputs.layers import PrunableLayer, vectors
from sipp.inputs.patches import Weight, WeightUse, has_patches
from sipp.inputs.recording import Recorder, every_tensor
from sipp.results import NormStats, numerics

_log = logging.getLogger("sipp")

OnUse = Callable[[Weight, WeightUse, Batch], None]

# Held while a model is not in the state its owner left it in. One lock for all models: they may share parts, and one
# of PyTorch's switches is global.
ONE_AT_A_TIME = threading.RLock()

N_GROUPS = "num_key_value_groups"  # of attention layers of transformers: query heads for each head of keys and values


def run_batch(model: nn.Module, batch: Batch, own_errors: Sequence[Exception] = ()) -> Any:
    """The model's output on a batch; if the model raises, a DataError names the batch and its shapes.

    Errors of sipp's own (also those listed in `own_errors`) and out-of-memory errors are raised unchanged.
    """
    try:
        return model(*batch.args, **batch.kwargs)
    except (DataError, ModelError, OptionError):
        raise
    except Exception as error:  # their network, their data: anything may be raised
        if numerics.is_out_of_memory(error) or any(error is one for one in own_errors):
            raise
        raise DataError(_failure(model, batch, error)) from error


def _failure(model: nn.Module, batch: Batch, error: Exception) -> str:
    """The message for a forward that failed: on which inputs, with which error, and what to try."""
    inputs = {name: value for name, value in batch.tensors.items() if isinstance(value, Tensor)}
    given = ", ".join(f"{name}: {str(t.dtype)[6:]} {' x '.join(map(str, t.shape))}" for name, t in inputs.items())
    text = f"{batch.where} ({given}): the model raised {type(error).__name__}: {error}"
    if isinstance(error, TypeError) and batch.labels is not None and batch.kwargs:
        text += " (the labels of a dict batch are not passed; if the model takes them, give the pair (dict, labels))"
    wanted = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if wanted and not {t.dtype for t in inputs.values()} <= wanted and "type" in str(error):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wanted))
        return f"{text}; its parameters are {names}: convert the inputs to that if it takes no others"
    return f"{text}; give inputs of the shape and type that the model takes"


@contextmanager
def scoring_mode(model: nn.Module, norm_stats: NormStats) -> Iterator[list[nn.Module]]:
    """A context without gradients in which the model is in eval mode; afterwards it is as it was.

    Yields all modules of the model.
    With `norm_stats="batch"` BatchNorm layers use the statistics of the batch and leave their buffers untouched.
    PyTorch's fused attention path is off: it runs a whole encoder layer without calling the layers inside it.
    Threads wait for each other, so that none mistakes the state another one set for the model's own.
    """
    modules = list(model.modules())
    norms: list[Any] = [m for m in modules if _uses_batch(m)] if norm_stats == "batch" else []
    with ONE_AT_A_TIME, restoring(modules):
        fastpath, configs = torch.backends.mha.get_fastpath_enabled(), turn_off_caches(modules)
        try:
            if any(module.training for module in modules):
                model.eval()
            for module in norms:
                module.training = True
                module.track_running_stats = False
            torch.backends.mha.set_fastpath_enabled(False)
            with torch.no_grad(), _fused_attention(modules):
                yield modules
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            for config in configs:
                config.use_cache = True


@contextmanager
def restoring(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context after which every attribute and buffer of these modules is the same object, with the same values.

    Inside it they have copies of their buffers.
    """
    scripted = [(module, module.training) for module in modules if isinstance(module, torch.jit.ScriptModule)]
    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in plain]
    buffers = {id(one): one for _, _, some in before for one in some.values() if one is not None and not is_lazy(one)}
    copies = {key: buffer.detach().clone() for key, buffer in buffers.items()}
    for module, _, own in before:
        module._buffers.update({name: copies[id(one)] for name, one in own.items() if id(one) in copies})
    try:
        yield
    finally:
        for module, attributes, own in before:
            for current, was in ((vars(module), attributes), (module._buffers, own)):
                if list(current) != list(was):  # the order of buffers is that of the state_dict
                    current.clear()
                current.update(was)
        for module, was_training in scripted:
            module.train(was_training)


def turn_off_caches(modules: Iterable[nn.Module]) -> list[Any]:
    """Turns off the key-value cache of a transformers model, given all of its modules; returns the configs it changed.

    A pass over whole sequences does not need the cache, which takes memory and cannot be traced.
    """
    configs: list[Any] = [vars(module).get("config") for module in modules]
    found = {id(one): one for one in configs if getattr(one, "use_cache", None) is True}
    for config in found.values():
        config.use_cache = False
    return list(found.values())


def depends_on_batch(model: nn.Module, norm_stats: NormStats) -> bool:
    """Whether a point's activations depend on the other points of its batch (batch statistics somewhere)."""
    return any(_uses_batch(m) and (norm_stats == "batch" or m.running_mean is None) for m in model.modules())


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and not isinstance(module, _InstanceNorm)


def _fused_attention(modules: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """A context in which grouped attention among these modules of transformers runs by a fused kernel.

    It does nothing for other models: looking at every operation costs time, most of all where these are short.
    """
    is_grouped = any(isinstance(n := vars(module).get(N_GROUPS), int) and n > 1 for module in modules)
    return RepeatedHeads() if is_grouped else nullcontext()


# --- Every use of a weight --------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run of a batch, whose layers run `_Reading`s of themselves. With a recorder, their outputs are compared."""

    batch: Batch
    on_use: OnUse
    replaced: Collection[str] = ()  # modules whose forward is known to give what their adapter returns
    recorder: Recorder | None = None
    products: set[str] = field(default_factory=set)  # modules whose output was the products of one use, plus a bias
    returned: set[str] = field(default_factory=set)  # those whose output was what their adapter returned
    own_errors: list[Exception] = field(default_factory=list)  # raised by `on_use`: not the model's fault

    def of(self, model: nn.Module, layers: Iterable[PrunableLayer], norm_stats: NormStats) -> Any:
        """The model's output. It is given a copy: a first layer that works in place must not change the caller's data.

        The model is left exactly as it was, also when something raises.
        """
        with ExitStack() as stack:
            modules = stack.enter_context(scoring_mode(model, norm_stats))
            if any(map(_is_compiled, modules)):  # torch.compile would compile what reads the layers too
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            given = self.batch.copied()
            if self.recorder is not None:
                stack.enter_context(self.recorder.watching(given.args, given.kwargs))
            for layer in layers:
                reading = _Reading(layer, self, layer.module.forward)
                layer.module.forward = reading.forward  # scoring_mode puts it back
                if self.recorder is not None:  # after the owner's own hooks, which may change the output
                    stack.callback(layer.module.register_forward_hook(reading.compare).remove)
            return run_batch(model, given, self.own_errors)

    def paused(self) -> Any:
        """A context for our own operations, which no watch must take for the model's."""
        return torch._C.DisableTorchFunction() if self.recorder is None else self.recorder.watch.paused()


@dataclass(frozen=True)
class _Reading:
    """One layer in a run: its uses are handed over before it does its work."""

    layer: PrunableLayer
    run: Run
    own_forward: Callable[..., Any]
    awaited: list[_Expected | None] = field(default_factory=list)  # outputs of calls that have not ended

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the layer."""
        run, layer, uses = self.run, self.layer, list[tuple[Weight, WeightUse]]()
        with run.paused():
            reported = _uses(layer, args, kwargs, run.batch)
            while True:
                try:
                    weight, use = next(reported)
                except StopIteration as end:
                    returned = end.value
                    break
                try:
                    run.on_use(weight, use, run.batch)
                except Exception as error:
                    run.own_errors.append(error)
                    raise
                uses += [(weight, use)] if run.recorder is not None else []
            if run.recorder is not None:
                self.awaited.append(self._expected(uses, returned))
        if returned is not None and layer.module_name in run.replaced:
            return returned
        return self.own_forward(*args, **kwargs)

    def _expected(self, uses: list[tuple[Weight, WeightUse]], returned: Any) -> _Expected | None:
        """The expected output of this call, by its uses or by what its adapter returned; None if that is unknown."""
        if returned is not None:
            self.run.returned.add(self.layer.module_name)
            return _as_returned(returned)
        if len(uses) == 1 and uses[0][1].n_rows_of(uses[0][0]) == uses[0][0].n_rows:
            self.run.products.add(self.layer.module_name)
            return _products(self.layer, *uses[0], self.run.batch.n_points)
        if uses:
            _log.warning("%s: its output cannot be computed here and is not checked", self.layer.label)
        return None

    def compare(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Raises if the output is not the one that follows from the uses."""
        expected = self.awaited.pop()
        with self.run.paused():
            why = "" if expected is None else expected.why_not(output)
        if why:
            raise ModelError(
                f"{self.layer.label}: sipp cannot reproduce this layer's output as a {self.layer.known_as} (its class, "
                "a patched forward or a hook changes its inputs or output), and its scores would be wrong; leave it as "
                f"it is with exclude={self.layer.module_name!r}, or register an adapter "
                f"(sipp.inputs.layers.register). On {self.run.batch.where}: {why}"
            )


def _uses(
    layer: PrunableLayer, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch
) -> Generator[tuple[Weight, WeightUse], None, Any]:
    """The uses of one call that have patches of a chosen weight, as its adapter reports them, and what it returns."""
    reported = iter(layer.adapter.uses(layer.module, args, kwargs, batch.n_points))
    try:
        while True:
            use = next(reported)
            weight = layer.weights.get(use.parameter)  # None: not chosen, or tied to an embedding
            if weight is not None and has_patches(use, weight, layer.module.get_parameter(use.parameter).device, batch):
                yield weight, use
    except StopIteration as end:
        return end.value
    except (DataError, ModelError) as error:
        raise type(error)(f"{layer.label} {error.what}", where=batch.where, fix=error.fix) from None


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile, or the module's own `compile`, was called for it."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


# --- Does a layer compute what was captured of it? --------------------------------------------------------------------

MOST_VALUES = 1 << 14  # of patches, compared in one use: some positions, far apart, show as much as all
MOST_ROWS = 64  # of a group, evenly spaced too

# How much two ways to compute a sum may differ, relative to the root of its squared terms. The precision of the
# products decides. A replay of many steps may differ ten times as much.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
COARSE_TOLERANCE = 5e-3  # half precision, TF32
MANY_STEPS = 10


@dataclass(frozen=True)
class _Expected:
    """The expected output of one call: N values (float64), and the sum of the squared terms they are made of."""

    values_N: Tensor
    squares: Tensor
    found_in: Callable[[Any], Tensor | None]  # the same values of a real output; None if it has another form
    tolerance: float

    def why_not(self, output: Any) -> str:
        """How an output differs, relative to its squared terms; "" if it does not.

        Values that are not finite do not count: an overflow is refused where it is scored.
        """
        found_N = self.found_in(output)
        if found_N is None:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            return f"its output has another form ({shape})"
        tolerance = max(self.tolerance, tolerance_of(found_N.device, found_N.dtype))
        distance = _norm(found_N.double() - self.values_N)
        distance = distance - torch.finfo(found_N.dtype).tiny * found_N.numel() ** 0.5  # for products that underflow
        size = (self.squares + _norm(self.values_N).square()).sqrt()
        ratio = float(distance / size) if float(size) > 0 else float(distance)
        return f"its output is off by {ratio:.2g} of its size" if ratio > tolerance else ""


def _as_returned(returned: Any) -> _Expected:
    """All tensors of real numbers that an adapter returns, one after the other."""
    shapes = [tensor.shape for tensor in _reals(returned)]

    def values(output: Any) -> Tensor | None:
        tensors = _reals(output)
        if [tensor.shape for tensor in tensors] != shapes:
            return None
        return torch.cat([tensor.detach().flatten() for tensor in tensors])

    found_N = values(returned)
    assert found_N is not None
    zero = torch.zeros((), dtype=torch.float64, device=found_N.device)
    return _Expected(found_N.double(), zero, values, MANY_STEPS * tolerance_of(found_N.device, found_N.dtype))


def _reals(output: Any) -> list[Tensor]:
    return [tensor for tensor in every_tensor(output) if tensor.is_floating_point()]


def _products(layer: PrunableLayer, weight: Weight, use: WeightUse, n_points: int) -> _Expected | None:
    """The products of some patches of each point with some rows, plus the bias; None after an overflow."""
    windows, n_groups, n_positions = use.windows, use.n_groups, use.n_positions
    n_at = max(2, MOST_VALUES * n_positions // windows.numel())
    positions = evenly_spaced(n_positions, min(n_positions, n_at), windows.device)
    rows = _compared_rows(weight.n_rows, n_groups, windows.device)
    # NumPy's, because torch's spends half a second on imports at its first call
    _, *places = np.unravel_index(positions.cpu().numpy(), (1, *windows.shape[2 : 2 + use.n_position_dims]))
    at: tuple[Any, ...] = (slice(None), slice(None), *map(torch.from_numpy, places))
    patches_GPK = windows[at].flatten(3).transpose(0, 1).flatten(1, 2).double()
    if not bool(patches_GPK.isfinite().all()):
        return None
    rows_GRK = (
        weight.rows(layer.module.get_parameter(use.parameter).detach())[rows].double().unflatten(0, (n_groups, -1))
    )
    values_PF = torch.bmm(patches_GPK, rows_GRK.mT).transpose(0, 1).flatten(1)
    squares = torch.einsum("gpk,grk->", patches_GPK.square(), rows_GRK.square())
    bias = getattr(layer.module, "bias", None)
    if isinstance(bias, Tensor) and bias.numel() == weight.n_rows:
        values_PF = values_PF + bias.detach().flatten()[rows].double()

    def found_in(real: Any) -> Tensor | None:
        n_dims = max(1, use.n_position_dims)  # rows come before those of positions, or last
        if not isinstance(real, Tensor) or not real.is_floating_point() or real.ndim < n_dims:
            return None
        n_values = len(windows) * n_positions * weight.n_rows
        if real.shape[-n_dims] != weight.n_rows or real.numel() != n_values:
            return None
        rows_last = real.detach().movedim(-n_dims, -1)
        rows_last = vectors("", rows_last, n_points).windows if n_dims == 1 else rows_last
        return rows_last.reshape(len(windows), n_positions, -1)[:, positions[:, None], rows].flatten()

    return _Expected(values_PF.flatten(), squares, found_in, tolerance_of(windows.device, windows.dtype))


def _compared_rows(n_all_rows: int, n_groups: int, device: torch.device) -> Tensor:
    """The rows that are compared, the same number in each group."""
    n_rows = n_all_rows // n_groups
    within_R = evenly_spaced(n_rows, min(n_rows, max(1, MOST_ROWS // n_groups)), device)
    starts_G = torch.arange(0, n_all_rows, n_rows, dtype=torch.int64, device=device)
    return (starts_G[:, None] + within_R).flatten()


def evenly_spaced(n_all: int, n_taken: int, device: torch.device) -> Tensor:
    """So many of all numbers below n, the first and the last among them."""
    return torch.linspace(0, n_all - 1, n_taken, dtype=torch.float64, device=device).round().long()


def _norm(values: Tensor) -> Tensor:
    """The norm of the finite values."""
    return torch.linalg.vector_norm(finite_or_zero(values), dtype=torch.float64)


def finite_or_zero(values: Tensor) -> Tensor:
    """The values, with 0 for those that are not finite."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def tolerance_of(device: torch.device, dtype: torch.dtype) -> float:
    """How much values may change with the order of summation, relative to their size."""
    # a GPU's convolutions use TF32 by default
    is_coarse = device.type != "cpu" or torch.get_float32_matmul_precision() != "highest"
    if dtype == torch.float32 and is_coarse:
        return COARSE_TOLERANCE
    return TOLERANCE.get(dtype, COARSE_TOLERANCE)


# --- Copies -----------------------------------------------------------------------------------------------------------


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that shares no parameter or buffer with the model."""
    try:
        with ONE_AT_A_TIME:  # as its owner left it, whatever other threads do with it meanwhile
            made = copy.deepcopy(model)
    except Exception as error:  # their classes, their __deepcopy__: anything may be raised
        raise ModelError(
            f"the {type(model).__name__} cannot be copied ({type(error).__name__}: {error})",
            fix="keep what has no copy (locks, files, tensors with a history) out of its attributes, or give it "
            "a __deepcopy__",
        ) from error
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    shared = [name for name, tensor in (*made.named_parameters(), *made.named_buffers()) if id(tensor) in own]
    if shared:
        raise ModelError(f"a deep copy of the model shares {shared[0]} with it: a __deepcopy__ must copy its tensors")
    return made


def check_has_values(role: str, model: nn.Module) -> None:
    """Raises if a tensor of the model, which is named by its role, has no shape or no values yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{name} has no shape yet (a lazy layer)", where=role, fix="run the model once on a batch first"
            )
        if tensor.is_meta:
            raise ModelError(
                f"{name} is on the meta device and has no values", where=role, fix="load the weights first"
            )


def check_can_be_written(model: nn.Module) -> None:
    """Raises if a tensor of the model was made under torch.inference_mode: it can be neither written nor trained."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and tensor.is_inference():
            raise ModelError(
                f"{name} was created in torch.inference_mode and cannot be changed",
                fix="give copy.deepcopy(model), made outside of it",
            )
