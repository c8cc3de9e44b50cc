"""A training step: plain, recorded as a CUDA graph, or compiled; and the learning-rate schedule.

A small network on a large GPU spends its time launching kernels. A CUDA graph launches all kernels of a step at once;
`torch.compile` also reduces their number. The graph holds exactly the operations of the plain step, masks included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sipp.errors import OptionError
from sipp_lab.recipes.schema import Precision, StepKind, Training

Forward = Callable[[Tensor], Tensor]
Compute = Callable[[Forward, Tensor, Tensor, int], None]  # one step: network, images, labels, batch size
Step = Callable[[Tensor, Tensor, float, int], None]  # images, labels, rate, batch size over all processes

WARM_UP_STEPS = 3  # before recording, to create optimizer state and let libraries choose kernels


def resolve_step(kind: StepKind, device: torch.device, *, in_memory: bool, n_processes: int) -> StepKind:
    """Resolves "auto": a CUDA graph on a GPU with all images in memory, otherwise the plain step."""
    recordable = device.type == "cuda" and in_memory and n_processes == 1
    if kind == "auto":
        return "graph" if recordable else "eager"
    if kind == "graph" and not recordable:
        raise OptionError(
            f"train.step=graph needs one process, a GPU and images in memory; here: {n_processes} "
            f"processes, {device.type}, images {'in memory' if in_memory else 'in files'}",
            fix="use train.step=auto",
        )
    return kind


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
    kind: StepKind,
    batch_size: int,
    is_recorded: bool,
) -> Step:
    """A function that makes one step; a short last batch always takes the plain step."""
    forward: Forward = torch.compile(model, dynamic=False) if kind == "compiled" else model
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


def logits_of(forward: Forward, images: Tensor, precision: Precision) -> Tensor:
    """The network's output in float32, as the loss needs it; the network runs in the given precision."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return forward(images).float()
