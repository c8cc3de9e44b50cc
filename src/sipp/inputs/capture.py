"""Runs a model on a batch and hands every use of a weight to a consumer: the only hooks beside those of a recording.

A subclass, a hook or a patched forward may change the input of a layer unseen, or use the weight in another way, which
would make its scores wrong. So, in a recorded run of a few points, the real output of each layer is compared with the
one that follows from its uses: the products of patches and rows, or what its adapter returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.data import Batch
from sipp.inputs.layers import PrunableLayer, vectors
from sipp.inputs.model_state import run_batch, scoring_mode
from sipp.inputs.patches import Weight, WeightUse, has_patches
from sipp.inputs.recording import Recorder, Watch, every_tensor
from sipp.inputs.structure import ADDS, Sum
from sipp.results import NormStats, numerics

_log = logging.getLogger("sipp")

OnUse = Callable[[Weight, WeightUse, Batch], None]


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
        """What the layer gives."""
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
        """What this call must give, by its uses or by what its adapter returned; None if that is unknown."""
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
            if weight is not None and has_patches(use, weight, layer.parameter(use.parameter).device, batch):
                yield weight, use
    except StopIteration as end:
        return end.value
    except (DataError, ModelError) as error:
        raise type(error)(f"{layer.label} {error.what}", where=batch.where, fix=error.fix) from None


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile, or the module's own `compile`, was called for it."""
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def meeting_sums(model: nn.Module, sums: Mapping[str, Sum], on_found: Callable[[str, Tensor], None]) -> Iterator[None]:
    """A context for one run that calls `on_found` with each weight's stream, a copy, when it is met."""
    n_left: dict[str, int] = {}  # sums to go, by weight whose layer has been called

    def run(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if n_left and function in ADDS and isinstance(args[1], Tensor) and args[0].shape == args[1].shape:
            for weight in list(n_left):
                n_left[weight] -= 1
                if n_left[weight] == 0:
                    del n_left[weight]
                    on_found(weight, args[sums[weight].at].detach().clone())
        return function(*args, **kwargs)

    def called(weight: str) -> Callable[..., None]:
        return lambda module, args, output: n_left.update({weight: sums[weight].nth})

    with ExitStack() as stack:
        for weight, one in sums.items():
            stack.callback(model.get_submodule(one.module).register_forward_hook(called(weight)).remove)
        stack.enter_context(Watch(run))
        yield


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
    """What the output of one call must be: N values (float64), and the sum of the squared terms they are made of."""

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
    positions = _evenly_spaced(n_positions, min(n_positions, n_at), windows.device)
    rows = _compared_rows(weight.n_rows, n_groups, windows.device)
    at: tuple[Any, ...] = (
        slice(None),
        slice(None),
        *numerics.places_of(positions, windows.shape[2 : 2 + use.n_position_dims]),
    )
    patches_GPK = windows[at].flatten(3).transpose(0, 1).flatten(1, 2).double()
    if not bool(patches_GPK.isfinite().all()):
        return None
    rows_GRK = weight.rows(layer.parameter(use.parameter).detach())[rows].double().unflatten(0, (n_groups, -1))
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
    within_R = _evenly_spaced(n_rows, min(n_rows, max(1, MOST_ROWS // n_groups)), device)
    starts_G = torch.arange(0, n_all_rows, n_rows, dtype=torch.int64, device=device)
    return (starts_G[:, None] + within_R).flatten()


def _evenly_spaced(n_all: int, n_taken: int, device: torch.device) -> Tensor:
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
