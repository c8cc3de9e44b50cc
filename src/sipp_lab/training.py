"""The training loop: trains a network and records one row per epoch.

`TrainState` holds everything: weights, masks, optimizer and progress. All randomness derives from (seed, epoch, step),
so training resumed from a state saved after any epoch gives the same bits.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError
from sipp_lab.data.feed import NO_LABEL, Feed
from sipp_lab.processes import add_gradients, n_processes, rank, share_buffers, sum_over_processes
from sipp_lab.recipes.schema import Distill, Precision, Training
from sipp_lab.runs.records import Accuracy
from sipp_lab.seeds import step_seed

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
    """The state of training after `epoch` epochs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sums: Tensor  # float64, of the current epoch: loss times items, correct items, items; not saved
    rows: tuple[EpochRow, ...] = ()
    epoch: int = 0
    masks: dict[str, Tensor] = field(default_factory=dict)  # of pruned weights, on the CPU
    facts: dict[str, Any] = field(default_factory=dict)  # to record, since the masks last changed


AfterStep = Callable[[int, TrainState], None]  # gets the number of steps done, over all epochs


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
    """A new optimizer over all parameters, fused on a GPU; its learning rate is set before every step."""
    fused = next(model.parameters()).is_cuda
    if hyper.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), weight_decay=hyper.weight_decay, fused=fused)
    return torch.optim.SGD(
        model.parameters(),
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
    teacher: nn.Module | None = None,
    after_step: AfterStep | None = None,
    after_epoch: Callable[[TrainState], None] | None = None,
) -> TrainState:
    """Trains to the last epoch.

    With a `teacher` (in eval mode) and `hyper.distill`, the loss (also in the rows of epochs) is `distilled_losses`.
    `after_step` may prune further, before the epoch is evaluated and `after_epoch` saves the state. Several processes
    split every batch and sum their gradients: the same step as in one process, except for rounding and for BatchNorm,
    which sees only a process's own share (the leader's statistics are kept). torch's global generator (for dropout) is
    seeded for every step, in each process differently, and restored at the end.
    """
    n_steps, n_train, share = feed.n_steps(hyper.batch_size), len(feed.splits.train), (rank(), n_processes())
    with torch.random.fork_rng(devices=[feed.device] if feed.device.type == "cuda" else []):
        while state.epoch < hyper.epochs:
            state.model.train()
            batches = feed.train_batches(
                hyper.batch_size, augment=hyper.augment, seed=seed, epoch=state.epoch, share=share
            )
            for step, (images, labels) in enumerate(batches):
                torch.manual_seed(step_seed(seed, state.epoch, step) + share[0])
                set_rate(state.optimizer, learning_rate(hyper, state.epoch + step / n_steps))
                n_items = min(hyper.batch_size, n_train - step * hyper.batch_size)
                try:
                    train_step(state, hyper, images, labels, n_items, teacher)
                except torch.OutOfMemoryError as error:
                    raise ModelError(
                        f"out of memory with batch_size={hyper.batch_size}",
                        where=f"epoch {state.epoch + 1}, step {step + 1}",
                        fix=f"set train.batch_size to {max(1, hyper.batch_size // 2)} (and the rate with it), or use "
                        "more processes",
                    ) from error
                if after_step is not None:
                    after_step(state.epoch * n_steps + step + 1, state)
            share_buffers(state.model)
            _end_epoch(state, feed, hyper, seed=seed)
            if after_epoch is not None:
                after_epoch(state)
    return state


def train_step(
    state: TrainState, hyper: Training, images: Tensor, labels: Tensor, n_items: int, teacher: nn.Module | None = None
) -> None:
    """One step on a batch of `n_items`, of which `images` are this process's share; does not wait for the device."""
    state.optimizer.zero_grad(set_to_none=True)
    logits = logits_of(state.model, images, hyper.precision)
    if teacher is not None and hyper.distill is not None:
        with torch.no_grad():
            teacher_logits = logits_of(teacher, images, hyper.precision)
        loss = distilled_losses(logits, labels, teacher_logits, hyper.distill).sum() / n_items
    elif n_processes() == 1:
        loss = F.cross_entropy(logits, labels)
    else:
        loss = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum") / n_items
    loss.backward()
    add_gradients(state.model)
    state.optimizer.step()
    with torch.no_grad():
        n_right = (logits.argmax(1) == labels).sum()
        n_own = (labels != NO_LABEL).sum()
        state.sums.add_(torch.stack([loss.double() * n_items, n_right.double(), n_own.double()]))


def logits_of(model: nn.Module, images: Tensor, precision: Precision) -> Tensor:
    """The network's output in float32, as the loss needs it; the network runs in the given precision."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        logits: Tensor = model(images).float()
        return logits


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


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate


# --- the end of an epoch ----------------------------------------------------------------------------------------------


def _end_epoch(state: TrainState, feed: Feed, hyper: Training, *, seed: int) -> None:
    """Evaluates if it is time to, appends the epoch's row and starts the next epoch."""
    number, n_steps = state.epoch + 1, feed.n_steps(hyper.batch_size)
    loss, n_right, n_items = sum_over_processes(state.sums).tolist()
    state.sums.zero_()
    is_tested = number % hyper.eval_every == 0 or number == hyper.epochs
    test = evaluate(state.model, feed, feed.splits.test, precision=hyper.precision) if is_tested else None
    if not math.isfinite(loss):
        raise ModelError(
            f"training diverged: the loss of epoch {number} is {loss}, with seed {seed}",
            fix="use a lower learning rate or a longer warm-up",
        )
    rate = learning_rate(hyper, state.epoch + (n_steps - 1) / n_steps)
    state.rows = (*state.rows, EpochRow(number, rate, loss / n_items, n_right / n_items, test))
    state.epoch = number


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
        for images, labels in feed.eval_batches(items):
            logits = logits_of(model, images, precision)
            hits = logits.topk(min(TOP_K, logits.shape[1]), dim=1).indices == labels[:, None]
            hits &= logits.isfinite().all(1, keepdim=True)  # NaN sorts as the largest, but must not count as correct
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss.double()])
    n_top1, n_top5, loss_sum = totals.tolist()
    return Accuracy(n=len(items), n_top1=int(n_top1), n_top5=int(n_top5), loss=loss_sum / len(items))
