"""What a graph may lose (overwritten tensors, branches, operations without a bound) is followed or refused by name."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from oracles.true_error import Apply, Shifted, true_errors
from torch import Tensor, fx, nn

from sipp.bounds.sound.graph_bound import GraphBound, sound_bound
from sipp.errors import DataError, ModelError

# The true error is itself measured in float64; the bound speaks of exact arithmetic.
MEASURED = 1e-12


def _covers(dense: nn.Module, pruned: nn.Module, x: Tensor, bound: GraphBound) -> bool:
    """Whether the bound is at least the true error for every sample."""
    assert bound.reason == ""
    true_B, size_B = true_errors(dense, pruned, x)
    return bool((bound.absolute_B + MEASURED * size_B >= true_B).all())


# Tensors with two names.


class OverwrittenSkip(nn.Module):
    """The skip connection sees the value after the activation, which overwrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(2, 2)
        self.act = nn.Hardswish(inplace=True)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        skip = out
        return self.head(self.act(out)) + skip


class AugmentedSkip(OverwrittenSkip):
    """`out += ..` overwrites the skip connection too, which torch.fx does not see."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        skip = out
        out += x
        return self.head(out) + skip


class OverwrittenPart(OverwrittenSkip):
    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        part = out[:, :1]
        return self.head(self.act(out)) + part


@pytest.mark.parametrize("kind", [OverwrittenSkip, AugmentedSkip])
def test_a_skip_connection_that_was_overwritten_is_followed(kind: type[nn.Module]) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        dense = kind()
        pruned = copy.deepcopy(dense)
        pruned.conv.weight.data *= 1.5
        x = torch.full((2, 2), 4.0)
        assert _covers(dense, pruned, x, sound_bound(dense, pruned, x))


def test_the_error_of_an_overwritten_skip_connection_is_the_one_after() -> None:
    # Where hardswish is steepest the overwritten value's error is 1.5 times the first one's.
    dense = OverwrittenSkip().double()
    dense.conv.weight.data, dense.conv.bias.data = torch.eye(2).double(), torch.zeros(2).double()
    dense.head.weight.data.zero_()
    pruned = copy.deepcopy(dense)
    pruned.conv.bias.data -= 1e-6
    x = torch.full((1, 2), 3.0, dtype=torch.float64)
    bound = sound_bound(dense, pruned, x)
    assert _covers(dense, pruned, x, bound)
    assert bound.absolute_B.item() == pytest.approx(1.5 * math.sqrt(2) * 1e-6, rel=1e-4)


def test_a_part_that_was_overwritten_has_no_bound() -> None:
    dense = OverwrittenPart()
    reason = sound_bound(dense, copy.deepcopy(dense), torch.ones(2, 2)).reason
    assert reason.startswith("no bound: op Hardswish in module act") and "overwrites a part" in reason


# torch.export where torch.fx fails.


class Branches(nn.Module):
    """A branch on the batch's shape, which torch.fx cannot trace and torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 3)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 100:
            return x
        out = self.act(self.norm(self.conv(x)))
        left, right = out.chunk(2, dim=1)
        out = F.max_pool2d(torch.cat([right, left], 1), 3, 2)
        out += F.elu(out, 2.0)
        return self.fc(self.drop(F.adaptive_avg_pool2d(out, 1).flatten(1))) / 2 - 1


class DataBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else x


def test_what_fx_cannot_trace_is_exported() -> None:
    torch.manual_seed(0)
    dense = Branches()
    dense.norm.running_mean.uniform_(-1, 1)
    pruned = copy.deepcopy(dense)
    pruned.conv.weight.data *= torch.rand_like(pruned.conv.weight) < 0.5
    x = torch.randn(3, 2, 7, 7)
    bounds = [sound_bound(dense, pruned, x, fold_batchnorm=fold) for fold in (True, False)]
    assert all(_covers(dense, pruned, x, bound) for bound in bounds)
    assert (bounds[0].absolute_B <= bounds[1].absolute_B * (1 + 1e-6)).all()
    assert {"conv2d+batch_norm", "max_pool2d", "cat", "elu", "linear"} <= {node.op for node in bounds[0].nodes}


def test_a_model_that_nothing_can_trace_has_no_bound() -> None:
    dense = DataBranch()
    bound = sound_bound(dense, copy.deepcopy(dense), torch.ones(2, 2))
    assert bound.reason.startswith("no bound: could not trace: fx: ") and "export: " in bound.reason
    assert bound.epsilon is None and bound.epsilon_B is None and bound.absolute_B is None


# No bound, and the reason.


@fx.wrap
def relu(x: Tensor) -> Tensor:
    """Not the function its name says."""
    return 5 * x


