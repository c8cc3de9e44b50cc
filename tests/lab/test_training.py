"""Training: the update, the schedule and the distilled loss by hand; order, masks, resuming, evaluation."""

import copy
import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from sipp.errors import ModelError
from sipp_lab.data.feed import NO_LABEL, Feed, epoch_order, split_images
from sipp_lab.data.images import ImageSet, draw_shifts, normalise, shift
from sipp_lab.recipes.schema import Decay, Distill, Training
from sipp_lab.seeds import step_seed
from sipp_lab.training import (
    TrainState,
    distilled_losses,
    evaluate,
    learning_rate,
    new_state,
    set_rate,
    train,
    train_step,
)  # fmt: skip


def hyperparameters(
    epochs: int,
    batch_size: int,
    rate: float,
    *,
    warmup_epochs: float = 0.0,
    factor: float = 1.0,
    milestones: tuple[int, ...] | None = (),
    every: int | None = None,
    **others: Any,
) -> Training:
    """SGD with a momentum of 0.9 and a constant rate, unless told otherwise."""
    decay = Decay(factor=factor, milestones=milestones if every is None else None, every=every)
    given = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0, "augment": False, **others}
    if given["optimizer"] == "adam":
        given["momentum"] = None
    return Training(epochs=epochs, batch_size=batch_size, rate=rate, warmup_epochs=warmup_epochs, decay=decay, **given)


SCHEDULE: dict[str, Any] = {"rate": 0.05, "warmup_epochs": 1.0, "factor": 0.1, "milestones": (1,)}
HYPER = hyperparameters(2, 8, **SCHEDULE, weight_decay=1e-3)


def make_feed(*, n_train: int = 30, device: str = "cpu", uint8: bool = False) -> Feed:
    generator = torch.Generator().manual_seed(1)
    channels = 3 if uint8 else 1
    images = torch.rand(n_train + 20, channels, 6, 6, generator=generator)
    if uint8:
        images = (images * 255).to(torch.uint8)
    labels = torch.randint(4, (n_train + 20,), generator=generator)
    data = ImageSet("toy", images, labels, n_train, 4)
    return Feed(data, split_images(data, n_calibration=4, n_holdout=0, seed=0), torch.device(device))


def make_net(*, channels: int = 1, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(216, 4),
    )


def bits(state: TrainState) -> dict[str, torch.Tensor]:
    found = {f"model.{k}": v.clone() for k, v in state.model.state_dict().items()}
    for index, values in state.optimizer.state_dict()["state"].items():
        found |= {f"{index}.{k}": v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_update_is_the_textbook_one(nesterov: bool) -> None:
    feed, net = make_feed(), make_net()
    hyper = hyperparameters(2, 8, **SCHEDULE, nesterov=nesterov, weight_decay=1e-3)
    mine = copy.deepcopy(net)
    state = train(new_state(net, hyper), feed, hyper, seed=7)
    assert isinstance(feed.data, ImageSet)
    velocity = [torch.zeros_like(p) for p in mine.parameters()]
    for epoch in range(2):
        order = epoch_order(feed.splits.train, seed=7, epoch=epoch)
        for step in range(4):
            items = order[8 * step : 8 * step + 8]
            mine.zero_grad()
            F.cross_entropy(mine(feed.data.images[items]), feed.data.labels[items]).backward()
            lr = learning_rate(hyper, epoch + step / 4)
            with torch.no_grad():
                for p, v in zip(mine.parameters(), velocity):
                    gradient = p.grad + 1e-3 * p
                    v.copy_(0.9 * v + gradient if epoch + step else gradient)
                    p -= lr * (gradient + 0.9 * v if nesterov else v)
    for ours, theirs in zip(mine.parameters(), state.model.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert [row.epoch for row in state.rows] == [1, 2]


def test_continues_to_the_same_bits_after_any_epoch() -> None:
    feed, kept = make_feed(uint8=True), list[TrainState]()
    hyper = hyperparameters(3, 8, **SCHEDULE, augment=True)

    def keep(state: TrainState) -> None:
        kept.append(copy.deepcopy(state))

    start = new_state(make_net(channels=3, dropout=0.3), hyper)
    whole = train(start, feed, hyper, seed=3, after_epoch=keep)
    for state in kept[:-1]:
        torch.rand(state.epoch)  # whatever others draw in between
        resumed = train(state, feed, hyper, seed=3)
        assert equal(bits(resumed), bits(whole)) and resumed.rows == whole.rows
    other = train(new_state(make_net(channels=3, dropout=0.3), hyper), feed, hyper, seed=4)
    assert not equal(bits(other), bits(whole))


def test_every_step_has_a_seed_of_its_own() -> None:
    seeds = list[int]()

    def note(n_done: int, state: TrainState) -> None:
        seeds.append(torch.initial_seed())

    train(new_state(make_net(), HYPER), make_feed(), HYPER, seed=7, after_step=note)
    assert len(set(seeds)) == len(seeds) == 2 * 4


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "nesterov": True},
        {"optimizer": "adam"},
        {"optimizer": "sgd", "precision": "bfloat16"},
    ],
)
def test_pruned_weights_stay_zero(options: dict[str, Any]) -> None:
    feed, net = make_feed(), make_net()
    masks = {"5.weight": torch.rand(4, 216, generator=torch.Generator().manual_seed(0)) < 0.3}
    hyper = hyperparameters(2, 8, **SCHEDULE, weight_decay=1e-3, **options)
    before = net[5].weight.detach().clone()
    state = new_state(net, hyper, masks=masks)

    def check(n_done: int, state: TrainState) -> None:
        weight = state.model.get_parameter("5.weight")
        assert not bool(weight[~masks["5.weight"]].any())

    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN has no bfloat16 on older processors
        train(state, feed, hyper, seed=0, after_step=check)
    kept = masks["5.weight"]
    assert not torch.equal(net[5].weight[kept], before[kept])  # and the others do learn


