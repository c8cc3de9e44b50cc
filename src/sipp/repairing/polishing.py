"""Brings the pruned network's outputs closer to the dense ones with Adam: no labels, fixed masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sipp.errors import DataError, ModelError
from sipp.inputs import Batch, merged_batches, outputs, run_batch, scoring_mode
from sipp.progress import progress_bar
from sipp.pruning import hold, release
from sipp.repairing.data_split import DataSplit
from sipp.results import Polish, numerics

N_CHECKS = 16  # on the validation points, evenly spread over the steps of a round
WARM_UP = 0.1  # share of the steps in which the rate rises: Adam's first steps are large, whatever the gradient
PATIENCE = 8  # checks without a gain after which it stops; a rate that is too large gains only once it falls
HALF_SCALE = 1024.0  # of losses in float16, whose gradients would vanish; Adam's steps do not depend on it
NEAR = 2.0  # an error below half of the output's norm lowers the rate in proportion: small errors need small steps
OVERFITTED = 0.75  # a round whose best step comes before this share of its steps has overfitted
N_SHUFFLED = 8  # batches that are shuffled together; limits how much is copied at a time
LEARNING_RATE = 2e-3
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class _Round:
    """The result of one round of steps: the best weights on the validation points, and after how many steps."""

    error: float | None
    best: int  # 0: the weights before the round
    taken: int
    rate: float
    weights: list[Tensor]


@dataclass(frozen=True)
class _Training:
    """The trained parameters and their master weights, which Adam moves: themselves, or float32 copies of 16-bit ones.

    Most of Adam's steps are too small for 16 bits, and its epsilon is 0 in float16.
    """

    parameters: list[nn.Parameter]
    masters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    scale: float  # of the loss

    @staticmethod
    def of(parameters: list[nn.Parameter], learning_rate: float) -> _Training:
        masters = [
            p if p.element_size() >= numerics.SCORE_DTYPE.itemsize else nn.Parameter(p.to(numerics.SCORE_DTYPE))
            for p in parameters
        ]
        is_half = any(p.dtype == torch.float16 for p in parameters)
        scale = HALF_SCALE if is_half else 1.0
        return _Training(parameters, masters, torch.optim.Adam(masters, lr=learning_rate), scale)

    def step(self, loss: Tensor) -> None:
        """One step down the gradient of the loss."""
        (self.scale * loss).backward()
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self.optimizer.step()
        self._set(self.masters)

    def values(self) -> list[Tensor]:
        """Copies of the current values."""
        return [master.detach().clone() for master in self.masters]

    def start_from(self, values: Sequence[Tensor]) -> None:
        """Sets these values and resets the optimizer."""
        self.optimizer.state.clear()
        self._set(values)

    def _set(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, master, value in zip(self.parameters, self.masters, values):
                for tensor in (master, parameter):
                    tensor.grad = None
                    if tensor is not value:
                        tensor.copy_(value)


def polish(
    dense: nn.Module,
    repaired: nn.Module,
    masks: Mapping[str, Tensor],
    split: DataSplit,
    *,
    steps: int,
    learning_rate: float = LEARNING_RATE,
    progress: bool,
    seed: int = 0,
) -> tuple[Polish, float | None]:
    """Trains `repaired` in place; returns what the steps did, and its output error on the validation points.

    Kept weights, the biases of their layers and the norms are trained, in eval mode. A round that stops gaining long
    before its end has overfitted. Then a second round starts over on mixtures of two points each, if these are real
    numbers: the dense network gives the targets there too, and there are many more mixtures than points. The round with
    the smaller error on the validation points is taken.
    """
    trained = _trained(repaired, masks)
    flags = [(parameter, parameter.requires_grad) for parameter in repaired.parameters()]
    if not outputs.dense_outputs(dense, split.fit[:1])(0):
        raise DataError("the model has no floating-point output to train on", fix="use steps=0")
    for parameter, _ in flags:
        parameter.requires_grad_(any(parameter is one for one in trained))
    hold(repaired, masks)  # before the optimizer is made: masked weights have no gradient, so Adam never moves them
    training = _Training.of(trained, learning_rate)
    before, rounds = training.values(), list[_Round]()

    def run_round(is_mixed: bool) -> None:
        training.start_from(before)
        batches = _training_batches(split.fit, seed, is_mixed=is_mixed)
        rounds.append(_round(dense, repaired, split.validation, training, batches, steps, learning_rate, progress))

    try:
        run_round(is_mixed=False)
        if rounds[0].best < OVERFITTED * steps and all(map(_can_be_mixed, split.fit)):
            with suppress(DataError, ModelError):  # a network may refuse a mixture of two inputs
                run_round(is_mixed=True)
        best = min(rounds, key=lambda one: math.inf if one.error is None else one.error)
        training.start_from(best.weights)
    finally:
        release(repaired)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    n_taken = sum(one.taken for one in rounds)
    return Polish(taken=n_taken, best=best.best, rate=best.rate, mixes=best is not rounds[0]), best.error


def _round(
    dense: nn.Module,
    model: nn.Module,
    validation: Sequence[Batch],
    training: _Training,
    batches: Iterator[Batch],
    steps: int,
    learning_rate: float,
    progress: bool,
) -> _Round:
    """At most `steps` steps from the current weights; leaves the model with the weights of the last step.

    The rate rises from zero for a tenth of the steps, and falls to zero along a cosine. It is smaller if the output is
    close to the dense one already.
    """
    (group,) = training.optimizer.param_groups
    wanted = outputs.dense_outputs(dense, validation)
    best, best_step, since = outputs.error_of(model, validation, wanted), 0, 0
    rate = learning_rate * (1.0 if best is None else min(1.0, NEAR * best))
    kept = training.values()
    taken = 0
    with progress_bar("polishing", steps, shown=progress) as advance:
        while taken < steps and since < PATIENCE:
            group["lr"] = rate * _share_of_rate((taken + 0.5) / steps)
            batch = next(batches)
            _step(model, training, batch, outputs.dense_outputs(dense, [batch])(0))
            taken += 1
            advance(1)
            if taken * N_CHECKS // steps > (taken - 1) * N_CHECKS // steps:
                found = outputs.error_of(model, validation, wanted)
                since += 1
                if found is not None and best is not None and found < best:
                    best, best_step, since = found, taken, 0
                    kept = training.values()
    return _Round(best, best_step, taken, rate, kept)


def _share_of_rate(done: float) -> float:
    """The share of the learning rate to use when this share of the steps is done."""
    return min(1.0, done / WARM_UP) * (1 + math.cos(math.pi * done)) / 2


def _trained(model: nn.Module, masks: Mapping[str, Tensor]) -> list[nn.Parameter]:
    """The parameters of the layers that hold a masked weight, and of the norms, each once."""
    owners = {name.rpartition(".")[0] for name in masks}
    found: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        if name in owners or isinstance(module, NORMS):
            found |= {id(p): p for p in module.parameters(recurse=False) if p.is_floating_point()}
    return list(found.values())


def _step(model: nn.Module, training: _Training, batch: Batch, wanted: list[Tensor]) -> None:
    """One step on one batch, in eval mode: no dropout, norms with their running statistics."""
    with ExitStack() as stack:
        stack.enter_context(scoring_mode(model, "running"))
        stack.enter_context(torch.enable_grad())
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))  # no gradients of RNNs in eval mode
        distance, size = outputs.squared_distance(run_batch(model, batch.copied()), wanted, batch)
        if float(size) == 0 or not bool(torch.isfinite(distance)):
            return
        training.step(distance / size)


def _training_batches(batches: Sequence[Batch], seed: int, *, is_mixed: bool) -> Iterator[Batch]:
    """The points in new batches, endlessly: points of a few batches of the same shape are shuffled.

    With `is_mixed`, each point is interpolated with another one by a random share.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    most = max(batch.n_points for batch in batches)

    def shuffled(n: int) -> Tensor:
        return torch.randperm(n, generator=generator, dtype=torch.int64, device="cpu")

    while True:
        for some in shuffled(len(batches)).split(N_SHUFFLED):
            for pool in merged_batches([batches[i] for i in some.tolist()], N_SHUFFLED * most):
                n_parts = -(-pool.n_points // most)
                if not is_mixed:
                    yield from (pool.at(at) for at in shuffled(pool.n_points).chunk(n_parts))
                    continue
                for at, others in zip(*(shuffled(pool.n_points).chunk(n_parts) for _ in range(2))):
                    shares = torch.rand(len(at), generator=generator, dtype=numerics.SCORE_DTYPE, device="cpu")
                    yield _between(pool.at(at), pool.at(others), shares)


def _can_be_mixed(batch: Batch) -> bool:
    """Whether all its inputs are tensors of finite real numbers, and none of them is a mask."""
    values = [*batch.args, *batch.kwargs.values()]
    are_real = all(isinstance(value, Tensor) and value.is_floating_point() for value in values)
    return (
        are_real and not any("mask" in name for name in batch.kwargs) and all(bool(v.isfinite().all()) for v in values)
    )


def _between(batch: Batch, others: Batch, shares: Tensor) -> Batch:
    """Interpolates each point of a batch with the point at its place in `others`, by its share."""

    def mixed(value: Tensor, other: Tensor) -> Tensor:
        return torch.lerp(value, other, shares.to(value).view(-1, *[1] * (value.ndim - 1)))

    kwargs = {name: mixed(value, others.kwargs[name]) for name, value in batch.kwargs.items()}
    return replace(batch, args=tuple(map(mixed, batch.args, others.args)), kwargs=kwargs)
