"""GraSP: the order of its definition, with the sign of the paper; the model left alone."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracles import scores as oracle
from torch import Tensor, nn
from torch.func import functional_call

from sipp.errors import DataError, ModelError
from sipp.scoring.grasp import grasp
from sipp.scoring.ordinals import ordinals
from sipp.scoring.task import task_of


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x, x, x, need_weights=False)[0].mean(1))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)), (2, 3, 3)),
    "lstm": (Tagger, (4, 3)),
    "attention": (Attending, (3, 4)),
}


def case(kind: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(5)
    make, shape = NETS[kind]
    data = [(torch.randn(n, *shape, dtype=torch.float64), torch.randint(0, 3, (n,))) for n in (4, 7)]
    return make().double(), data


def removed_first(model: nn.Module, names: list[str], data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """S of all named weights, laid end to end."""
    shapes = [model.get_parameter(name).shape for name in names]

    def total_loss(flat: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        named = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes)}
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            losses = [F.cross_entropy(functional_call(model, named, x), y, reduction="sum") for x, y in data]
        return torch.stack(losses).sum()

    with torch.backends.mkldnn.flags(enabled=False):
        return oracle.grasp(total_loss, torch.cat([model.get_parameter(name).detach().flatten() for name in names]))


@pytest.mark.parametrize("kind", NETS)
def test_it_keeps_the_smallest_of_the_papers_scores(kind: str) -> None:
    model, data = case(kind)
    scores = grasp(task_of(model, data))
    expected = removed_first(model, list(scores), data)
    found = torch.cat([score.flatten() for score in scores.values()])
    assert bool((expected > 0).any()) and bool((expected < 0).any())  # the sign decides, not the magnitude
    falling = expected[found.argsort(descending=True, stable=True)]  # kept first: S from the smallest to the largest
    assert bool((falling.diff() >= -1e-9 * expected.abs().max()).all())
    assert int(found.max()) > 0.8 * len(found)  # ordinals, not a constant


def test_removing_a_weight_of_high_place_costs_gradient() -> None:
    """The sign from first principles: shrink a weight a little, and look at the norm of the gradient."""
    model, data = case("linear")
    scores = grasp(task_of(model, data))
    name, score = "0.weight", scores["0.weight"]

    def squared_norm(shrunk: int | None) -> float:
        moved = copy.deepcopy(model)
        if shrunk is not None:
            with torch.no_grad():
                moved.get_parameter(name).view(-1)[shrunk] *= 1 - 1e-6
        loss = sum(F.cross_entropy(moved(x), y, reduction="sum") for x, y in data)
        return sum(float(g.square().sum()) for g in torch.autograd.grad(loss, [moved[0].weight, moved[2].weight]))

    best, worst = int(score.argmax()), int(score.argmin())
    assert squared_norm(best) < squared_norm(None) < squared_norm(worst)


def test_zero_weights_rank_between_negative_and_positive_scores() -> None:
    model, data = case("linear")
    with torch.no_grad():
        model[0].weight[2] = 0.0
    scores = grasp(task_of(model, data))
    zero = scores["0.weight"][2].unique()
    everything = torch.cat([score.flatten() for score in scores.values()])
    assert len(zero) == 1 and bool((everything < zero).any()) and bool((everything > zero).any())


def test_ordinals_are_exact_where_a_shift_is_not() -> None:
    first, second = ordinals([torch.tensor([[1e-30, -1.0]]).double(), torch.tensor([2e-30, 0.0, -0.0, 1e-30]).double()])
    assert first.tolist() == [[2.0, 0.0]] and second.tolist() == [3.0, 1.0, 1.0, 2.0]
    assert ordinals([]) == []


def test_a_loss_that_is_linear_in_the_weights_has_no_curvature() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    loss = lambda output, labels: output.sum()  # noqa: E731
    data = [(torch.ones(2, 3), torch.zeros(2))]
    assert not bool(grasp(task_of(model, data, loss=loss))["0.weight"].any())


def test_it_reads_an_iterator_once_leaves_the_model_alone_and_refuses_nan() -> None:
    model, data = case("linear")
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    once, again = grasp(task_of(model, iter(data))), grasp(task_of(model, data))
    assert all(torch.equal(once[name], score) for name, score in again.items())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not model[0].weight.requires_grad and model[2].weight.grad is None
    with pytest.raises(DataError, match="labels, which grasp needs"):
        grasp(task_of(model, [data[0][0]]))
    nan = float("nan")
    with pytest.raises(ModelError, match=r"0\.weight.*NaN"):
        grasp(task_of(model, data, loss=lambda output, labels: output.square().sum() * nan))
