"""Bounds, for each sample, the distance of a pruned network's output from the dense one's (T13).

The dense network is run in float64, operation by operation. Every value carries a bound on the distance of the pruned
network's value; only at the end is it divided by ||f(x)||. The bound needs no assumption, but it is a product of
operator norms, which grows with depth and becomes useless for deep networks. For these, use a certificate (T14).

The pruned network runs on the same samples too: if its output were ever further off than the bound, something in the
model does not show among its operations, and there is no bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from sipp.bounds.operations import (
    VALUELESS,
    NoBound,
    Operation,
    device_in,
    float64_copy,
    hidden_in,
    in_precision,
    one_tensor,
    run_watched,
)
from sipp.bounds.same_architecture import check_same_architecture
from sipp.bounds.sound.error_growth import MOVEMENTS, Call, Constant, Value, effect, norm_B
from sipp.bounds.sound.operator_norms import ROUND_UP
from sipp.errors import DataError, ModelError
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.data import as_batch, refuse_non_finite
from sipp.results.batches import Batch
from sipp.results.pruned_to import NetworkLike, network_of

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
MEASURED = 1e-13  # of the output: the error of a distance that is measured in float64


@dataclass(frozen=True)
class NodeBound:
    """One operation: its factor on the error, the error it added, and the error after it (worst of the batch)."""

    op: str
    module: str
    gain: float
    injected: float
    error: float


@dataclass(frozen=True)
class GraphBound:
    """The bound for every sample of a batch, or the reason why there is none.

    `epsilon_B` bounds ||f^(x) - f(x)|| / ||f(x)|| (infinite if f(x) = 0 and the networks may differ), `absolute_B`
    bounds ||f^(x) - f(x)||; both are None if `reason` is not empty. `nodes` are the operations in order.
    """

    epsilon_B: Tensor | None
    absolute_B: Tensor | None
    reason: str
    nodes: tuple[NodeBound, ...]

    @property
    def epsilon(self) -> float | None:
        """The largest relative error bound of the batch, or None without a bound."""
        return None if self.epsilon_B is None else float(self.epsilon_B.max())


@torch.inference_mode(False)
def sound_bound(dense: nn.Module, pruned: NetworkLike, inputs: Inputs) -> GraphBound:
    """Bounds ||f^(x) - f(x)|| for each sample of `inputs`, or returns the reason why there is no bound.

    `pruned` is the same architecture with other weights, or what `prune` returned; `inputs` is a batch (a tensor, or
    the model's positional arguments, or its keyword arguments), with samples along the first axis. Both networks are
    copied to eval mode and float64; the originals are left as they were. The bound assumes exact arithmetic: it leaves
    out the rounding errors of networks that run in float32 or less (the network bound of `prune` and `assess` includes
    them).

    Example:
        >>> import sipp, torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        >>> pruned = sipp.prune(net, None, keep=0.9, method="magnitude")
        >>> x = torch.rand(3, 8)
        >>> bound = sipp.sound_bound(net, pruned, x)
        >>> error = (pruned.model(x) - net(x)).norm(dim=1).double()
        >>> bool((error <= bound.absolute_B).all())
        True
    """
    dense, given = network_of(dense), network_of(pruned)
    batch = as_batch((inputs, None), 0, "inputs")
    refuse_non_finite(batch)
    if batch.n_points == 0:
        raise DataError("there are no inputs", where=batch.where)
    return bound_of_batch(dense, given, batch)


@torch.no_grad()
def bound_of_batch(dense: nn.Module, pruned: nn.Module, batch: Batch) -> GraphBound:
    """`sound_bound` of a batch that was checked."""
    for side, model in (("dense", dense), ("pruned", pruned)):
        for name, parameter in model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise ModelError(
                    f"parameter {name} of the {side} model holds NaN or infinity", fix="repair or reload it"
                )
    check_same_architecture(dense, pruned, batch, "running")
    follower = _Follower(batch.n_points)
    try:
        if hidden := hidden_in(dense):
            raise NoBound(hidden)
        values, error_B, moved = _run_both(dense, pruned, batch, follower)
    except NoBound as reason:
        return GraphBound(None, None, f"no bound: {reason}", tuple(follower.nodes))
    absolute_B = error_B * ROUND_UP
    # norm_B rounds up; divided twice by its slack it rounds down, so that the ratio is not too small.
    norms_B = norm_B(values, batch.n_points) / ROUND_UP**2
    if bool((norm_B(moved, batch.n_points) > absolute_B * ROUND_UP + MEASURED * norms_B).any()):
        unseen = "no bound: the output moves further than what the operations show"
        return GraphBound(None, None, unseen, tuple(follower.nodes))
    epsilon_B = torch.where(absolute_B == 0, torch.zeros_like(absolute_B), absolute_B / norms_B)
    epsilon_B = torch.where(torch.isfinite(norms_B), epsilon_B, torch.full_like(epsilon_B, math.inf))
    return GraphBound(epsilon_B, absolute_B, "", tuple(follower.nodes))


def _run_both(dense: nn.Module, pruned: nn.Module, batch: Batch, follower: _Follower) -> tuple[Tensor, Tensor, Tensor]:
    """The dense output, its error bound, and how far the pruned network's output really is from it."""
    first, second = float64_copy(dense), float64_copy(pruned)
    theirs = dict([*second.named_parameters(remove_duplicate=False), *second.named_buffers(remove_duplicate=False)])
    ours = dict([*first.named_parameters(remove_duplicate=False), *first.named_buffers(remove_duplicate=False)])
    for name, tensor in ours.items():
        if tensor is not None and theirs.get(name) is not None:
            follower.pruned[tensor] = theirs[name]
    ready = in_precision(batch, device_in(first), torch.float64)
    none_B = torch.zeros(batch.n_points, dtype=torch.float64, device=device_in(first))
    for leaf in tree_leaves((ready.args, ready.kwargs)):
        if isinstance(leaf, Tensor):
            follower.errors[leaf] = none_B
    output = run_watched(first, ready, follower)
    if output not in follower.errors or output.dim() == 0 or output.shape[0] != batch.n_points:
        raise NoBound("the model does not return one tensor with a row per sample that depends on the input")
    with scoring_mode(second, "running"):
        other = one_tensor(run_batch(second, in_precision(batch, device_in(second), torch.float64)))
    return output, follower.errors[output], other.to(output) - output


class _Follower:
    """Follows the errors of values through the operations of a network."""

    def __init__(self, n_samples: int) -> None:
        self.n_samples = n_samples
        self.errors = WeakTensorKeyDictionary()  # of the values that depend on the input, sample by sample
        self.pruned = WeakTensorKeyDictionary()  # for each constant, the same in the pruned network
        self.nodes: list[NodeBound] = []

    def __call__(self, operation: Operation) -> Any:
        """The result of an operation in the dense network; its error is then known."""
        if not any(tensor in self.errors for tensor in operation.tensors):
            return self._run_on_constants(operation)
        if operation.name in VALUELESS:
            return operation.run()
        if operation.is_in_place:
            return self._run_in_place(operation)
        result = operation.run()
        error_B = self._error(operation, result)
        for i, piece in enumerate(result if isinstance(result, tuple | list) else [result]):
            # Indices and statistics that come with a value have no bound; all pieces of a movement have one.
            has_bound = i == 0 or operation.name in MOVEMENTS
            self.errors[piece] = error_B if has_bound else torch.full_like(error_B, math.inf)
        return result

    def _run_on_constants(self, operation: Operation) -> Any:
        """The result of an operation on constants, which is known in both networks."""
        if not any(tensor in self.pruned for tensor in operation.tensors):
            return operation.run()
        if operation.is_in_place:
            raise NoBound("it changes a constant in place")
        result, other = operation.run(), operation.run(lambda tensor: self.pruned.get(tensor, tensor))
        for ours, theirs in zip(tree_leaves(result), tree_leaves(other), strict=True):
            if isinstance(ours, Tensor):
                self.pruned[ours] = theirs
            elif ours != theirs:
                raise NoBound("it differs between the two networks")
        return result

    def _run_in_place(self, operation: Operation) -> Any:
        """The result of an operation that overwrites its first argument, and with it all views of the same values."""
        target = operation.args[0] if operation.args else None
        if "out" in operation.kwargs:
            raise NoBound("it writes its result into another tensor")
        if operation.name in MOVEMENTS or not isinstance(target, Tensor) or target not in self.errors:
            raise NoBound("it changes a shape or a constant in place")
        memory = target.untyped_storage().data_ptr()
        views = [tensor for tensor in self.errors if tensor.untyped_storage().data_ptr() == memory]
        if any(view.numel() != target.numel() for view in views):
            raise NoBound("it overwrites a part of a value that may be used later")
        before = target.clone()
        result = operation.run()
        error_B = self._error(operation, result, before)
        for view in views:
            self.errors[view] = error_B
        return result

    def _error(self, operation: Operation, result: Any, before: Tensor | None = None) -> Tensor:
        """The error after an operation, also added to `nodes`; `before` is the value that it overwrote, if any."""

        def known(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf not in self.errors:
                return Constant(leaf, self.pruned.get(leaf, leaf))
            return Value(before if before is not None and leaf is operation.args[0] else leaf, self.errors[leaf])

        def rerun(other: Tensor) -> Any:
            return operation.run(lambda tensor: other if tensor in self.errors else tensor)

        call = Call(operation.name, tree_map(known, operation.options), result, rerun, self.n_samples)
        done = effect(call)
        worst = (float(done.injected_B.max()), float(done.error_B.max()))
        self.nodes.append(NodeBound(operation.name, operation.module, done.gain, *worst))
        finite_B = torch.isfinite(call.out).reshape(self.n_samples, -1).all(dim=1)
        return torch.where(finite_B, done.error_B, torch.full_like(done.error_B, math.inf))