def test_every_item_once_an_epoch_in_another_order() -> None:
    feed = make_feed()
    orders = []
    for epoch in (0, 1):
        batches = list(feed.train_batches(8, augment=False, seed=0, epoch=epoch))
        assert [len(labels) for _, labels in batches] == [8, 8, 8, 2]
        orders.append(torch.cat([images for images, _ in batches]).flatten(1).sum(1))
    assert torch.equal(orders[0].sort().values, orders[1].sort().values) and not torch.equal(*orders)


def test_augmentation_is_that_of_the_step_and_processes_get_parts_of_it() -> None:
    feed = make_feed(uint8=True)
    assert isinstance(feed.data, ImageSet)
    whole = list(feed.train_batches(8, augment=True, seed=5, epoch=1))
    for step, items in enumerate(epoch_order(feed.splits.train, seed=5, epoch=1).split(8)):
        shifts = draw_shifts(len(items), torch.Generator().manual_seed(step_seed(5, 1, step)))
        assert torch.equal(whole[step][0], normalise(shift(feed.data.images[items], shifts)))
    for rank in range(3):  # the last batch has two items
        *parts, last = feed.train_batches(8, augment=True, seed=5, epoch=1, share=(rank, 3))
        for (images, labels), (of_all, all_labels) in zip(parts, whole):
            assert torch.equal(images, of_all[rank::3]) and torch.equal(labels, all_labels[rank::3])
        assert len(last[1]) == 1 and (int(last[1]) == NO_LABEL) == (rank == 2)


def test_evaluates_in_eval_mode_and_gives_the_mode_back() -> None:
    feed, net = make_feed(), make_net(dropout=0.5)
    net.train()
    net[1].eval()
    found = evaluate(net, feed, feed.splits.test)
    assert net.training and not net[1].training
    net.eval()
    images, labels = next(feed.eval_batches(feed.splits.test))
    with torch.no_grad():
        logits = net(images)
    assert (found.n, found.n_top1, found.n_top5) == (20, int((logits.argmax(1) == labels).sum()), 20)
    assert found.loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)


def test_nan_logits_are_never_right() -> None:
    feed, net = make_feed(), make_net()
    with torch.no_grad():
        net[5].weight.fill_(torch.nan)
    found = evaluate(net, feed, feed.splits.test)
    assert found.n_top1 == 0 and found.n_top5 == 0


