"""GraSP (Wang et al. 2020): keeps the weights whose removal would reduce the gradient norm most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sipp.errors import ModelError
from sipp.inputs import Batch
from sipp.results import numerics
from sipp.scoring.gradients import batch_loss, twice_differentiable, with_gradients
from sipp.scoring.ordinals import ordinals
from sipp.scoring.task import ScoringTask


def grasp(task: ScoringTask) -> dict[str, Tensor]:
    """The rank of w (H g) among all weights, the largest last: {parameter name: tensor of its shape}.

    g and H are the gradient and the Hessian of the loss, summed over all points, with respect to the prunable weights.
    To first order the removal of a weight changes ||g||^2 by -2 w (H g). The paper calls S = -w (H g) the score and
    removes the largest, which reduce the gradient flow; weights of negative S carry it. So the smallest S, that is the
    largest w (H g), are kept. These have both signs, so ranks are returned, which give the same cut.

    The batches must carry labels, and are all held in memory: g must be known before H g. The paper takes ten points a
    class, and divides the outputs by 200 before the loss, which `loss=` can do.
    """
    chosen = task.parameters()
    parameters = list(chosen.values())
    batches = list(task.batches())
    with with_gradients(task, parameters), twice_differentiable():
        gradient = _zeros(parameters)
        for batch in batches:
            _add(gradient, torch.autograd.grad(_loss(task, batch), parameters, allow_unused=True))
        curved = _zeros(parameters)  # H g
        for batch in batches:
            _add(curved, _hessian_times(_loss(task, batch), parameters, gradient))
    kept = [parameter.detach().to(numerics.BOUND_DTYPE) * along for parameter, along in zip(parameters, curved)]
    for name, layer in zip(chosen, kept):
        if not bool(torch.isfinite(layer).all()):
            raise ModelError("the second derivatives of the loss are NaN or infinite on this data", where=name)
    return dict(zip(chosen, ordinals(kept)))


def _loss(task: ScoringTask, batch: Batch) -> Tensor:
    return batch_loss(task, batch, "grasp")


def _hessian_times(
    value: Tensor, parameters: Sequence[nn.Parameter], along: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The derivative of (gradient of `value`) . along; None where a parameter has no part in it."""
    gradients = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    parts = [
        (g.to(numerics.BOUND_DTYPE) * a).sum() for g, a in zip(gradients, along) if g is not None and g.requires_grad
    ]
    if not parts:  # the loss is linear in every weight
        return [None] * len(parameters)
    return torch.autograd.grad(torch.stack(parts).sum(), parameters, allow_unused=True)


def _zeros(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(parameter, dtype=numerics.BOUND_DTYPE) for parameter in parameters]


def _add(totals: Sequence[Tensor], more: Sequence[Tensor | None]) -> None:
    for total, one in zip(totals, more):
        if one is not None:
            total += one.detach()
