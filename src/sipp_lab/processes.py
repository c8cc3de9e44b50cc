"""One network trained by several processes: the leader decides and owns the run folder, all share each batch.

All processes call every function here in the same order; a process alone has nothing to wait for. What the leader fails
at is raised in all; if another process fails or dies, torchrun ends the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sipp.errors import OptionError, SippError

T = TypeVar("T")

STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun and accelerate launch
# How long a process waits for the others: the leader may prune and certify a large network for hours. Torchrun and lost
# connections end the wait for one that died.
PATIENCE = timedelta(days=1)


def join_processes(*, cpu: bool) -> None:
    """Joins the processes that torchrun or accelerate launch started, if there are several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    missing = [name for name in STARTED if name not in os.environ]
    if missing:
        raise OptionError(f"WORLD_SIZE is set, but not {missing[0]}", fix="start it with torchrun, or unset WORLD_SIZE")
    if not cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo" if cpu else "cpu:gloo,cuda:nccl", timeout=PATIENCE)


def leave_processes() -> None:
    """Closes the connections to the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def n_processes() -> int:
    """How many processes work on this run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this process; 0 is the leader."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_leader(make: Callable[[], T]) -> T:
    """Calls `make` in the leader only; gives its result, or raises its error, in every process."""
    if n_processes() == 1:
        return make()
    box: list[Any] = [None, None]  # result, error
    if rank() == 0:
        try:
            box = [make(), None]
        except SippError as failed:
            box = [None, failed]
        except Exception as failed:  # it may not be picklable
            box = [None, RuntimeError(f"{type(failed).__name__}: {failed}")]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    result, error = box
    if error is not None:
        raise error
    found: T = result
    return found


def add_gradients(model: nn.Module) -> None:
    """Sums all gradients over all processes, in one reduction."""
    if n_processes() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def sum_over_processes(sums: Tensor) -> Tensor:
    """The sum over all processes."""
    total = sums.clone()
    if n_processes() > 1:
        dist.all_reduce(total)
    return total


def share_buffers(model: nn.Module) -> None:
    """Broadcasts the leader's buffers (BatchNorm statistics) to all processes."""
    if n_processes() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
