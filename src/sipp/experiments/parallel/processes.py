"""Several processes as one: the first leads (draws masks, holds the run folder), all share scoring and training.

Every function here is called by all processes of a team in the same order. An error in one of them is raised in all,
with the same message, so that none is left waiting; what a dead process leaves undone ends in torch's own error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, SippError
from sipp.extras import needed_for
from sipp.pruning.result import Ranking
from sipp.records import Scores

T = TypeVar("T")

PATIENCE = timedelta(seconds=45)  # how long a process waits for the others before it gives up


@dataclass(frozen=True)
class Team:
    """The place of this process; `group` carries what is agreed on (CPU tensors, plain values), None when alone."""

    index: int
    count: int
    group: Any = None

    @property
    def leads(self) -> bool:
        return self.index == 0


ALONE = Team(0, 1)


def join_team(*, cpu: bool) -> Team:
    """The team that a launcher (accelerate launch, torchrun) started this process in; ALONE if it is the only one."""
    with needed_for("training in several processes"):
        from accelerate import PartialState

    state = PartialState(cpu=cpu, timeout=PATIENCE)
    if state.num_processes == 1:
        return ALONE
    return Team(state.process_index, state.num_processes, dist.new_group(backend="gloo", timeout=PATIENCE))


def leave_team(team: Team) -> None:
    """Closes the connections of this process to the others."""
    if team.count > 1:
        dist.destroy_process_group()


def agreed(team: Team, make: Callable[[], T]) -> T:
    """What `make` returns here, once it has returned in all processes; its error in one is raised in all."""
    if team.count == 1:
        return make()
    result: T | None = None
    error: Exception | None = None
    place = f"process {team.index} of {team.count}"
    try:
        result = make()
    except SippError as raised:
        error = raised.inside(place)
    except Exception as raised:  # others may not survive the way to another process
        error = RuntimeError(f"{type(raised).__name__}: {place}: {raised}")
    _raise_first(team, error)
    return result  # type: ignore[return-value]


def from_leader(team: Team, make: Callable[[], T]) -> T:
    """What `make` returned to the leader, the only process that calls it."""
    if team.count == 1:
        return make()
    box = [agreed(team, make) if team.leads else agreed(team, lambda: None)]
    dist.broadcast_object_list(box, src=0, group=team.group)
    return box[0]  # type: ignore[return-value]


def _raise_first(team: Team, error: Exception | None) -> None:
    flag = torch.tensor([int(error is not None)])
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=team.group)
    if not int(flag):
        return
    errors: list[Exception | None] = [None] * team.count
    dist.all_gather_object(errors, error, group=team.group)
    raise next(one for one in errors if one is not None)


def largest_of(team: Team, values: Sequence[int]) -> list[int]:
    """The largest of each number over all processes."""
    if team.count == 1:
        return list(values)
    numbers = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group=team.group)
    return numbers.tolist()


def check_same(team: Team, tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Nothing, or an error in all processes where one holds other tensors than the leader."""
    if team.count == 1:
        return
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    found: list[str] = [""] * team.count
    dist.all_gather_object(found, digest.hexdigest(), group=team.group)
    others = [index for index, one in enumerate(found) if one != found[0]]
    if others:
        raise ModelError(f"{what} of process {others[0]} differ from those of process 0: use one version everywhere")


def rank_together(team: Team, rank_batches: Callable[[list[Any]], Ranking], batches: list[Any]) -> Ranking:
    """The ranking of all batches, bitwise that of one process: whole batches are shared out, maxima are exact.

    A process without a batch of its own scores the first one again, which changes no maximum and is not counted.
    Scores that are no maxima (the baselines) are computed by every process from all batches.
    """
    if team.count == 1:
        return rank_batches(batches)
    own = batches[team.index :: team.count]

    def rank_own() -> Ranking:
        try:
            return rank_batches(own or batches[:1])
        except DataError as error:  # it counts this process's batches
            what = f"{error.what} (batch k here is batch {team.index} + {team.count} k of all)"
            raise DataError(what, where=error.where, fix=error.fix) from error

    ranking = agreed(team, rank_own)
    if ranking.scores is None:
        return agreed(team, lambda: rank_batches(batches))
    # NaN has no place in a maximum (its result depends on the order), so its absence is agreed on first.
    agreed(team, lambda: _refuse_non_finite(ranking))
    ranks = []
    for rank_FK in ranking.ranks:
        total = rank_FK.clone()
        dist.all_reduce(total, dist.ReduceOp.MAX, group=team.group)
        ranks.append(total)
    return replace(ranking, ranks=tuple(ranks), scores=_all_scores(team, ranking.scores, ranks, counted=bool(own)))


def _refuse_non_finite(ranking: Ranking) -> None:
    for weight, rank_FK in zip(ranking.weights, ranking.ranks):
        if not bool(rank_FK.isfinite().all()):
            raise ModelError(f"{weight.name}: a sensitivity is NaN or infinite")


def _all_scores(team: Team, scores: Scores, ranks: list[Tensor], *, counted: bool) -> Scores:
    """The scores of all processes in one: maxima of what is a maximum, sums of what is counted."""
    gathered: list[Any] = [None] * team.count
    summary = [(layer.sign_complexity, layer.output_ratio, layer.quadrants_B) for layer in scores.layers]
    counts = (scores.n_points, scores.n_batches) if counted else (0, 0)
    mine = (summary, counts, scores.largest_batch, scores.keys, scores.dependence)
    dist.all_gather_object(gathered, mine, group=team.group)
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


def add_gradients(team: Team, model: nn.Module) -> None:
    """Nothing; every gradient is the sum over all processes, in one reduction."""
    if team.count == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


def add_up(team: Team, sums: Tensor) -> Tensor:
    """The sum over all processes."""
    total = sums.clone()
    if team.count > 1:
        dist.all_reduce(total)
    return total


def share_buffers(team: Team, model: nn.Module) -> None:
    """Nothing; buffers (statistics of BatchNorm, each process's own until now) are the leader's."""
    if team.count > 1:
        for buffer in model.buffers():
            if buffer.dtype is not torch.bool:  # masks: equal everywhere since they were drawn
                dist.broadcast(buffer, src=0)
