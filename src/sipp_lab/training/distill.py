"""Knowledge distillation: a loss that combines labels with the outputs of a teacher network."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from sipp_lab.training.feed import NO_LABEL


@dataclass(frozen=True)
class Teacher:
    """The teacher network, in eval mode, and the weight of its outputs."""

    model: nn.Module
    weight: float  # in (0, 1]; 1 ignores the labels
    temperature: float  # divides the logits of both networks


def distilled_losses(logits: Tensor, labels: Tensor, teacher_logits: Tensor, teacher: Teacher) -> Tensor:
    """The loss of each item: (1 - w) CE(labels) + w T^2 KL(teacher || network), with temperature T.

    The factor T^2 compensates for the softening, which divides gradients by T^2 (Hinton et al. 2015). Items labelled
    `NO_LABEL` have loss 0.
    """
    hard_N = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")
    t = teacher.temperature
    soft_N = F.kl_div(
        F.log_softmax(logits / t, dim=1), F.log_softmax(teacher_logits / t, dim=1), reduction="none", log_target=True
    ).sum(1)
    soft_N = soft_N.masked_fill(labels == NO_LABEL, 0.0)
    return (1 - teacher.weight) * hard_N + teacher.weight * t**2 * soft_N