def test_divergence_is_an_error() -> None:
    feed, net = make_feed(), make_net()
    hyper = hyperparameters(3, 8, 1e30)
    with pytest.raises(ModelError, match="diverged: the loss of epoch"):
        train(new_state(net, hyper), feed, hyper, seed=0)


def test_out_of_memory_names_the_size_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, net = make_feed(), make_net()

    def forward(images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(net, "forward", forward)
    with pytest.raises(
        ModelError, match=r"epoch 1, step 1: out of memory with batch_size=8; set train.batch_size to 4"
    ):
        train(new_state(net, HYPER), feed, HYPER, seed=0)


# --- the loss of distillation -----------------------------------------------------------------------------------------

WEIGHT, T = 0.3, 2.5


def by_hand(logits: list[list[float]], labels: list[int], taught: list[list[float]]) -> float:
    """The sum of (1 - w) CE + w T^2 sum_c p_c (log p_c - log q_c), item by item."""

    def softmax(row: list[float], t: float) -> list[float]:
        top = [math.exp(value / t) for value in row]
        return [one / sum(top) for one in top]

    total = 0.0
    for row, label, target in zip(logits, labels, taught):
        if label == NO_LABEL:
            continue
        p, q = softmax(target, T), softmax(row, T)
        kl = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q))
        total += (1 - WEIGHT) * -math.log(softmax(row, 1.0)[label]) + WEIGHT * T**2 * kl
    return total


def test_the_loss_is_its_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    taught = torch.randn(6, 4, generator=generator, dtype=torch.float64) * 3
    labels = torch.tensor([0, 3, 1, NO_LABEL, 2, 2])
    found = distilled_losses(logits, labels, taught, Distill(weight=WEIGHT, temperature=T)).sum()
    expected = by_hand(logits.tolist(), labels.tolist(), taught.tolist())
    assert math.isclose(found.item(), expected, rel_tol=1e-12)


def test_a_step_follows_the_teacher_and_leaves_it_alone() -> None:
    torch.manual_seed(0)
    net, parent = nn.Linear(5, 3), nn.Linear(5, 3).eval().requires_grad_(False)
    images, labels = torch.randn(16, 5), torch.zeros(16, dtype=torch.long)
    before, untaught = {k: v.clone() for k, v in parent.state_dict().items()}, net.weight.detach().clone()
    # The labels, all 0, count nothing.
    hyper = hyperparameters(1, 16, 1.0, momentum=0.0, distill=Distill(weight=1.0, temperature=1.0))
    state = new_state(net, hyper)
    losses = []  # added up
    for n_done in range(401):
        set_rate(state.optimizer, float(n_done > 0))
        train_step(state, hyper, images, labels, 16, parent)
        losses.append(state.sums[0].item() / 16)
    assert torch.equal(net(images).argmax(1), parent(images).argmax(1)) and losses[0] > 0.05
    assert not torch.equal(net.weight, untaught)
    assert all(torch.equal(before[k], v) for k, v in parent.state_dict().items())


# --- the learning rate, written out epoch by epoch --------------------------------------------------------------------


def slow_rate(peak: float, warmup: float, factor: float, decays: list[int], epoch: float) -> float:
    """The table's words: linear from 0 over the warm-up, times the factor once for every decay epoch reached."""
    value = peak
    if epoch < warmup:
        value = peak * epoch / warmup
    for decay in decays:
        if epoch >= decay:
            value *= factor
    return value


@given(
    st.floats(0.001, 1.0),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([0.1, 0.2, 0.5]),
    st.lists(st.integers(1, 60), unique=True, max_size=4),
    st.floats(0, 80),
)
def test_milestones(peak: float, warmup: float, factor: float, decays: list[int], epoch: float) -> None:
    hyper = hyperparameters(90, 1, peak, warmup_epochs=warmup, factor=factor, milestones=tuple(sorted(decays)))
    expected = slow_rate(peak, warmup, factor, decays, epoch)
    assert math.isclose(learning_rate(hyper, epoch), expected, rel_tol=1e-12, abs_tol=sys.float_info.min)
