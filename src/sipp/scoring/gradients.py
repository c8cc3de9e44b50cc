"""Gradients of the loss, for the scores that need them; the model is left unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sipp.errors import DataError
from sipp.inputs import Batch, check_can_be_written, cross_entropy, run_batch, scoring_mode
from sipp.results import Loss
from sipp.scoring.task import ScoringTask


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


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """A context without the fused attention kernels, which have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def batch_loss(task: ScoringTask, batch: Batch, method: str) -> Tensor:
    """The loss of a batch times its number of points; a DataError names the method that needs the labels."""
    if batch.labels is None:
        raise DataError(f"batch {batch.index} has no labels, which {method} needs", fix="give (inputs, labels)")
    copied = batch.copied()  # autograd rejects tensors made under inference_mode
    loss = task.loss or cross_entropy
    return _loss_of(loss, run_batch(task.model, copied), copied, method) * batch.n_points


def _loss_of(loss: Loss, output: Any, batch: Batch, method: str) -> Tensor:
    """The loss of a batch; DataError where output and labels do not go together."""
    try:
        return loss(output, batch.labels)
    except (IndexError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        what = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        labels = f"{batch.labels.dtype} {tuple(batch.labels.shape)}" if isinstance(batch.labels, Tensor) else "labels"
        raise DataError(
            f"{method}'s loss cannot be computed from the output ({what}) and the labels ({labels}): "
            f"{type(error).__name__}, {error}",
            where=batch.where,
            fix="give labels from 0 to classes - 1, or a loss of your own: loss=...",
        ) from error
