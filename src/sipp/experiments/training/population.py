"""Many networks of one architecture trained as one program: the same steps as each alone, but for rounding.

A small network leaves most of a GPU idle: its kernels are over before they are all started. P networks side by side
(`stacking.py`) make the same number of kernels, each P times larger. What the networks do not share (weights, masks,
order of batches, augmentation) is kept apart; what they share is the architecture and the hyperparameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.errors import ModelError, OptionError
from sipp.experiments.data import ImageSet
from sipp.experiments.parallel.processes import Processes
from sipp.experiments.training.distill import Teacher, distilled_losses
from sipp.experiments.training.feed import Feed, n_steps, plain_batches, train_batches
from sipp.experiments.training.loop import TOP_K, Hyper, MaskChanges, TrainState, make_optimizer, set_masks
from sipp.experiments.training.schedule import rate
from sipp.experiments.training.stacking import WELL_GROUPED, stack
from sipp.experiments.training.step import (
    WARM_UP_STEPS,
    Precision,
    Recorded,
    Trained,
    logits_of,
    resolve_step,
    set_rate,
)
from sipp.records.schemas import Accuracy, EpochRow


@dataclass(frozen=True)
class Member:
    """One network of a group: its state, the seed of its batches, and how its masks change, if they do."""

    state: TrainState
    seed: int
    changes: MaskChanges | None = None


@dataclass(frozen=True)
class Program:
    """What trains so many networks at once: memory that their numbers are copied into, and the step on it.

    One program serves any number of groups, one after the other, so a step is compiled and recorded once.
    """

    stacked: nn.Module
    optimizer: torch.optim.Optimizer
    masks: dict[str, Tensor]  # of all weights that may be held, as numbers: what gradients are multiplied by
    sums: Tensor  # P x 3, float64: loss times items, correct items, items, of the epoch under way
    teacher: Teacher | None  # whose module is stacked too
    hyper: Hyper
    step: Callable[[Tensor, Tensor, float], None]

    @property
    def n_nets(self) -> int:
        return len(self.sums)


def make_program(members: Sequence[Member], feed: Feed, hyper: Hyper, teachers: Sequence[Teacher] = ()) -> Program:
    """The program for as many networks as these, like these."""
    stacked = stack([member.state.model for member in members])
    is_held = any(member.state.masks or member.changes is not None for member in members)
    matrices = {name: param for name, param in stacked.named_parameters() if param[0].dim() > 1}
    masks = {name: torch.ones_like(param) for name, param in matrices.items()} if is_held else {}
    teacher = None
    if teachers:
        model = stack([one.model for one in teachers]).eval().requires_grad_(False)
        teacher = Teacher(model, teachers[0].weight, teachers[0].temperature)
    sums = torch.zeros(len(members), 3, dtype=torch.float64, device=feed.device)
    trained = Trained(stacked, make_optimizer(stacked, hyper), sums, teacher)
    step = _make_step(trained, masks, hyper, feed)
    return Program(stacked, trained.optimizer, masks, sums, teacher, hyper, step)


def fits(program: Program, members: Sequence[Member], hyper: Hyper) -> bool:
    """Whether a program made for other members can train these: as many, as held, as trained, and untaught."""
    is_held = any(member.state.masks or member.changes is not None for member in members)
    alike = program.n_nets == len(members) and program.hyper == hyper and bool(program.masks) == is_held
    return alike and program.teacher is None


def train_together(
    program: Program, members: Sequence[Member], feed: Feed, *, on_epoch: Callable[[], None] | None = None
) -> None:
    """Trains all members from where they stand, the start of one and the same epoch, to the end of the last.

    Each is trained as `train` would alone, with its own seed's batches. At the end of an epoch, when `on_epoch` is
    called, all states are whole: it may save them, and stop training by raising. No random numbers are drawn but for
    the batches: a network that draws while it runs (dropout) cannot be stacked.
    """
    hyper, n_all = program.hyper, n_steps(feed, program.hyper.batch_size)
    _from_members(program, members)
    for epoch in range(members[0].state.epoch, hyper.epochs):
        program.stacked.train()
        for number, images, labels in _batches(feed, hyper, [member.seed for member in members], epoch):
            program.step(images, labels, rate(hyper.schedule, epoch + number / n_all))
            _change_masks(program, members, epoch * n_all + number + 1)
        _end_epoch(program, members, feed, epoch, n_all)
        _to_members(program, members)
        if on_epoch is not None:
            on_epoch()


def check_alone(processes: Processes, feed: Feed) -> None:
    """Refuses what a population cannot do: several processes, images that are read from files."""
    if processes.count > 1 or not isinstance(feed.data, ImageSet):
        raise OptionError(
            "train.together trains in one process, on images in memory", option="train.together", fix="set it to 1"
        )


# --- between the members and their population -------------------------------------------------------------------------


@torch.no_grad()
def _from_members(program: Program, members: Sequence[Member]) -> None:
    """Copies weights, statistics, masks and what the optimizers remember; in place, for a recorded step reads them."""
    tensors, params = program.stacked.state_dict(), dict(program.stacked.named_parameters())
    for index, member in enumerate(members):
        for key, tensor in member.state.model.state_dict().items():
            tensors[key][index].copy_(tensor)
        for name, mask in program.masks.items():
            if name in member.state.masks:
                mask[index].copy_(member.state.masks[name])
            else:
                mask[index].fill_(1.0)
        for name, param in member.state.model.named_parameters():
            own, kept = member.state.optimizer.state.get(param, {}), program.optimizer.state[params[name]]
            for key, value in own.items():
                if key not in kept:
                    kept[key] = value.clone() if value.dim() == 0 else torch.zeros_like(params[name])
            for key, memory in kept.items():
                place = memory if memory.dim() == 0 else memory[index]  # a count of steps is the same for all
                place.copy_(own[key]) if key in own else place.zero_()


@torch.no_grad()
def _to_members(program: Program, members: Sequence[Member]) -> None:
    """Copies weights, statistics and what the optimizer remembers to the members."""
    tensors, params = program.stacked.state_dict(), dict(program.stacked.named_parameters())
    for index, member in enumerate(members):
        state = member.state
        state.model.load_state_dict({key: tensor[index] for key, tensor in tensors.items()})
        for name, param in state.model.named_parameters():
            kept = program.optimizer.state.get(params[name], {})
            own = {key: memory if memory.dim() == 0 else memory[index] for key, memory in kept.items()}
            state.optimizer.state[param] = {key: value.clone() for key, value in own.items()}


def _change_masks(program: Program, members: Sequence[Member], n_done: int) -> None:
    """Sets new masks where they are due after this many steps."""
    due = [one for one in members if one.changes is not None and n_done in one.changes.after]
    if not due:
        return
    _to_members(program, members)
    for member in due:
        assert member.changes is not None
        masks, facts = member.changes.masks(n_done, member.state)
        set_masks(member.state, masks)
        member.state.facts = {**member.state.facts, **facts}
    _from_members(program, members)


# --- steps and epochs -------------------------------------------------------------------------------------------------


def _batches(feed: Feed, hyper: Hyper, seeds: Sequence[int], epoch: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(step, images N x (P C) x H x W, labels N x P) of one epoch: every member sees the batches of its seed."""
    distinct = list(dict.fromkeys(seeds))
    places = [distinct.index(seed) for seed in seeds]
    each = [
        train_batches(feed, seed=seed, epoch=epoch, batch_size=hyper.batch_size, augmented=hyper.augment)
        for seed in distinct
    ]
    for number, batches in enumerate(zip(*each)):
        found = [(_filled_up(images, hyper.precision), labels) for _, (images, labels) in batches]
        images = torch.cat([found[place][0] for place in places], 1)
        labels = torch.stack([found[place][1] for place in places], 1)
        yield number, images.contiguous(memory_format=torch.channels_last), labels


