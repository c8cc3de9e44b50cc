"""A network, data and hyperparameters in; a trained network and one row per epoch out.

All of training's state is in `TrainState`: weights, masks, optimizer, how far it is, the sums of the epoch under way.
Batches and all other draws follow from (seed, epoch, step), so a state saved after any step continues to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sipp.errors import DataError, ModelError, OptionError
from sipp.experiments.data import ImageSet
from sipp.experiments.parallel.processes import ALONE, Processes, add_up, check_same, share_buffers
from sipp.experiments.seeds import step_seed
from sipp.experiments.training.distill import Teacher
from sipp.experiments.training.feed import Feed, n_steps, plain_batches, train_batches
from sipp.experiments.training.schedule import Schedule, rate
from sipp.experiments.training.step import Precision, Step, StepKind, Trained, logits_of, make_step, resolve_step
from sipp.pruning.masking import hold
from sipp.records.checking import check_choice
from sipp.records.schemas import Accuracy, EpochRow

OptimizerName = Literal["sgd", "adam"]

TOP_K = 5


@dataclass(frozen=True)
class Hyper:
    """How a network is trained; the names are those of the paper's tables."""

    epochs: int
    batch_size: int
    schedule: Schedule
    optimizer: OptimizerName = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    augment: bool = False
    precision: Precision = "float32"
    eval_every: int = 1  # epochs between evaluations on the test set; the last epoch always is
    step: StepKind = "auto"

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or self.eval_every < 1:
            raise OptionError(
                f"epochs={self.epochs}, batch_size={self.batch_size}, eval_every={self.eval_every} must be at least 1"
            )
        check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        check_choice("precision", self.precision, get_args(Precision))
        check_choice("step", self.step, get_args(StepKind))
        if self.nesterov and (self.optimizer != "sgd" or self.momentum <= 0):
            raise OptionError("nesterov=True needs optimizer='sgd' and a momentum above 0")
        if not self.momentum >= 0 or not self.weight_decay >= 0:
            raise OptionError(f"momentum={self.momentum} and weight_decay={self.weight_decay} must not be negative")