def _batch_statistics() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False))


REFUSED: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "layer norm": (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), (2,), "op LayerNorm in module 1"),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(2, 2, 2)), (2, 4, 4), "op ConvTranspose2d in module 0"),
    "batch statistics": (_batch_statistics(), (2, 3, 3), "op BatchNorm2d in module 1 .it uses the statistics"),
    "product": (Apply(lambda x: x * x), (3,), "op mul in module body .it combines two network values"),
    "divided by": (Apply(lambda x: 1 / x), (3,), "op div in module body"),
    "matmul": (Apply(lambda x: x @ x.transpose(1, 2)), (3, 3), "op matmul in module body"),
    "power": (Apply(lambda x: x**2), (3,), "op pow in module body"),
    "random": (Apply(lambda x: F.dropout(x, 0.0)), (3,), "op dropout in module body .it drops values at random"),
    "noise": (Apply(lambda x: x + torch.rand(3)), (3,), "could not trace: fx: the graph does not repeat"),
    "batch mean": (Apply(lambda x: x - x.mean(0)), (3,), "op mean in module body .it acts along the batch"),
    "softmax of all": (
        Apply(lambda x: torch.softmax(x, 0)),
        (3,),
        "op softmax in module body .it acts along the batch",
    ),
    "merged batch": (Apply(lambda x: x.reshape(-1, 1).tanh().view(x.shape)), (3,), "op reshape in module body"),
    "flipped batch": (Apply(lambda x: x.flip(0)), (3,), "op flip in module body .it mixes the samples"),
    "joined batch": (
        Apply(lambda x: torch.cat([x, x], 0)[:2]),
        (3,),
        "op cat in module body .it joins along the batch",
    ),
    "wrapped name": (Apply(lambda x: relu(x)), (3,), r"op .*\.relu in module body"),
    "indices": (nn.Sequential(nn.MaxPool1d(2, return_indices=True), Apply(lambda x: x[0])), (1, 4), "op MaxPool1d"),
    "divisor": (nn.Sequential(nn.AvgPool2d(2, divisor_override=3)), (1, 4, 4), "op AvgPool2d in module 0"),
    "threshold": (nn.Sequential(nn.Threshold(0.5, 0.0)), (3,), "op Threshold in module 0"),
    "tuple": (Apply(lambda x: (x, x)), (3,), "the model returns a tuple"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_operation_without_a_bound_is_named(name: str) -> None:
    body, shape, reason = REFUSED[name]
    dense = body if isinstance(body, nn.Sequential) else Shifted(torch.zeros(shape), body)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    bound = sound_bound(dense, copy.deepcopy(dense), x)
    assert bound.epsilon is None
    assert re.match(f"no bound: {reason}", bound.reason), bound.reason


class Reordered(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)[:, self.order]


def test_an_order_that_differs_between_the_networks_is_refused() -> None:
    dense, pruned = Reordered([0, 1, 1]), Reordered([1, 0, 0])
    pruned.fc.load_state_dict(dense.fc.state_dict())
    assert sound_bound(dense, copy.deepcopy(dense), torch.ones(2, 3)).epsilon == 0.0
    reason = sound_bound(dense, pruned, torch.ones(2, 3)).reason
    assert reason == "no bound: op getitem in module the model itself (it depends on a parameter that was changed)"


def test_hooks_are_refused() -> None:
    dense = nn.Sequential(nn.Linear(2, 2))
    pruned = copy.deepcopy(dense)
    pruned[0].register_forward_hook(lambda module, args, output: 3 * output)
    assert (
        sound_bound(dense, pruned, torch.ones(1, 2)).reason == "no bound: forward hook in module 0 of the pruned model"
    )


def test_networks_of_another_architecture_are_refused() -> None:
    dense = nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1))
    for other in (
        nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.2)),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 3), nn.LeakyReLU(0.1)),
    ):
        with pytest.raises(ModelError, match="differ"):
            sound_bound(dense, other, torch.ones(1, 2))


def test_bad_numbers_are_refused_by_name() -> None:
    dense = nn.Sequential(nn.Linear(2, 2))
    pruned = copy.deepcopy(dense)
    pruned[0].weight.data[0, 0] = math.nan
    with pytest.raises(ModelError, match=r"0\.weight of the pruned"):
        sound_bound(dense, pruned, torch.ones(1, 2))
    x = torch.ones(3, 2)
    x[2, 0] = math.inf
    with pytest.raises(DataError, match="sample 2"):
        sound_bound(dense, dense, x)
    with pytest.raises(DataError, match="number of samples"):
        sound_bound(dense, dense, torch.ones(0, 2))
