"""The loss of distillation against its formula, and that a step learns by it."""

import math

import torch
from lab.hyperparameters import hyperparameters
from lab.training.test_loop import make_feed
from torch import nn

from sipp_lab.recipes.schema import Distill
from sipp_lab.training.feed import NO_LABEL
from sipp_lab.training.loop import TrainState, make_train_step
from sipp_lab.training.step import distilled_losses

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
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    sums = torch.zeros(3, dtype=torch.float64)
    hyper = hyperparameters(
        1, 16, 1.0, distill=Distill(weight=1.0, temperature=1.0)
    )  # the labels, all 0, count nothing
    step = make_train_step(TrainState(net, optimizer, sums), make_feed(), hyper, teacher=parent)
    step(images, labels, 0.0, 16)
    first = sums[0].item() / 16
    for _ in range(400):
        step(images, labels, 1.0, 16)
    assert torch.equal(net(images).argmax(1), parent(images).argmax(1)) and first > 0.05
    assert not torch.equal(net.weight, untaught)
    assert all(torch.equal(before[k], v) for k, v in parent.state_dict().items())