@dataclass
class TrainState:
    """Where training stands: `epoch` epochs and `step` steps of the next one are done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sums: Tensor  # float64: loss times items, correct items, items, of the epoch under way
    rows: tuple[EpochRow, ...] = ()
    epoch: int = 0
    step: int = 0
    masks: dict[str, Tensor] = field(default_factory=dict)  # of the weights that are held, on the CPU
    facts: dict[str, Any] = field(default_factory=dict)  # what is known of the network since its masks last changed


@dataclass(frozen=True)
class MaskChanges:
    """Masks that shrink during training.

    `after`: the steps after which they do, counted from 1 over all epochs; they are known before, so that several
    processes agree on them. `masks` then gives the new ones (a weight that is gone stays gone, a parameter that is not
    named keeps its mask) and what there is to say of the network now; all processes call it with the same state.
    """

    after: frozenset[int]
    masks: Callable[[int, TrainState], tuple[Mapping[str, Tensor], dict[str, Any]]]


OnStep = Callable[[TrainState], None]


def new_state(model: nn.Module, hyper: Hyper, *, masks: Mapping[str, Tensor] | None = None) -> TrainState:
    """The state before the first step; with masks, pruned weights are held at zero from now on."""
    device = next(model.parameters()).device
    state = TrainState(model, make_optimizer(model, hyper), torch.zeros(3, dtype=torch.float64, device=device))
    if masks is not None:
        set_masks(state, masks)
    return state


def set_masks(state: TrainState, masks: Mapping[str, Tensor]) -> None:
    """Holds the weights outside of these masks at zero from now on; what the optimizer remembers of them is gone.

    A mask may only shrink: one that would bring a weight back is refused.
    """
    hold(state.model, masks, optimizer=state.optimizer)
    state.masks = {**state.masks, **{name: mask.detach().cpu() for name, mask in masks.items()}}


def make_optimizer(model: nn.Module, hyper: Hyper) -> torch.optim.Optimizer:
    """A fresh optimizer over all parameters; its rate is set anew before every step.

    On a GPU it is one kernel for all parameters, and reads its rate from a tensor, so that a graph can be made of it.
    """
    device = next(model.parameters()).device
    fused = device.type == "cuda"
    start = torch.tensor(rate(hyper.schedule, 0.0), device=device) if fused else rate(hyper.schedule, 0.0)
    if hyper.optimizer == "adam":
        return torch.optim.Adam(
            model.parameters(), lr=start, weight_decay=hyper.weight_decay, fused=fused, capturable=fused
        )
    return torch.optim.SGD(
        model.parameters(),
        lr=start,
        momentum=hyper.momentum,
        nesterov=hyper.nesterov,
        weight_decay=hyper.weight_decay,
        fused=fused,
    )


@dataclass
class _Course:
    """What the epochs of one training share; `step` is made anew after a change of masks."""

    feed: Feed
    hyper: Hyper
    seed: int
    on_step: OnStep | None
    changes: MaskChanges | None
    processes: Processes
    make: Callable[[], Step]
    step: Step


def train(
    state: TrainState,
    feed: Feed,
    hyper: Hyper,
    *,
    seed: int,
    on_step: OnStep | None = None,
    changes: MaskChanges | None = None,
    processes: Processes = ALONE,
    teacher: Teacher | None = None,
) -> TrainState:
    """The state after the last epoch; `on_step` sees it after every step and may stop training by raising.

    With a `teacher` the loss is that of `distill.py`, and so are the losses in the rows of epochs.
    Masks change right after a step (`changes`), before `on_step` and before an epoch is evaluated, so that a state
    saved by `on_step` has its new masks already. Several processes share out every batch and add up their gradients:
    the same step as one process makes, but for rounding and for BatchNorm, which sees a process's own share (the
    leader's statistics are kept). torch's global generator (dropout) is seeded for every step and given back as it was.
    """
    in_memory = isinstance(feed.data, ImageSet)
    kind = resolve_step(hyper.step, feed.device, in_memory=in_memory, n_processes=processes.count)
    trained = Trained(state.model, state.optimizer, state.sums, teacher)

    def make() -> Step:
        return make_step(trained, kind, batch_size=hyper.batch_size, precision=hyper.precision, processes=processes)

    course = _Course(feed, hyper, seed, on_step, changes, processes, make, make())
    try:
        with torch.random.fork_rng(devices=[feed.device] if feed.device.type == "cuda" else []):
            while state.epoch < hyper.epochs:
                _train_epoch(state, course)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"out of memory in epoch {state.epoch + 1}, step {state.step + 1}, with batch_size={hyper.batch_size}",
            fix=f"set train.batch_size to {max(1, hyper.batch_size // 2)} (and the rate with it), or use more "
            "processes",
        ) from error
    return state


def _train_epoch(state: TrainState, course: _Course) -> None:
    feed, hyper, seed, processes = course.feed, course.hyper, course.seed, course.processes
    n_all = n_steps(feed, hyper.batch_size)
    if state.step < n_all:
        state.model.train()
        batches = train_batches(
            feed,
            seed=seed,
            epoch=state.epoch,
            batch_size=hyper.batch_size,
            start=state.step,
            augmented=hyper.augment,
            share=(processes.index, processes.count),
        )
        for step, (images, labels) in batches:
            lr = rate(hyper.schedule, state.epoch + step / n_all)
            torch.manual_seed(step_seed(seed, state.epoch, step))
            n_items = min(hyper.batch_size, len(feed.splits.train) - step * hyper.batch_size)
            course.step(images, labels, lr, n_items)
            state.step = step + 1
            _change_masks(state, course, state.epoch * n_all + state.step)
            if state.step < n_all and course.on_step is not None:
                course.on_step(state)
    _end_epoch(state, feed, hyper, n_all, processes)
    if course.on_step is not None:
        course.on_step(state)


def _change_masks(state: TrainState, course: _Course, n_done: int) -> None:
    """Sets new masks where they are due after this many steps."""
    if course.changes is None or n_done not in course.changes.after:
        return
    masks, facts = course.changes.masks(n_done, state)
    check_same(course.processes, masks, what=f"masks after step {n_done}")
    set_masks(state, masks)
    state.facts = {**state.facts, **facts}
    course.step = course.make()  # a recorded graph has the old masks


def _end_epoch(state: TrainState, feed: Feed, hyper: Hyper, n_all: int, processes: Processes) -> None:
    """Appends the epoch's row and starts the next one."""
    share_buffers(processes, state.model)
    loss, n_right, n_items = add_up(processes, state.sums).tolist()
    number = state.epoch + 1
    if not math.isfinite(loss):
        raise ModelError(
            f"training diverged: the loss of epoch {number} is {loss}",
            fix="use a lower learning rate or a longer warm-up",
        )
    is_tested = number % hyper.eval_every == 0 or number == hyper.epochs
    row = EpochRow(
        epoch=number,
        rate=rate(hyper.schedule, state.epoch + (n_all - 1) / n_all),
        train_loss=loss / n_items,
        train_top1=n_right / n_items,
        test=evaluate(state.model, feed, feed.splits.test, precision=hyper.precision) if is_tested else None,
    )
    state.rows = (*state.rows, row)
    state.sums.zero_()
    state.epoch, state.step = number, 0


@torch.no_grad()
def evaluate(model: nn.Module, feed: Feed, items: Tensor, *, precision: Precision = "float32") -> Accuracy:
    """Top-1, top-5 and loss on the given items in eval mode; the mode of every module is given back as it was."""
    if not len(items):
        raise DataError("there is nothing to evaluate on: the split is empty")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=feed.device)
    try:
        for images, labels in plain_batches(feed, items):
            logits = logits_of(model, images, precision)
            hits = logits.topk(min(TOP_K, logits.shape[1]), dim=1).indices == labels[:, None]
            hits &= logits.isfinite().all(1, keepdim=True)  # NaN sorts as the largest: it must not count as right
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([hits[:, 0].sum().double(), hits.sum().double(), loss.double()])
    finally:
        for module, was_training in modes:
            module.training = was_training
    n_top1, n_top5, loss_sum = totals.tolist()
    return Accuracy(n=len(items), n_top1=int(n_top1), n_top5=int(n_top5), loss=loss_sum / len(items))
