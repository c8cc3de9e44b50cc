"""One step of training: as it is written, or recorded once as a CUDA graph and replayed, optionally compiled.

A small network on a large GPU spends its time on starting kernels. A graph starts all of a step's kernels at once; the
compiler (`torch.compile`) also makes fewer of them. Recorded are the very operations of the plain step, masks included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.errors import OptionError
from sipp.experiments.parallel.processes import ALONE, Processes, add_gradients
from sipp.experiments.training.distill import Teacher, distilled_losses
from sipp.experiments.training.feed import NO_LABEL

StepKind = Literal["auto", "eager", "graph", "compiled"]
Precision = Literal["float32", "bfloat16"]
Step = Callable[[Tensor, Tensor, float, int], None]  # images, labels, rate, items of the batch in all processes

WARM_UP_STEPS = 3  # plain ones before recording: they make the optimizer's buffers and let libraries choose kernels


@dataclass(frozen=True)
class Trained:
    """What a step changes: the network, its optimizer, and the sums of the epoch (loss x items, right, items)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sums: Tensor
    teacher: Teacher | None = None  # whose outputs are learned too; no step changes it


@dataclass(frozen=True)
class Recorded:
    """A graph, and the memory that it reads a batch from."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    labels: Tensor


def resolve_step(kind: StepKind, device: torch.device, *, in_memory: bool, n_processes: int) -> StepKind:
    """The kind of step this run makes: "auto" is a graph on a GPU with all images in memory, else the plain step."""
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
    """A stretch on a stream of its own, where a graph can be recorded, with convolutions chosen by trying them out."""
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


def make_step(trained: Trained, kind: StepKind, *, batch_size: int, precision: Precision, processes: Processes) -> Step:
    """The function that makes one step; a short last batch is always a plain step on the network as it is."""
    forward: Callable[[Tensor], Tensor] = trained.model
    if kind == "compiled":
        forward = torch.compile(trained.model)
    if kind == "eager" or not (trained.sums.is_cuda and processes.count == 1):
        return lambda images, labels, lr, n_items: _plain(
            trained, forward, images, labels, lr, n_items, precision, processes
        )
    recorded: Recorded | None = None
    n_warm = 0

    def step(images: Tensor, labels: Tensor, lr: float, n_items: int) -> None:
        nonlocal recorded, n_warm
        if len(labels) < batch_size:
            _plain(trained, trained.model, images, labels, lr, n_items, precision, processes)
        elif n_warm < WARM_UP_STEPS:
            n_warm += 1
            _plain(trained, forward, images, labels, lr, n_items, precision, processes)
        else:
            if recorded is None:
                recorded = _record(trained, forward, images, labels, precision)
            set_rate(trained.optimizer, lr)
            recorded.images.copy_(images)
            recorded.labels.copy_(labels)
            recorded.graph.replay()

    return step


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate, in place where it is a tensor that a graph reads."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _plain(
    trained: Trained,
    forward: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    lr: float,
    n_items: int,
    precision: Precision,
    processes: Processes,
) -> None:
    """Makes one step on a batch of `n_items`, of which `images` are this process's share."""
    set_rate(trained.optimizer, lr)
    _compute(trained, forward, images, labels, n_items, precision, processes)


def _record(
    trained: Trained, forward: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, precision: Precision
) -> Recorded:
    """The step as a graph; recording runs nothing."""
    images, labels = images.clone(), labels.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        _compute(trained, forward, images, labels, len(labels), precision, ALONE)
    return Recorded(graph, images, labels)


def _compute(
    trained: Trained,
    forward: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    n_items: int,
    precision: Precision,
    processes: Processes,
) -> None:
    """Makes the step itself, at the rate that is set, without waiting for the device anywhere."""
    trained.optimizer.zero_grad(set_to_none=True)
    logits = logits_of(forward, images, precision)
    if trained.teacher is not None:
        with torch.no_grad():
            taught = logits_of(trained.teacher.model, images, precision)
        loss = distilled_losses(logits, labels, taught, trained.teacher).sum() / n_items
    elif processes.count == 1:
        loss = F.cross_entropy(logits, labels)
    else:
        loss = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum") / n_items
    loss.backward()
    add_gradients(processes, trained.model)
    trained.optimizer.step()
    with torch.no_grad():
        n_right = (logits.argmax(1) == labels).sum()
        n_own = (labels != NO_LABEL).sum()
        trained.sums.add_(torch.stack([loss.double() * n_items, n_right.double(), n_own.double()]))


def logits_of(forward: Callable[[Tensor], Tensor], images: Tensor, precision: Precision) -> Tensor:
    """The network's output in float32 (the loss is always computed so), the network itself in the given precision."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return forward(images).float()
