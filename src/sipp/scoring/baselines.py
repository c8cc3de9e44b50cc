"""Scores that others prune by: magnitude, SNIP, random."""

from __future__ import annotations

import torch
from torch import Tensor

from sipp.errors import ModelError
from sipp.results import numerics
from sipp.scoring.gradients import batch_loss, with_gradients
from sipp.scoring.task import ScoringTask


def magnitude(task: ScoringTask) -> dict[str, Tensor]:
    """The magnitude of every prunable weight, {parameter name: tensor of its shape}; data is not looked at."""
    return {name: parameter.detach().to(numerics.SCORE_DTYPE).abs() for name, parameter in task.parameters().items()}


def random(task: ScoringTask) -> dict[str, Tensor]:
    """A uniform random score for every prunable weight, {parameter name: tensor of its shape}."""
    generator = torch.Generator().manual_seed(task.seed)
    return {
        name: torch.rand(parameter.shape, generator=generator, dtype=numerics.SCORE_DTYPE, device="cpu").to(
            parameter.device
        )
        for name, parameter in task.parameters().items()
    }


def snip(task: ScoringTask) -> dict[str, Tensor]:
    """|w * dL/dw| of every prunable weight, L summed over all batches: {parameter name: tensor of its shape}.

    The batches must carry labels. Gradients, flags and buffers of the model are left as they were.
    """
    chosen = task.parameters()
    parameters = list(chosen.values())
    with with_gradients(task, parameters):
        totals = [torch.zeros_like(parameter, dtype=numerics.SCORE_DTYPE) for parameter in parameters]
        for batch in task.batches():
            value = batch_loss(task, batch, "snip")
            for total, gradient in zip(totals, torch.autograd.grad(value, parameters, allow_unused=True)):
                if gradient is not None:
                    total += gradient
    scores = {
        name: (parameter.detach().to(numerics.SCORE_DTYPE) * total).abs()
        for (name, parameter), total in zip(chosen.items(), totals)
    }
    for name, score in scores.items():
        if not bool(torch.isfinite(score).all()):
            raise ModelError("the gradients of the loss are NaN or infinite on this data", where=name)
    return scores
