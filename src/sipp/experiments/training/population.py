"""Trains many networks of one architecture as one program, with the same steps as each alone, up to rounding.

A small network leaves most of a GPU idle: its kernels finish faster than they can be launched. P networks side by side
(`stacking.py`) take the same number of kernels, each P times larger. The networks share the architecture and the
hyperparameters, but not weights, masks, order of batches or augmentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.experiments.recipes.schema import Precision, Training
from sipp.experiments.training.distill import Teacher, distilled_losses
from sipp.experiments.training.feed import Feed, eval_batches, n_steps, train_batches
from sipp.experiments.training.loop import (
    MaskChanges,
    TrainState,
    change_masks,
    end_epoch,
    is_evaluated,
    make_optimizer,
    top_hits,
)
from sipp.experiments.training.stacking import WELL_GROUPED, stack
from sipp.experiments.training.step import Forward, Step, learning_rate, logits_of, make_step, resolve_step
from sipp.records.schemas import Accuracy


@dataclass(frozen=True)
class Member:
    """One network of a group: its state, the seed of its batches, and its mask changes, if any."""

    state: TrainState
    seed: int
    changes: MaskChanges | None = None


@dataclass(frozen=True)
class Program:
    """A module that holds several networks, and its training step.

    One program can train many groups in turn, so the step is compiled and recorded only once.
    """

    stacked: nn.Module
    optimizer: torch.optim.Optimizer
    masks: dict[str, Tensor]  # of all prunable weights, as factors for the gradients
    sums: Tensor  # P x 3, float64, of the current epoch: loss times items, correct items, items
    teacher: Teacher | None  # a stacked module too
    hyper: Training
    step: Step

    @property
    def n_nets(self) -> int:
        return len(self.sums)


def make_program(members: Sequence[Member], feed: Feed, hyper: Training, teachers: Sequence[Teacher] = ()) -> Program:
    """A program for this number and kind of networks."""
    stacked = stack([member.state.model for member in members])
    is_held = any(member.state.masks or member.changes is not None for member in members)
    matrices = {name: param for name, param in stacked.named_parameters() if param[0].dim() > 1}
    masks = {name: torch.ones_like(param) for name, param in matrices.items()} if is_held else {}
    teacher = None
    if teachers:
        model = stack([teacher.model for teacher in teachers]).eval().requires_grad_(False)
        teacher = Teacher(model, teachers[0].weight, teachers[0].temperature)
    sums = torch.zeros(len(members), 3, dtype=torch.float64, device=feed.device)
    optimizer = make_optimizer(stacked, hyper)

    def compute(forward: Forward, images: Tensor, labels: Tensor, n_items: int) -> None:
        """One step of all members: the sum of their losses gives each the gradient of its own."""
        optimizer.zero_grad(set_to_none=True)
        n_nets, flat = len(sums), labels.flatten()
        logits = logits_of(forward, images, hyper.precision).unflatten(1, (n_nets, -1))  # N P classes
        if teacher is None:
            losses = F.cross_entropy(logits.flatten(0, 1), flat, reduction="none")
        else:
            with torch.no_grad():
                taught = logits_of(teacher.model, images, hyper.precision).unflatten(1, (n_nets, -1))
            losses = distilled_losses(logits.flatten(0, 1), flat, taught.flatten(0, 1), teacher)
        means_P = losses.view_as(labels).mean(0)
        means_P.sum().backward()
        for name, param in stacked.named_parameters():
            if name in masks and param.grad is not None:
                param.grad.mul_(masks[name])
        optimizer.step()
        with torch.no_grad():
            n_right = (logits.argmax(2) == labels).sum(0).double()
            sums.add_(torch.stack([means_P.double() * n_items, n_right, torch.full_like(n_right, n_items)], 1))

    kind = resolve_step(hyper.step, feed.device, in_memory=True, n_processes=1)
    is_recorded = kind != "eager" and sums.is_cuda
    step = make_step(stacked, optimizer, compute, kind=kind, batch_size=hyper.batch_size, is_recorded=is_recorded)
    return Program(stacked, optimizer, masks, sums, teacher, hyper, step)


def can_train(program: Program, members: Sequence[Member], hyper: Training) -> bool:
    """Whether a program can be reused: same number of members and hyperparameters, with masks or not, no teacher."""
    is_held = any(member.state.masks or member.changes is not None for member in members)
    alike = program.n_nets == len(members) and program.hyper == hyper and bool(program.masks) == is_held
    return alike and program.teacher is None


def train_together(
    program: Program, members: Sequence[Member], feed: Feed, *, on_epoch: Callable[[], None] | None = None
) -> None:
    """Trains all members to the last epoch; all must be at the start of the same epoch.

    Each is trained as by `train`, with the batches of its own seed. `on_epoch` is called at the end of each epoch, when
    all states are complete: it may save them, and stop training by raising. Networks with dropout cannot be stacked.
    """
    hyper, n_all = program.hyper, n_steps(feed, program.hyper.batch_size)
    _from_members(program, members)
    for epoch in range(members[0].state.epoch, hyper.epochs):
        program.stacked.train()
        for number, images, labels in _batches(feed, hyper, [member.seed for member in members], epoch):
            program.step(images, labels, learning_rate(hyper, epoch + number / n_all), len(labels))
            _change_masks(program, members, epoch * n_all + number + 1)
        is_tested = is_evaluated(hyper, epoch + 1)
        tests = _evaluate(program, feed) if is_tested else [None] * len(members)
        for member, sums, test in zip(members, program.sums.tolist(), tests):
            end_epoch(member.state, hyper, sums, test, n_all=n_all, seed=member.seed)
        program.sums.zero_()
        _to_members(program, members)
        if on_epoch is not None:
            on_epoch()


# --- copying between members and program ------------------------------------------------------------------------------


@torch.no_grad()
def _from_members(program: Program, members: Sequence[Member]) -> None:
    """Copies weights, statistics, masks and optimizer state into the program; in place, where a recorded step reads."""
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
                place = memory if memory.dim() == 0 else memory[index]  # the step count is shared
                place.copy_(own[key]) if key in own else place.zero_()


@torch.no_grad()
def _to_members(program: Program, members: Sequence[Member]) -> None:
    """Copies weights, statistics and optimizer state back to the members."""
    tensors, params = program.stacked.state_dict(), dict(program.stacked.named_parameters())
    for index, member in enumerate(members):
        state = member.state
        state.model.load_state_dict({key: tensor[index] for key, tensor in tensors.items()})
        for name, param in state.model.named_parameters():
            kept = program.optimizer.state.get(params[name], {})
            own = {key: memory if memory.dim() == 0 else memory[index] for key, memory in kept.items()}
            state.optimizer.state[param] = {key: value.clone() for key, value in own.items()}


def _change_masks(program: Program, members: Sequence[Member], n_done: int) -> None:
    """Applies the mask changes of all members after this many steps."""
    due = [member for member in members if member.changes is not None and n_done in member.changes.after]
    if not due:
        return
    _to_members(program, members)
    for member in due:
        assert member.changes is not None
        change_masks(member.state, member.changes, n_done)
    _from_members(program, members)


# --- steps and epochs -------------------------------------------------------------------------------------------------


def _batches(feed: Feed, hyper: Training, seeds: Sequence[int], epoch: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields (step, images N x (P C) x H x W, labels N x P) for one epoch, with each member's own batches."""
    distinct = list(dict.fromkeys(seeds))
    places = [distinct.index(seed) for seed in seeds]
    each = [
        train_batches(feed, seed=seed, epoch=epoch, batch_size=hyper.batch_size, augmented=hyper.augment)
        for seed in distinct
    ]
    for number, batches in enumerate(zip(*each)):
        ready = [(_pad_channels(images, hyper.precision), labels) for _, (images, labels) in batches]
        images = torch.cat([ready[place][0] for place in places], 1)
        labels = torch.stack([ready[place][1] for place in places], 1)
        yield number, images.contiguous(memory_format=torch.channels_last), labels


