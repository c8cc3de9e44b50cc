"""SynFlow (Tanaka et al. 2020): how much of a flow of absolute values passes a weight, the least removed first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sipp.errors import DataError, ModelError
from sipp.inputs import Batch, copy_of, run_batch, tensors_in
from sipp.results import numerics
from sipp.scoring.gradients import with_gradients
from sipp.scoring.ordinals import ordinals
from sipp.scoring.task import ScoringTask

STEPS = 100


def synflow(task: ScoringTask) -> dict[str, Tensor]:
    """The step in which a weight is removed, plus its rank within that step: {parameter name: tensor of its shape}.

    A float64 copy of the model with the absolute values of all parameters is run on ones. R is the sum of its outputs,
    and the flow through a weight is |w dR/dw|. As in the paper, the weights of least flow are removed in 100 steps,
    each keeping the same share, and the flow is computed again after each.
    Unlike the paper, whose steps end at the budget, these end at a single weight: one ranking serves every budget.

    The data is used only for the shape of one point: floating-point inputs become ones, tokens and masks stay. Norms
    use their running statistics, whatever `norm_stats` says, because one point of ones has none of its own.
    """
    positive = replace(task, model=copy_of(task.model).to(numerics.BOUND_DTYPE), norm_stats="running")
    with torch.no_grad():
        for parameter in positive.model.parameters():
            parameter.abs_()
    chosen = positive.parameters()
    parameters = list(chosen.values())
    with with_gradients(positive, parameters):
        score = _removed_in_steps(positive.model, parameters, _ones(task))
    parts = score.split([parameter.numel() for parameter in parameters])
    return {name: part.view(parameter.shape) for (name, parameter), part in zip(chosen.items(), parts)}


def _removed_in_steps(model: nn.Module, parameters: Sequence[nn.Parameter], batch: Batch) -> Tensor:
    """The step in which each weight is removed, plus its rank within that step; all weights concatenated."""
    magnitude = torch.cat([parameter.detach().flatten() for parameter in parameters])
    score = torch.full_like(magnitude, STEPS)  # the last one stays
    left = numerics.integers(0, len(magnitude)).to(magnitude.device)
    for step in range(STEPS):
        flow = _flow(model, parameters, batch)
        if step == 0 and not bool((flow > 0).any()):
            raise ModelError(
                "no weight changes the sum of the outputs, so synflow cannot rank the weights",
                fix="give the network without its softmax or normalising last layer, or use another method",
            )
        n_kept = round(len(magnitude) ** (1 - (step + 1) / STEPS))
        order = torch.argsort(flow[left], descending=True, stable=True)
        gone = left[order[n_kept:]]
        score[gone] = step + ordinals([flow[gone]])[0] / max(1, len(gone))
        left = left[order[:n_kept]]
        magnitude[gone] = 0.0
        with torch.no_grad():
            for parameter, part in zip(parameters, magnitude.split([p.numel() for p in parameters])):
                parameter.copy_(part.view(parameter.shape))
    return score


def _flow(model: nn.Module, parameters: Sequence[nn.Parameter], batch: Batch) -> Tensor:
    """|w dR/dw| of all weights, concatenated; R is the sum of the outputs."""
    total = sum(value.sum() for value in tensors_in(run_batch(model, batch.copied())))
    if not isinstance(total, Tensor) or not total.requires_grad:
        return torch.cat([torch.zeros_like(parameter).flatten() for parameter in parameters])
    gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    flow = torch.cat([(p.detach() * g).abs().flatten() for p, g in zip(parameters, gradients)])
    if not bool(torch.isfinite(flow).all()):
        raise ModelError("the flow of absolute values overflows float64", fix="use another method")
    return flow


def _ones(task: ScoringTask) -> Batch:
    """One point of the data, its floating-point numbers replaced by ones."""
    batch = next(iter(task.batches()), None)
    if batch is None:
        raise DataError("the data is empty, but synflow needs the shape of one input", fix="give at least one")
    point = batch.at(slice(0, 1))

    def one(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return value._replace(data=one(value.data))
        if isinstance(value, Tensor) and value.is_floating_point():
            return torch.ones_like(value, dtype=numerics.BOUND_DTYPE)
        return value

    return replace(
        point,
        args=tuple(one(value) for value in point.args),
        kwargs={name: one(value) for name, value in point.kwargs.items()},
    )
