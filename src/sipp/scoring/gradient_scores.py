"""Scores that see gradients (SNIP, GraSP, SynFlow), and how gradients are taken with the model left unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence

from sipp.errors import DataError, ModelError
from sipp.inputs import Batch, check_can_be_written, copy_of, labels, outputs, run_batch, scoring_mode
from sipp.results import Loss, numerics
from sipp.scoring.task import ScoringTask

STEPS = 100  # of SynFlow


@contextmanager
def with_gradients(task: ScoringTask, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A context in eval mode in which these parameters get gradients, recurrent layers too; see `scoring_mode`."""
    check_can_be_written(task.model)
    with scoring_mode(task.model, task.norm_stats):
        required = [parameter.requires_grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.requires_grad_(True)
            with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
                yield
        finally:
            for parameter, was_required in zip(parameters, required):
                parameter.requires_grad_(was_required)


def batch_loss(task: ScoringTask, batch: Batch, method: str) -> Tensor:
    """The loss of a batch times its number of points; a DataError names the method that needs the labels."""
    if batch.labels is None:
        raise DataError(f"batch {batch.index} has no labels, which {method} needs", fix="give (inputs, labels)")
    copied = batch.copied()  # autograd rejects tensors made under inference_mode
    loss = task.loss or labels.cross_entropy
    return _loss_of(loss, run_batch(task.model, copied), copied, method) * batch.n_points


def _loss_of(loss: Loss, output: Any, batch: Batch, method: str) -> Tensor:
    """The loss of a batch; DataError where output and labels do not go together."""
    try:
        return loss(output, batch.labels)
    except (IndexError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        what = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        given = f"{batch.labels.dtype} {tuple(batch.labels.shape)}" if isinstance(batch.labels, Tensor) else "labels"
        raise DataError(
            f"{method}'s loss cannot be computed from the output ({what}) and the labels ({given}): "
            f"{type(error).__name__}, {error}",
            where=batch.where,
            fix="give labels from 0 to classes - 1, or a loss of your own: loss=...",
        ) from error


def snip(task: ScoringTask) -> dict[str, Tensor]:
    """|w * dL/dw| of every prunable weight, L summed over all batches: {parameter name: tensor of its shape}.

    The batches must carry labels. Gradients, flags and buffers of the model are left as they were.
    """
    chosen = task.parameters()
    parameters = list(chosen.values())
    with with_gradients(task, parameters):
        gradient = _summed_gradient(task, task.batches(), parameters, numerics.SCORE_DTYPE, "snip")
    scores = [(parameter.detach().to(numerics.SCORE_DTYPE) * g).abs() for parameter, g in zip(parameters, gradient)]
    return _finite(dict(zip(chosen, scores)), "the gradients of the loss")


def grasp(task: ScoringTask) -> dict[str, Tensor]:
    """The rank of w (H g) among all weights, the largest last: {parameter name: tensor of its shape}.

    Wang et al. 2020: g and H are the gradient and the Hessian of the loss, summed over all points, with respect to the
    prunable weights.
    To first order the removal of a weight changes ||g||^2 by -2 w (H g). The paper calls S = -w (H g) the score and
    removes the largest, which reduce the gradient flow; weights of negative S carry it. So the smallest S, that is the
    largest w (H g), are kept. These have both signs, so ranks are returned, which give the same cut.

    The batches must carry labels, and are all held in memory: g must be known before H g. The paper takes ten points a
    class, and divides the outputs by 200 before the loss, which `loss=` can do.
    """
    chosen = task.parameters()
    parameters, batches = list(chosen.values()), list(task.batches())
    # fused attention has no second derivative
    with with_gradients(task, parameters), sdpa_kernel(SDPBackend.MATH):
        gradient = _summed_gradient(task, batches, parameters, numerics.BOUND_DTYPE, "grasp")
        curved = [torch.zeros_like(along) for along in gradient]  # H g
        for batch in batches:
            _add(curved, _hessian_times(batch_loss(task, batch, "grasp"), parameters, gradient))
    kept = [parameter.detach().to(numerics.BOUND_DTYPE) * along for parameter, along in zip(parameters, curved)]
    _finite(dict(zip(chosen, kept)), "the second derivatives of the loss")
    return dict(zip(chosen, ordinals(kept)))


def _summed_gradient(
    task: ScoringTask, batches: Iterable[Batch], parameters: Sequence[nn.Parameter], dtype: torch.dtype, method: str
) -> list[Tensor]:
    """The gradient of the loss of all batches with respect to each parameter."""
    totals = [torch.zeros_like(parameter, dtype=dtype) for parameter in parameters]
    for batch in batches:
        _add(totals, torch.autograd.grad(batch_loss(task, batch, method), parameters, allow_unused=True))
    return totals


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


def _add(totals: Sequence[Tensor], more: Sequence[Tensor | None]) -> None:
    for total, one in zip(totals, more):
        if one is not None:
            total += one.detach()


def _finite(scores: dict[str, Tensor], what: str) -> dict[str, Tensor]:
    """The scores; raises an error if any is not finite."""
    for name, score in scores.items():
        if not bool(torch.isfinite(score).all()):
            raise ModelError(f"{what} are NaN or infinite on this data", where=name)
    return scores


def synflow(task: ScoringTask) -> dict[str, Tensor]:
    """The step in which a weight is removed, plus its rank within that step: {parameter name: tensor of its shape}.

    Tanaka et al. 2020: how much of a flow of absolute values passes a weight, the least removed first.
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
    total = sum(value.sum() for value in outputs.tensors_in(run_batch(model, batch.copied())))
    if not isinstance(total, Tensor) or not total.requires_grad:
        return torch.cat([torch.zeros_like(parameter).flatten() for parameter in parameters])
    gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    flow = torch.cat([(p.detach() * g).abs().flatten() for p, g in zip(parameters, gradients)])
    if not bool(torch.isfinite(flow).all()):
        raise ModelError(
            "synflow overflows float64 on this network", fix="use a method that reads data, such as sipp-det"
        )
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


def ordinals(layers: Sequence[Tensor]) -> list[Tensor]:
    """The dense rank of each value among all layers: 0, 1, 2, ...; equal values have equal ranks.

    Exact, whereas a shift by the smallest value would round away differences between small ones.
    """
    if not layers:
        return []
    _, place = torch.unique(torch.cat([layer.flatten() for layer in layers]), return_inverse=True)
    parts = place.to(numerics.BOUND_DTYPE).split([layer.numel() for layer in layers])
    return [part.view(layer.shape) for part, layer in zip(parts, layers)]
