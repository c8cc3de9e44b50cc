"""Training: the update against a hand-written one, order, masks, resuming after any step, evaluation."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lab.hyperparameters import hyperparameters
from torch import nn

from sipp.errors import ModelError
from sipp_lab.data.imageset import ImageSet
from sipp_lab.data.splits import epoch_order, split_images
from sipp_lab.training.feed import Feed, eval_batches, train_batches
from sipp_lab.training.loop import TrainState, evaluate, new_state, train
from sipp_lab.training.step import learning_rate

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
    whole = train(start, feed, hyper, seed=3, on_epoch=keep)
    for state in kept[:-1]:
        torch.rand(state.epoch)  # whatever others draw in between
        resumed = train(state, feed, hyper, seed=3)
        assert equal(bits(resumed), bits(whole)) and resumed.rows == whole.rows
    other = train(new_state(make_net(channels=3, dropout=0.3), hyper), feed, hyper, seed=4)
    assert not equal(bits(other), bits(whole))


def test_every_step_has_a_seed_of_its_own() -> None:
    seeds = list[int]()

    def note(state: TrainState) -> None:
        seeds.append(torch.initial_seed())

    train(new_state(make_net(), HYPER), make_feed(), HYPER, seed=7, on_step=note)
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

    def check(state: TrainState) -> None:
        weight = state.model.get_parameter("5.weight")
        assert not bool(weight[~masks["5.weight"]].any())

    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN has no bfloat16 on older processors
        train(state, feed, hyper, seed=0, on_step=check)
    kept = masks["5.weight"]
    assert not torch.equal(net[5].weight[kept], before[kept])  # and the others do learn


def test_every_item_once_an_epoch_in_another_order() -> None:
    feed = make_feed()
    orders = []
    for epoch in (0, 1):
        batches = list(train_batches(feed, HYPER, seed=0, epoch=epoch))
        assert [len(labels) for _, (_, labels) in batches] == [8, 8, 8, 2]
        orders.append(torch.cat([images for _, (images, _) in batches]).flatten(1).sum(1))
    assert torch.equal(orders[0].sort().values, orders[1].sort().values) and not torch.equal(*orders)


def test_evaluates_in_eval_mode_and_gives_the_mode_back() -> None:
    feed, net = make_feed(), make_net(dropout=0.5)
    net.train()
    net[1].eval()
    found = evaluate(net, feed, feed.splits.test)
    assert net.training and not net[1].training
    net.eval()
    images, labels = next(eval_batches(feed, feed.splits.test))
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
    with pytest.raises(ModelError, match=r"epoch 1, step 1, with batch_size=8; set train.batch_size to 4"):
        train(new_state(net, HYPER), feed, HYPER, seed=0)
