"""Trains one network in several processes: the leader draws masks and owns the run folder, all share each batch.

All processes call every function here in the same order. An error in one is raised in all, so that none keeps waiting;
if a process dies, torch's own timeout error ends the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError, SippError
from sipp.files import sha256_of

T = TypeVar("T")

STARTED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun and accelerate launch
PATIENCE = timedelta(minutes=10)  # how long a process waits for the others before it gives up; pruning takes a while


@dataclass(frozen=True)
class Processes:
    """The rank of this process among those that work on one run; process 0 is the leader.

    `group` is the torch.distributed group for CPU tensors and plain values; None if there is only one process.
    """

    rank: int
    world_size: int
    group: Any = None

    @property
    def is_leader(self) -> bool:
        return self.rank == 0


ALONE = Processes(0, 1)


def join_processes(*, cpu: bool) -> Processes:
    """Joins the processes that torchrun or accelerate launch started; ALONE if this is the only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    missing = [name for name in STARTED if name not in os.environ]
    if missing:
        raise OptionError(f"WORLD_SIZE is set, but not {missing[0]}", fix="start it with torchrun, or unset WORLD_SIZE")
    if cpu:
        dist.init_process_group("gloo", timeout=PATIENCE)
        return Processes(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl", timeout=PATIENCE)
    return Processes(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=PATIENCE))


def leave_processes(processes: Processes) -> None:
    """Closes the connections to the other processes."""
    if processes.world_size > 1:
        dist.destroy_process_group()


def gather(processes: Processes, value: T) -> list[T]:
    """The values of all processes, in each of them; any that can be pickled."""
    values = [value] * processes.world_size
    if processes.world_size > 1:
        dist.all_gather_object(values, value, group=processes.group)
    return values


def in_every_process(processes: Processes, make: Callable[[], T]) -> T:
    """Calls `make` in every process and returns its result here; an error in one is raised in all."""
    if processes.world_size == 1:
        return make()
    result: T | None = None
    error: Exception | None = None
    place = f"process {processes.rank} of {processes.world_size}"
    try:
        result = make()
    except SippError as raised:
        error = raised.inside(place)
    except Exception as raised:  # other exceptions may not be picklable
        error = RuntimeError(f"{type(raised).__name__}: {place}: {raised}")
    if first := next((raised for raised in gather(processes, error) if raised is not None), None):
        raise first
    return result  # type: ignore[return-value]


def from_leader(processes: Processes, make: Callable[[], T]) -> T:
    """Calls `make` in the leader only, and returns its result in every process."""
    if processes.world_size == 1:
        return make()
    box = [in_every_process(processes, make) if processes.is_leader else in_every_process(processes, lambda: None)]
    dist.broadcast_object_list(box, src=0, group=processes.group)
    return box[0]  # type: ignore[return-value]


def check_same(processes: Processes, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Raises ModelError in all processes if the tensors of one differ from the leader's."""
    if processes.world_size == 1:
        return
    digests = gather(processes, _digest(tensors))
    others = [index for index, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ModelError(
            f"{what} of process {others[0]} differ from those of process 0", fix="use one version everywhere"
        )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    raw = (
        tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data for name in sorted(tensors)
    )
    return sha256_of(repr(sorted(tensors)).encode(), *raw)


def add_gradients(processes: Processes, model: nn.Module) -> None:
    """Sums all gradients over all processes, in one reduction."""
    if processes.world_size == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def sum_over_processes(processes: Processes, sums: Tensor) -> Tensor:
    """The sum over all processes."""
    total = sums.clone()
    if processes.world_size > 1:
        dist.all_reduce(total)
    return total


def share_buffers(processes: Processes, model: nn.Module) -> None:
    """Broadcasts the leader's buffers (BatchNorm statistics) to all processes."""
    if processes.world_size > 1:
        for buffer in model.buffers():
            if buffer.dtype is not torch.bool:  # masks are equal everywhere already
                dist.broadcast(buffer, src=0)
