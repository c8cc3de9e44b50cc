"""The training loop: trains a network and records one row per epoch.

`TrainState` holds everything: weights, masks, optimizer and progress. All randomness derives from (seed, epoch, step),
so training resumed from a state saved after any epoch gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp_lab.data.imageset import ImageSet
from sipp_lab.parallel.processes import ALONE, Processes, add_gradients, share_buffers, sum_over_processes
from sipp_lab.recipes.schema import Precision, Training
from sipp_lab.runs.records import Accuracy
from sipp_lab.seeds import step_seed
from sipp_lab.training.feed import NO_LABEL, Feed, eval_batches, n_steps, train_batches
from sipp_lab.training.step import Forward, Step, distilled_losses, learning_rate, logits_of, make_step

TOP_K = 5


@dataclass(frozen=True)
class EpochRow:
    """One epoch of training: its number from 1, the rate it ended with, loss and top-1 in training, test accuracy."""

    epoch: int
    rate: float
    train_loss: float
    train_top1: float
    test: Accuracy | None  # None in epochs without an evaluation


@dataclass
class TrainState:
    """The state of training after `epoch` epochs and `step` steps of the next."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sums: Tensor  # float64, of the current epoch: loss times items, correct items, items; not saved
    rows: tuple[EpochRow, ...] = ()
    epoch: int = 0
    step: int = 0
    masks: dict[str, Tensor] = field(default_factory=dict)  # of pruned weights, on the CPU
    facts: dict[str, Any] = field(default_factory=dict)  # to record, since the masks last changed


@dataclass(frozen=True)
class MaskChanges:
    """Masks that shrink during training.

    `after`: the steps after which they do, counted from 1 over all epochs; fixed in advance, so that all processes
    agree. `masks(step, state)` returns the new masks (pruned weights stay pruned; parameters not named keep their mask)
    and facts to record, the same in all processes.
    """

    after: frozenset[int]
    masks: Callable[[int, TrainState], tuple[Mapping[str, Tensor], dict[str, Any]]]


OnStep = Callable[[TrainState], None]


def new_state(model: nn.Module, hyper: Training, *, masks: Mapping[str, Tensor] | None = None) -> TrainState:
    """The initial state; with masks, pruned weights are held at zero."""
    device = next(model.parameters()).device
    state = TrainState(model, make_optimizer(model, hyper), torch.zeros(3, dtype=torch.float64, device=device))
    if masks:
        set_masks(state, masks)
    return state


def set_masks(state: TrainState, masks: Mapping[str, Tensor]) -> None:
    """Holds the weights outside these masks at zero, and clears their optimizer state.

    Masks may only shrink: bringing a weight back is an error.
    """
    sipp.hold(state.model, dict(masks), optimizer=state.optimizer)
    state.masks = {**state.masks, **{name: mask.detach().cpu() for name, mask in masks.items()}}


def make_optimizer(model: nn.Module, hyper: Training) -> torch.optim.Optimizer:
    """A new optimizer over all parameters; its learning rate is set before every step.

    On a GPU it is fused and reads its rate from a tensor, so that it can be recorded in a CUDA graph.
    """
    device = next(model.parameters()).device
    fused = device.type == "cuda"
    start = torch.tensor(learning_rate(hyper, 0.0), device=device) if fused else learning_rate(hyper, 0.0)
    if hyper.optimizer == "adam":
        return torch.optim.Adam(
            model.parameters(), lr=start, weight_decay=hyper.weight_decay, fused=fused, capturable=fused
        )
    return torch.optim.SGD(
        model.parameters(),
        lr=start,
        momentum=hyper.momentum or 0.0,
        nesterov=hyper.nesterov,
        weight_decay=hyper.weight_decay,
        fused=fused,
    )