def _filled_up(images: Tensor, precision: Precision) -> Tensor:
    """Images for a GPU with as many channels as its kernels want, those that are added all zero."""
    if not images.is_cuda:
        return images
    images = images.bfloat16() if precision == "bfloat16" else images
    return F.pad(images, (0, 0, 0, 0, 0, max(0, WELL_GROUPED - images.shape[1])))


def _make_step(
    trained: Trained, masks: dict[str, Tensor], hyper: Hyper, feed: Feed
) -> Callable[[Tensor, Tensor, float], None]:
    """The function that makes one step of all members; a short last batch is a plain step."""
    kind = resolve_step(hyper.step, feed.device, in_memory=True, n_processes=1)
    is_recorded = kind != "eager" and trained.sums.is_cuda
    forward: Callable[[Tensor], Tensor] = trained.model
    if kind == "compiled":
        forward = torch.compile(trained.model, dynamic=False)
    recorded: Recorded | None = None
    n_warm = 0

    def step(images: Tensor, labels: Tensor, lr: float) -> None:
        nonlocal recorded, n_warm
        set_rate(trained.optimizer, lr)
        if len(labels) < hyper.batch_size:
            _compute(trained, masks, trained.model, images, labels, hyper.precision)
        elif n_warm < WARM_UP_STEPS or not is_recorded:
            n_warm += 1
            _compute(trained, masks, forward, images, labels, hyper.precision)
        else:
            if recorded is None:
                kept = images.clone(), labels.clone()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                    _compute(trained, masks, forward, *kept, hyper.precision)
                recorded = Recorded(graph, *kept)
            recorded.images.copy_(images)
            recorded.labels.copy_(labels)
            recorded.graph.replay()

    return step