def _pad_channels(images: Tensor, precision: Precision) -> Tensor:
    """On a GPU, pads images with zero channels up to what grouped kernels need."""
    if not images.is_cuda:
        return images
    images = images.bfloat16() if precision == "bfloat16" else images
    return F.pad(images, (0, 0, 0, 0, 0, max(0, WELL_GROUPED - images.shape[1])))


@torch.no_grad()
def _evaluate(program: Program, feed: Feed) -> list[Accuracy | None]:
    """The test accuracy of every member, in eval mode."""
    n_nets, items, precision = program.n_nets, feed.splits.test, program.hyper.precision
    program.stacked.eval()
    totals = torch.zeros(n_nets, 3, dtype=torch.float64, device=feed.device)
    for images, labels in eval_batches(feed, items):
        side_by_side = _pad_channels(images, precision).repeat(1, n_nets, 1, 1)
        side_by_side = side_by_side.contiguous(memory_format=torch.channels_last)
        logits = logits_of(program.stacked, side_by_side, precision).unflatten(1, (n_nets, -1))
        targets = labels[:, None].expand(-1, n_nets)
        hits = top_hits(logits, targets)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).sum(0)
        totals += torch.stack([hits[:, :, 0].sum(0).double(), hits.sum((0, 2)).double(), loss.double()], 1)
    n = len(items)
    return [Accuracy(n=n, n_top1=int(top1), n_top5=int(top5), loss=loss / n) for top1, top5, loss in totals.tolist()]