def train(
    state: TrainState,
    feed: Feed,
    hyper: Training,
    *,
    seed: int,
    on_step: OnStep = lambda state: None,
    on_epoch: OnStep = lambda state: None,
    changes: MaskChanges | None = None,
    processes: Processes = ALONE,
    teacher: nn.Module | None = None,
) -> TrainState:
    """Trains to the last epoch; `on_step` is called after every step, `on_epoch` after every epoch.

    With a `teacher` (in eval mode) and `hyper.distill`, the loss (also in the rows of epochs) is `distilled_losses`.
    Masks change (`changes`) right after a step, before `on_step` and before the epoch is evaluated, so a saved state
    has the new masks. Several processes split every batch and sum their gradients: the same step as in one process,
    except for rounding and for BatchNorm, which sees only a process's own share (the leader's statistics are kept).
    torch's global generator (for dropout) is seeded for every step, in each process differently, and restored at the
    end.
    """
    step, n_all = make_train_step(state, feed, hyper, teacher=teacher, processes=processes), n_steps(feed, hyper)
    try:
        with torch.random.fork_rng(devices=[feed.device] if feed.device.type == "cuda" else []):
            while state.epoch < hyper.epochs:
                state.model.train()
                share = processes.rank, processes.world_size
                for number, (images, labels) in train_batches(feed, hyper, seed=seed, epoch=state.epoch, share=share):
                    torch.manual_seed(step_seed(seed, state.epoch, number) + processes.rank)
                    n_items = min(hyper.batch_size, len(feed.splits.train) - number * hyper.batch_size)
                    step(images, labels, learning_rate(hyper, state.epoch + number / n_all), n_items)
                    state.step = number + 1
                    n_done = state.epoch * n_all + state.step
                    if changes is not None and n_done in changes.after:
                        masks, facts = changes.masks(n_done, state)
                        set_masks(state, masks)
                        state.facts = {**state.facts, **facts}
                        # a recorded graph would use the old masks
                        step = make_train_step(state, feed, hyper, teacher=teacher, processes=processes)
                    on_step(state)
                share_buffers(processes, state.model)
                sums = sum_over_processes(processes, state.sums).tolist()
                state.sums.zero_()
                is_tested = (state.epoch + 1) % hyper.eval_every == 0 or state.epoch + 1 == hyper.epochs
                test = evaluate(state.model, feed, feed.splits.test, precision=hyper.precision) if is_tested else None
                _end_epoch(state, hyper, sums, test, n_all=n_all, seed=seed)
                on_epoch(state)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"out of memory in epoch {state.epoch + 1}, step {state.step + 1}, with batch_size={hyper.batch_size}",
            fix=f"set train.batch_size to {max(1, hyper.batch_size // 2)} (and the rate with it), or use more "
            "processes",
        ) from error
    return state


def make_train_step(
    state: TrainState, feed: Feed, hyper: Training, *, teacher: nn.Module | None = None, processes: Processes = ALONE
) -> Step:
    """A function that makes one training step, without synchronising with the device."""

    def compute(forward: Forward, images: Tensor, labels: Tensor, n_items: int) -> None:
        """One step on a batch of `n_items`, of which `images` are this process's share."""
        state.optimizer.zero_grad(set_to_none=True)
        logits = logits_of(forward, images, hyper.precision)
        if teacher is not None and hyper.distill is not None:
            with torch.no_grad():
                teacher_logits = logits_of(teacher, images, hyper.precision)
            loss = distilled_losses(logits, labels, teacher_logits, hyper.distill).sum() / n_items
        elif processes.world_size == 1:
            loss = F.cross_entropy(logits, labels)
        else:
            loss = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum") / n_items
        loss.backward()
        add_gradients(processes, state.model)
        state.optimizer.step()
        with torch.no_grad():
            n_right = (logits.argmax(1) == labels).sum()
            n_own = (labels != NO_LABEL).sum()
            state.sums.add_(torch.stack([loss.double() * n_items, n_right.double(), n_own.double()]))

    is_recordable = state.sums.is_cuda and isinstance(feed.data, ImageSet) and processes.world_size == 1
    return make_step(
        state.model,
        state.optimizer,
        compute,
        batch_size=hyper.batch_size,
        is_compiled=hyper.step == "compiled",
        is_recorded=is_recordable and hyper.step != "eager",
    )


def _end_epoch(
    state: TrainState, hyper: Training, sums: Sequence[float], test: Accuracy | None, *, n_all: int, seed: int
) -> None:
    """Appends the epoch's row, computed from its sums (loss x items, right, items), and starts the next epoch."""
    loss, n_right, n_items = sums
    number = state.epoch + 1
    if not math.isfinite(loss):
        raise ModelError(
            f"training diverged: the loss of epoch {number} is {loss}, with seed {seed}",
            fix="use a lower learning rate or a longer warm-up",
        )
    rate = learning_rate(hyper, state.epoch + (n_all - 1) / n_all)
    state.rows = (*state.rows, EpochRow(number, rate, loss / n_items, n_right / n_items, test))
    state.epoch, state.step = number, 0


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts the model into eval mode inside the block, and every module back into its own mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@torch.no_grad()
def evaluate(model: nn.Module, feed: Feed, items: Tensor, *, precision: Precision = "float32") -> Accuracy:
    """Top-1, top-5 and loss on the given items in eval mode."""
    if not len(items):
        raise DataError("there is nothing to evaluate on: the split is empty")
    totals = torch.zeros(3, dtype=torch.float64, device=feed.device)
    with in_eval_mode(model):
        for images, labels in eval_batches(feed, items):
            logits = logits_of(model, images, precision)
            hits = logits.topk(min(TOP_K, logits.shape[1]), dim=1).indices == labels[:, None]
            hits &= logits.isfinite().all(1, keepdim=True)  # NaN sorts as the largest, but must not count as correct
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss.double()])
    n_top1, n_top5, loss_sum = totals.tolist()
    return Accuracy(n=len(items), n_top1=int(n_top1), n_top5=int(n_top5), loss=loss_sum / len(items))
