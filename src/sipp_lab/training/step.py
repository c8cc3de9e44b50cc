"""One training step: its loss, its learning rate, and how it runs (as written, compiled, recorded as a CUDA graph).

A small network on a large GPU spends its time launching kernels. A CUDA graph launches all kernels of a step at once;
`torch.compile` also reduces their number. The graph holds exactly the operations of the plain step, masks included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp_lab.recipes.schema import Distill, Precision, Training
from sipp_lab.training.feed import NO_LABEL

Forward = Callable[[Tensor], Tensor]
Compute = Callable[[Forward, Tensor, Tensor, int], None]  # one step: network, images, labels, batch size
Step = Callable[[Tensor, Tensor, float, int], None]  # images, labels, rate, batch size over all processes

WARM_UP_STEPS = 3  # before recording, to create optimizer state and let libraries choose kernels


def distilled_losses(logits: Tensor, labels: Tensor, teacher_logits: Tensor, distill: Distill) -> Tensor:
    """The loss of each item: (1 - w) CE(labels) + w T^2 KL(teacher || network), with temperature T.

    The factor T^2 compensates for the softening, which divides gradients by T^2 (Hinton et al. 2015). Items labelled
    `NO_LABEL` have loss 0.
    """
    hard_N = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none")
    t = distill.temperature
    soft_N = F.kl_div(
        F.log_softmax(logits / t, dim=1), F.log_softmax(teacher_logits / t, dim=1), reduction="none", log_target=True
    ).sum(1)
    soft_N = soft_N.masked_fill(labels == NO_LABEL, 0.0)
    return (1 - distill.weight) * hard_N + distill.weight * t**2 * soft_N


def logits_of(forward: Forward, images: Tensor, precision: Precision) -> Tensor:
    """The network's output in float32, as the loss needs it; the network runs in the given precision."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return forward(images).float()


def learning_rate(hyper: Training, epoch: float) -> float:
    """The learning rate after `epoch` epochs, a fractional number: 2.5 is the middle of the third epoch.

    It rises linearly from 0 during warm-up, and is multiplied by the decay factor at each milestone, or every so many
    epochs, counted from the start including warm-up. Retraining repeats the whole schedule (learning-rate rewinding),
    unless the recipe changes it (`retrain`).
    """
    rise = 1.0 if hyper.warmup_epochs == 0 else min(1.0, epoch / hyper.warmup_epochs)
    decay = hyper.decay
    n_decays = int(epoch // decay.every) if decay.every is not None else bisect_right(decay.milestones or (), epoch)
    return hyper.rate * rise * decay.factor**n_decays


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate; in place if it is a tensor that a graph reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@contextmanager
def training_stream(device: torch.device) -> Iterator[None]:
    """Runs the block on its own CUDA stream, so that a graph can be recorded, with cuDNN benchmarking on."""
    if device.type != "cuda":
        yield
        return
    stream, before = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(before)
    tries = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.backends.cudnn.benchmark = tries
        before.wait_stream(stream)


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute: Compute,
    *,
    batch_size: int,
    is_compiled: bool,
    is_recorded: bool,
) -> Step:
    """A function that makes one step; a short last batch always takes the plain step."""
    forward: Forward = torch.compile(model, dynamic=False) if is_compiled else model
    recorded: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None  # and the tensors from which it reads a batch
    n_warm = 0

    def step(images: Tensor, labels: Tensor, lr: float, n_items: int) -> None:
        nonlocal recorded, n_warm
        set_rate(optimizer, lr)
        if n_items < batch_size:
            compute(model, images, labels, n_items)
        elif not is_recorded or n_warm < WARM_UP_STEPS:
            n_warm += 1
            compute(forward, images, labels, n_items)
        else:
            if recorded is None:
                recorded = (torch.cuda.CUDAGraph(), images.clone(), labels.clone())
                with torch.cuda.graph(recorded[0], stream=torch.cuda.current_stream()):  # records without running
                    compute(forward, *recorded[1:], n_items)
            graph, read_images, read_labels = recorded
            read_images.copy_(images)
            read_labels.copy_(labels)
            graph.replay()

    return step
