"""Scores that others prune by: magnitude (WT), SNIP, random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.errors import DataError, ModelError
from sipp.inputs.batches import fresh
from sipp.inputs.capture import run_batch, scoring_mode
from sipp.inputs.subject import Subject
from sipp.numerics import SCORE_DTYPE
from sipp.options import Loss
from sipp.records import Batch


def wt(subject: Subject) -> dict[str, Tensor]:
    """The magnitude of every prunable weight, {parameter name: tensor of its shape}; data is not looked at."""
    return {name: parameter.detach().to(SCORE_DTYPE).abs() for name, parameter in subject.parameters().items()}


def random(subject: Subject) -> dict[str, Tensor]:
    """A uniform random score for every prunable weight, {parameter name: tensor of its shape}."""
    generator = torch.Generator().manual_seed(subject.seed)
    return {
        name: torch.rand(parameter.shape, generator=generator, dtype=SCORE_DTYPE, device="cpu").to(parameter.device)
        for name, parameter in subject.parameters().items()
    }


def snip(subject: Subject) -> dict[str, Tensor]:
    """|w * dL/dw| of every prunable weight, L summed over all batches: {parameter name: tensor of its shape}.

    The batches must carry labels. Gradients, flags and buffers of the model are left as they were.
    """
    model, chosen = subject.model, subject.parameters()
    parameters = list(chosen.values())
    frozen = next((name for name, parameter in model.named_parameters() if parameter.is_inference()), None)
    if frozen is not None:
        raise ModelError(
            f"{frozen} was made under torch.inference_mode and has no gradients", fix="give copy.deepcopy(model)"
        )
    loss, norm_stats = subject.scoring.loss or F.cross_entropy, subject.scoring.norm_stats
    with torch.inference_mode(False), scoring_mode(model, norm_stats), _with_gradients(parameters):
        totals = [torch.zeros_like(parameter, dtype=SCORE_DTYPE) for parameter in parameters]
        for batch in subject.batches():
            if batch.labels is None:
                raise DataError(f"batch {batch.index} has no labels, which snip needs", fix="give (inputs, labels)")
            copied = fresh(batch)  # of what was made under inference_mode, too
            value = _loss_of(loss, run_batch(model, copied), copied) * batch.n_points
            for total, gradient in zip(totals, torch.autograd.grad(value, parameters, allow_unused=True)):
                if gradient is not None:
                    total += gradient
    scores = {
        name: (parameter.detach().to(SCORE_DTYPE) * total).abs()
        for (name, parameter), total in zip(chosen.items(), totals)
    }
    for name, score in scores.items():
        if not bool(torch.isfinite(score).all()):
            raise ModelError("the gradients of the loss are NaN or infinite on this data", where=name)
    return scores


@contextmanager
def _with_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    """A context in which these parameters have gradients, also recurrent ones in eval mode."""
    required = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        for parameter, was_required in zip(parameters, required):
            parameter.requires_grad_(was_required)


def _loss_of(loss: Loss, output: Any, batch: Batch) -> Tensor:
    """The loss of a batch; DataError where output and labels do not go together."""
    try:
        return loss(output, batch.labels)
    except (IndexError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        what = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        labels = f"{batch.labels.dtype} {tuple(batch.labels.shape)}" if isinstance(batch.labels, Tensor) else "labels"
        raise DataError(
            f"snip's loss cannot be taken of the output ({what}) and the labels ({labels}): "
            f"{type(error).__name__}, {error}",
            where=batch.where,
            fix="give labels from 0 to classes - 1, or a loss= that takes both",
        ) from error