def _compute(
    trained: Trained,
    masks: dict[str, Tensor],
    forward: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    precision: Precision,
) -> None:
    """Makes the step itself: the losses are added up, so each member gets the gradient of its own."""
    trained.optimizer.zero_grad(set_to_none=True)
    n_nets, flat = len(trained.sums), labels.flatten()
    logits = logits_of(forward, images, precision).unflatten(1, (n_nets, -1))  # N P classes
    if trained.teacher is None:
        losses = F.cross_entropy(logits.flatten(0, 1), flat, reduction="none")
    else:
        with torch.no_grad():
            taught = logits_of(trained.teacher.model, images, precision).unflatten(1, (n_nets, -1))
        losses = distilled_losses(logits.flatten(0, 1), flat, taught.flatten(0, 1), trained.teacher)
    means_P = losses.view_as(labels).mean(0)
    means_P.sum().backward()
    for name, param in trained.model.named_parameters():
        if name in masks and param.grad is not None:
            param.grad.mul_(masks[name])
    trained.optimizer.step()
    with torch.no_grad():
        n_right = (logits.argmax(2) == labels).sum(0).double()
        n_items = torch.full_like(n_right, len(labels))
        trained.sums.add_(torch.stack([means_P.double() * len(labels), n_right, n_items], 1))


def _end_epoch(program: Program, members: Sequence[Member], feed: Feed, epoch: int, n_all: int) -> None:
    """Appends the epoch's row to every member."""
    number, hyper = epoch + 1, program.hyper
    tests: list[Accuracy] | list[None] = [None] * program.n_nets
    if number % hyper.eval_every == 0 or number == hyper.epochs:
        tests = _evaluated(program, feed)
    for member, (loss, n_right, n_items), test in zip(members, program.sums.tolist(), tests):
        if not math.isfinite(loss):
            raise ModelError(
                f"training diverged: the loss of epoch {number} is {loss}, with seed {member.seed}",
                fix="use a lower learning rate or a longer warm-up",
            )
        row = EpochRow(
            epoch=number,
            rate=rate(hyper.schedule, epoch + (n_all - 1) / n_all),
            train_loss=loss / n_items,
            train_top1=n_right / n_items,
            test=test,
        )
        member.state.rows = (*member.state.rows, row)
        member.state.epoch, member.state.step = number, 0
    program.sums.zero_()


@torch.no_grad()
def _evaluated(program: Program, feed: Feed) -> list[Accuracy]:
    """The accuracy of every member on the test set, in eval mode."""
    n_nets, items, precision = program.n_nets, feed.splits.test, program.hyper.precision
    program.stacked.eval()
    totals = torch.zeros(n_nets, 3, dtype=torch.float64, device=feed.device)
    for images, labels in plain_batches(feed, items):
        side_by_side = _filled_up(images, precision).repeat(1, n_nets, 1, 1)
        side_by_side = side_by_side.contiguous(memory_format=torch.channels_last)
        logits = logits_of(program.stacked, side_by_side, precision).unflatten(1, (n_nets, -1))
        targets = labels[:, None].expand(-1, n_nets)
        hits = logits.topk(min(TOP_K, logits.shape[2]), dim=2).indices == targets[:, :, None]
        hits &= logits.isfinite().all(2, keepdim=True)  # NaN sorts as the largest: it must not count as right
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).sum(0)
        totals += torch.stack([hits[:, :, 0].sum(0).double(), hits.sum((0, 2)).double(), loss.double()], 1)
    n = len(items)
    return [Accuracy(n=n, n_top1=int(top1), n_top5=int(top5), loss=loss / n) for top1, top5, loss in totals.tolist()]
