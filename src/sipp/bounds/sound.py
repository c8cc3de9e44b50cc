"""How far a pruned network's output can be from the dense one's, operation by operation (T13).

The dense network runs in float64. Every value of it carries e, for each input a bound on ||a^ - a||, where a is this
value and a^ the pruned network's. An operation op becomes op^ in the pruned network, with changed weights, and

    ||op^(a^) - op(a)|| <= Lip(op^) e + ||op^(a) - op(a)||.

`rules.py` gives the first term; the second is measured on the dense network's actual values. Only the last e is divided
by ||f(x)||. An operation without a rule has no bound, and is named. No assumption is needed, but the product of norms
grows with depth and says nothing of deep networks: for these, use a certificate (T14).

The slack ROUND_UP covers rounding in float64. Axis B: the inputs of a batch.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sipp.bounds.operator_norms import ROUND_UP
from sipp.bounds.rules import MOVEMENTS, RULES, BoundedValue, Call, NoBound
from sipp.errors import DataError
from sipp.inputs import (
    THE_MODEL,
    VALUELESS,
    AnyData,
    Batch,
    Recorder,
    data_of,
    outputs,
    run_batch,
    scoring_mode,
)
from sipp.native import pytree
from sipp.results import Coverage, NetworkBound, hashing, numerics
from sipp.scoring import Sensitivities

MEASURED = 1e-13  # of the output: the error of a distance that is measured in float64
# Rounding depends on the order of sums, which differs between batches and machines: the measured error counts twice.
ROUNDING_FACTOR = 2.0


# --- The statement about new inputs -----------------------------------------------------------------------------------


def sound_network_bound(
    dense: nn.Module, pruned: nn.Module, points: AnyData, scores: Sensitivities, *, confidence: float
) -> NetworkBound:
    """The largest bound over `points`; valid for new inputs if the pruning never saw these (T18).

    The bound depends on the pruned weights, so points that chose these cannot represent other inputs: those that equal
    a scored point do not count. The rounding error of both networks is measured against float64 at each point and
    added, so that the statement is about the networks as they run.
    """
    try:
        if scores.batch_dependent or scores.dependence:
            raise NoBound(scores.dependence or "BatchNorm on batch statistics has no bound for a single input")
        data = data_of(points, device=numerics.device_of(dense), role="holdout")
        if data.is_empty:
            raise NoBound("too few inputs to hold one back: pass more, or a holdout")
        worst, hashes, is_same = 0.0, set[str](), hashing.of_model(dense) == hashing.of_model(pruned)
        for batch in data.batches():
            error_B, size_B = error_bounds(dense, pruned, batch)
            if not is_same:
                error_B, size_B = _as_run(dense, pruned, batch, error_B)
            worst = max(worst, float(relative(error_B, size_B).max()))
            hashes |= set(batch.hashes())
    except NoBound as why:
        return NetworkBound.none(str(why), None, mode="sound")
    covered = Coverage.of(len(hashes - scores.seen.hashes), 1, confidence)
    causes = [] if math.isfinite(worst) else ["the output is zero, or not finite, for one of the inputs"]
    if covered.share > Coverage.MOST_SHARE:
        causes.append(
            f"{covered.n} inputs that are new to the pruning are too few: nothing follows for most new inputs"
        )
    return NetworkBound("sound", worst, None, None, "; ".join(causes), covered)


def relative(error_B: Tensor, size_B: Tensor) -> Tensor:
    """The bounds as shares of ||f(x)||: 0 without an error, infinite where f(x) is 0 or anything is not finite."""
    share_B = torch.where(error_B == 0, 0.0, error_B / size_B)
    return torch.where(torch.isfinite(size_B), _nan_as_inf(share_B), math.inf)


def _as_run(dense: nn.Module, pruned: nn.Module, batch: Batch, error_B: Tensor) -> tuple[Tensor, Tensor]:
    """The bounds for the networks as they run, in their own precision, and the size of the outputs.

    ||f^_run - f_run|| <= ||f^_run - f^|| + ||f^ - f|| + ||f - f_run||, the middle by T13, the others as measured.
    """
    runs = [_rounding(model, batch) for model in (dense, pruned)]
    for rounding_B, _ in runs:
        error_B = error_B + ROUNDING_FACTOR * rounding_B.to(error_B)
    return error_B, runs[0][1].to(error_B) / ROUND_UP**2  # norm_B rounds up; this rounds down


def _rounding(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """How far a network's output lies from that of its float64 copy, and its norm, point by point.

    For a network in float64, a float32 copy is measured and the difference scaled: rounding is proportional to it.
    """
    kinds = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    given = {value.dtype for value in batch.tensors.values() if value.is_floating_point()}
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
    return batch.copied(numerics.device_of(model), dtype)


def _one_tensor(output: Any) -> Tensor:
    if isinstance(output, tuple | list) and len(output) == 1:
        output = output[0]
    if not isinstance(output, Tensor):
        raise NoBound(f"the model returns a {type(output).__name__}, not one tensor")
    return output


# --- The bound at given points ----------------------------------------------------------------------------------------


def error_bounds(dense: nn.Module, pruned: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """For each input, a bound on ||f^(x) - f(x)|| in exact arithmetic, and ||f(x)||; raises NoBound if there is none.

    `pruned` is the dense network with other weights. It runs too: if its output were ever further off than the bound,
    something in the model would not show among its operations, and there is no bound.
    """
    first, second = (copy.deepcopy(model).to(torch.float64) for model in (dense, pruned))
    ready = _ready(first, batch, torch.float64)
    try:
        with scoring_mode(first, "running"):
            walk = _Walk(first, second, ready)
            with walk.recorder.watching(ready.args, ready.kwargs):
                output = _one_tensor(run_batch(first, ready, walk.refusals))
    except DataError as error:
        raise NoBound(f"the model does not run in float64: {error}") from error
    if walk.refusals:  # the model caught it
        raise walk.refusals[0]
    if output not in walk.errors or output.dim() == 0 or len(output) != batch.n_points:
        raise NoBound("the model does not return one tensor with a row per sample that depends on the input")
    error_B = walk.errors[output] * ROUND_UP
    size_B = norm_B(output, batch.n_points) / ROUND_UP**2  # rounded down
    moved_B = norm_B(_output(second, batch, torch.float64).to(output) - output, batch.n_points)
    if bool((moved_B > error_B * ROUND_UP + MEASURED * size_B).any()):
        raise NoBound("the output changes more than its operations allow")
    return error_B, size_B


class _Walk:
    """Follows errors through the operations of the dense network, as a recorder meets them."""

    def __init__(self, dense: nn.Module, pruned: nn.Module, batch: Batch) -> None:
        inputs = [leaf for leaf in pytree.tree_leaves((batch.args, batch.kwargs)) if isinstance(leaf, Tensor)]
        zeros_B = torch.zeros(batch.n_points, dtype=torch.float64, device=numerics.device_of(dense))
        self.errors = WeakTensorKeyDictionary(dict.fromkeys(inputs, zeros_B))  # of values: they depend on the input
        theirs = numerics.parameters_and_buffers(pruned)
        pairs = {tensor: theirs[name] for name, tensor in numerics.parameters_and_buffers(dense).items()}
        self.pruned = WeakTensorKeyDictionary(pairs)  # of constants: the same in the pruned network
        self.refusals: list[Exception] = []
        self.recorder = Recorder(dense, {}, batch.where, self)

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation in the dense network; its error is then known."""
        call = Call(function, args, kwargs)
        try:
            if torch.Tag.nondeterministic_seeded in function.tags:
                raise NoBound("it is random, also in eval mode")
            if not any(tensor in self.errors for tensor in call.tensors):
                return self._on_constants(call)
            return call.run() if call.name in VALUELESS else self._on_values(call)
        except NoBound as why:
            reason = f": {why}" if str(why) else ""
            place = self.recorder.innermost
            module = f"module {place.module or THE_MODEL} ({place.kind.__name__})"
            self.refusals.append(NoBound(f"op {call.name} in {module}{reason}"))
            raise self.refusals[-1] from None

    def _on_constants(self, call: Call) -> Any:
        """The result of an operation on constants, which is known in both networks."""
        if not any(tensor in self.pruned for tensor in call.tensors):
            return call.run()
        if call.is_in_place:
            raise NoBound("it changes a constant in place")
        result, other = call.run(), call.run(self._in_pruned)
        for ours, theirs in zip(pytree.tree_leaves(result), pytree.tree_leaves(other), strict=True):
            if isinstance(ours, Tensor):
                self.pruned[ours] = theirs
            elif ours != theirs:
                raise NoBound("it differs between the two networks")
        return result

    def _in_pruned(self, tensor: Tensor) -> Tensor:
        """A constant of the pruned network in the place of the dense one's; the value itself of a value."""
        other: Tensor = self.pruned.get(tensor, tensor)
        return other

    def _on_values(self, call: Call) -> Any:
        """The result of an operation on values; one that overwrites its first argument changes all views of it."""
        if call.name not in RULES:
            raise NoBound
        overwritten = self._overwritten(call) if call.is_in_place else []
        before = {id(tensor): tensor.clone() for tensor in overwritten[:1]}

        def known(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf in self.errors:
                return BoundedValue(before.get(id(leaf), leaf), self.errors[leaf])
            return self._in_pruned(leaf) if isinstance(leaf, Tensor) else leaf

        call.result = call.run()
        call.options = pytree.tree_map(known, call.options)
        call.on = lambda value: call.run(lambda one: value if one in self.errors else self._in_pruned(one))
        error_B = RULES[call.name](call)
        pairs = ((tensor, self._in_pruned(tensor)) for tensor in call.tensors)
        changed = any(other is not tensor and not torch.equal(tensor, other) for tensor, other in pairs)
        if changed:
            other = call.run(lambda tensor: before.get(id(tensor), self._in_pruned(tensor)))
            other = other[0] if isinstance(other, tuple | list) else other
            if other.shape != call.out.shape:
                raise NoBound("its result has another shape in the pruned network")
            error_B = error_B + norm_B(other - call.out, call.n_samples)
        is_finite_B = call.out.isfinite().reshape(call.n_samples, -1).all(dim=1)
        error_B = torch.where(is_finite_B, _nan_as_inf(error_B), math.inf)
        for i, piece in enumerate(call.pieces):
            # Indices and statistics that come with a value have no bound; all pieces of a movement have one.
            has_bound = i == 0 or (call.name in MOVEMENTS and not changed)
            self.errors[piece] = error_B if has_bound else torch.full_like(error_B, math.inf)
        for view in overwritten:
            self.errors[view] = error_B
        return call.result

    def _overwritten(self, call: Call) -> list[Tensor]:
        """The value that an operation overwrites, and all others in the same memory."""
        target = call.tensors[0]
        if "out" in call.given[1]:
            raise NoBound("it writes its result into another tensor")
        if call.name in MOVEMENTS or target not in self.errors:
            raise NoBound("it changes a shape or a constant in place")
        memory = target.untyped_storage().data_ptr()
        views = [one for one in self.errors if one is not target and one.untyped_storage().data_ptr() == memory]
        if any(view.numel() != target.numel() for view in views):
            raise NoBound("it overwrites a part of a value that may be used later")
        return [target, *views]


def norm_B(value: Tensor, n_samples: int) -> Tensor:
    """The Euclidean norm of each sample, rounded up; NaN comes back as infinity."""
    rows = value.reshape(n_samples, -1).to(torch.float64)
    if rows.shape[1] == 0:
        return rows.new_zeros(n_samples)
    return _nan_as_inf(outputs.row_norms(rows) * ROUND_UP)


def _nan_as_inf(error_B: Tensor) -> Tensor:
    """The errors with NaN (an overflow, or 0 times infinity) as infinity: an unknown error is never a small one."""
    return torch.where(torch.isnan(error_B), math.inf, error_B)
