"""Several processes as one: the first leads (draws masks, holds the run folder), all share scoring and training.

Every function here is called by all of the processes in the same order. An error in one of them is raised in all,
with the same message, so that none is left waiting; what a dead process leaves undone ends in torch's own error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, SippError
from sipp.extras import needed_for
from sipp.records.ranking import Ranking
from sipp.records.scores import Scores
from sipp.storage.files import sha256_of

T = TypeVar("T")

PATIENCE = timedelta(seconds=45)  # how long a process waits for the others before it gives up


@dataclass(frozen=True)
class Processes:
    """The processes that work on one run: which one this is, of how many.

    `group` carries what they agree on (CPU tensors, plain values); None when there is only one.
    """

    index: int
    count: int
    group: Any = None

    @property
    def leads(self) -> bool:
        return self.index == 0


ALONE = Processes(0, 1)


def join_processes(*, cpu: bool) -> Processes:
    """The processes that a launcher (accelerate launch, torchrun) started together; ALONE if this is the only one."""
    with needed_for("training in several processes"):
        from accelerate import PartialState

    state = PartialState(cpu=cpu, timeout=PATIENCE)
    if state.num_processes == 1:
        return ALONE
    return Processes(state.process_index, state.num_processes, dist.new_group(backend="gloo", timeout=PATIENCE))


def leave_processes(processes: Processes) -> None:
    """Closes the connections of this process to the others."""
    if processes.count > 1:
        dist.destroy_process_group()


def agreed(processes: Processes, make: Callable[[], T]) -> T:
    """What `make` returns here, once it has returned in all processes; its error in one is raised in all."""
    if processes.count == 1:
        return make()
    result: T | None = None
    error: Exception | None = None
    place = f"process {processes.index} of {processes.count}"
    try:
        result = make()
    except SippError as raised:
        error = raised.inside(place)
    except Exception as raised:  # others may not survive the way to another process
        error = RuntimeError(f"{type(raised).__name__}: {place}: {raised}")
    _raise_first(processes, error)
    return result  # type: ignore[return-value]


def from_leader(processes: Processes, make: Callable[[], T]) -> T:
    """What `make` returned to the leader, the only process that calls it."""
    if processes.count == 1:
        return make()
    box = [agreed(processes, make) if processes.leads else agreed(processes, lambda: None)]
    dist.broadcast_object_list(box, src=0, group=processes.group)
    return box[0]  # type: ignore[return-value]


def _raise_first(processes: Processes, error: Exception | None) -> None:
    flag = torch.tensor([int(error is not None)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=processes.group)
    if not int(flag):
        return
    errors: list[Exception | None] = [None] * processes.count
    dist.all_gather_object(errors, error, group=processes.group)
    raise next(one for one in errors if one is not None)


def largest_of(processes: Processes, values: Sequence[int]) -> list[int]:
    """The largest of each number over all processes."""
    if processes.count == 1:
        return list(values)
    numbers = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=processes.group)
    return numbers.tolist()


def check_same(processes: Processes, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Raises an error in all processes where one holds other tensors than the leader."""
    if processes.count == 1:
        return
    parts: list[bytes | memoryview] = []
    for name in sorted(tensors):
        parts.append(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        parts.append(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    found: list[str] = [""] * processes.count
    dist.all_gather_object(found, sha256_of(*parts), group=processes.group)
    others = [index for index, one in enumerate(found) if one != found[0]]
    if others:
        raise ModelError(
            f"{what} of process {others[0]} differ from those of process 0", fix="use one version everywhere"
        )


def rank_together(processes: Processes, rank_batches: Callable[[list[Any]], Ranking], batches: list[Any]) -> Ranking:
    """The ranking of all batches, bitwise that of one process: whole batches are shared out, maxima are exact.

    A process without a batch of its own scores the first one again, which changes no maximum and is not counted.
    Scores that are no maxima (the baselines) are computed by every process from all batches.
    """
    if processes.count == 1:
        return rank_batches(batches)
    own = batches[processes.index :: processes.count]

    def rank_own() -> Ranking:
        try:
            return rank_batches(own or batches[:1])
        except DataError as error:  # it counts this process's batches
            what = f"{error.what} (batch k here is batch {processes.index} + {processes.count} k of all)"
            raise DataError(what, where=error.where, fix=error.fix) from error

    ranking = agreed(processes, rank_own)
    if ranking.scores is None or ranking.blend is not None:  # no maxima alone: all batches, in every process
        return agreed(processes, lambda: rank_batches(batches))
    # NaN has no place in a maximum (its result depends on the order), so its absence is agreed on first.
    agreed(processes, lambda: _refuse_non_finite(ranking))
    ranks = []
    for rank_FK in ranking.ranks:
        total = rank_FK.clone()
        dist.all_reduce(total, dist.ReduceOp.MAX, group=processes.group)
        ranks.append(total)
    return replace(ranking, ranks=tuple(ranks), scores=_all_scores(processes, ranking.scores, ranks, counted=bool(own)))


def _refuse_non_finite(ranking: Ranking) -> None:
    for weight, rank_FK in zip(ranking.weights, ranking.ranks):
        if not bool(rank_FK.isfinite().all()):
            raise ModelError("a sensitivity is NaN or infinite", where=weight.name)


def _all_scores(processes: Processes, scores: Scores, ranks: list[Tensor], *, counted: bool) -> Scores:
    """The scores of all processes in one: maxima of what is a maximum, sums of what is counted."""
    gathered: list[Any] = [None] * processes.count
    summary = [(layer.sign_complexity, layer.output_ratio, layer.quadrants_B) for layer in scores.layers]
    counts = (scores.n_points, scores.n_batches) if counted else (0, 0)
    mine = (summary, counts, scores.largest_batch, scores.keys, scores.dependence)
    dist.all_gather_object(gathered, mine, group=processes.group)
    layers = []
    for i, (layer, sensitivity_FK) in enumerate(zip(scores.layers, ranks)):
        sign, ratio = (_largest([one[0][i][k] for one in gathered]) for k in (0, 1))
        # the points of a process that scored the first batch again are there twice, which changes no maximum
        parts = [one[0][i][2] for one in gathered]
        quadrants_B = None if any(part is None for part in parts) else torch.cat(parts)
        own = sensitivity_FK.to(layer.sensitivity_FK.device)
        layers.append(
            replace(layer, sensitivity_FK=own, sign_complexity=sign, output_ratio=ratio, quadrants_B=quadrants_B)
        )
    return replace(
        scores,
        layers=tuple(layers),
        n_points=sum(one[1][0] for one in gathered),
        n_batches=sum(one[1][1] for one in gathered),
        largest_batch=max(one[2] for one in gathered),
        keys=frozenset().union(*(one[3] for one in gathered)),
        dependence=next((one[4] for one in gathered if one[4]), ""),
    )


def _largest(values: list[float | None]) -> float | None:
    """The largest, None as soon as one process knows none; NaN stays, so that a bound gets weaker, never stronger."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return next((value for value in known if value != value), max(known))


def add_gradients(processes: Processes, model: nn.Module) -> None:
    """Puts the sum over all processes into every gradient, in one reduction."""
    if processes.count == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def add_up(processes: Processes, sums: Tensor) -> Tensor:
    """The sum over all processes."""
    total = sums.clone()
    if processes.count > 1:
        dist.all_reduce(total)
    return total


def share_buffers(processes: Processes, model: nn.Module) -> None:
    """Gives all processes the leader's buffers (statistics of BatchNorm, each process's own until now)."""
    if processes.count > 1:
        for buffer in model.buffers():
            if buffer.dtype is not torch.bool:  # masks: equal everywhere since they were drawn
                dist.broadcast(buffer, src=0)
