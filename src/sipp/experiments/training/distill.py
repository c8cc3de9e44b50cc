"""Distillation: the loss of a network that learns from labels and from another network's outputs at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from sipp.experiments.training.feed import NO_LABEL


@dataclass(frozen=True)
class Teacher:
    """The network whose outputs are learned, in eval mode, and how much they count."""

    model: nn.Module
    weight: float  # in (0, 1]: 1 takes no notice of the labels
    temperature: float  # both networks' outputs are divided by it


def distilled_losses(logits: Tensor, labels: Tensor, taught: Tensor, teacher: Teacher) -> Tensor:
    """Of every item (1 - w) CE(labels) + w T^2 KL(teacher || network), both softened by T.

    T^2 keeps the size of the second gradient, which softening divides by T^2 (Hinton et al. 2015). Items that are
    labelled `NO_LABEL` count for neither.
    """
    hard_N = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")
    t = teacher.temperature
    soft_N = F.kl_div(
        F.log_softmax(logits / t, dim=1), F.log_softmax(taught / t, dim=1), reduction="none", log_target=True
    ).sum(1)
    soft_N = soft_N.masked_fill(labels == NO_LABEL, 0.0)
    return (1 - teacher.weight) * hard_N + teacher.weight * t**2 * soft_N
