"""What a network executes is followed, whatever its code looks like, or refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracles.true_error import Apply, Shifted, covers
from sound_bounds import sound_bound
from torch import Tensor, nn

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
    """`out += ..` overwrites the skip connection too."""

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
        assert covers(dense, pruned, x, sound_bound(dense, pruned, x))


def test_a_part_that_was_overwritten_has_no_bound() -> None:
    dense = OverwrittenPart()
    reason = sound_bound(dense, copy.deepcopy(dense), torch.ones(2, 2)).reason
    assert reason.startswith("no bound: op hardswish in module act") and "overwrites a part" in reason


def test_a_view_of_all_values_is_overwritten_with_them() -> None:
    def reshaped(x: Tensor) -> Tensor:
        out = 2 * x
        out.view(-1, 2).tanh_()
        return out

    dense = Shifted(torch.zeros(4), Apply(reshaped))
    pruned = Shifted(torch.full((4,), 0.1), Apply(reshaped))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert covers(dense, pruned, x, sound_bound(dense, pruned, x))


# Any code.


class Branches(nn.Module):
    """Branches on the batch's shape, catches errors, works in place."""

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


def test_whatever_runs_is_followed() -> None:
    torch.manual_seed(0)
    dense = Branches()
    dense.norm.running_mean.uniform_(-1, 1)
    pruned = copy.deepcopy(dense)
    pruned.conv.weight.data *= torch.rand_like(pruned.conv.weight) < 0.5
    x = torch.randn(3, 2, 7, 7)
    bound = sound_bound(dense, pruned, x)
    assert covers(dense, pruned, x, bound)


def test_an_error_that_the_model_catches_is_still_a_refusal() -> None:
    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x)
            try:
                return out * out
            except Exception:
                return out

    assert "op mul in module" in sound_bound(Catches(), Catches(), torch.ones(2, 2)).reason


@pytest.mark.parametrize("leak", [lambda x: x.numpy().copy(), lambda x: x.tolist()])
def test_values_that_leave_pytorch_are_noticed_by_the_output(leak: Callable[[Tensor], object]) -> None:
    class Leaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.fc(x)
            return out + 100 * torch.as_tensor(leak(out), dtype=out.dtype)

    dense = Leaks()
    pruned = copy.deepcopy(dense)
    pruned.fc.weight.data[0, 0] = 0.0
    assert sound_bound(dense, pruned, torch.ones(2, 2)).epsilon is None


class StaysInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> StaysInTraining:
        super().train(mode)
        self.bn.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.first(x))


def test_batch_norm_that_uses_the_batch() -> None:
    reason = sound_bound(StaysInTraining(), StaysInTraining(), torch.randn(5, 6)).reason
    assert "it uses the statistics of the batch" in reason or "it changes a constant in place" in reason


# No bound, and the reason.


def _batch_statistics() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False))


REFUSED: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "layer norm": (
        nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
        (2,),
        "op native_layer_norm in module 1 .LayerNorm.",
    ),
    "transposed": (
        nn.Sequential(nn.ConvTranspose2d(2, 2, 2)),
        (2, 4, 4),
        "op convolution in module 0.*it is transposed",
    ),
    "batch statistics": (
        _batch_statistics(),
        (2, 3, 3),
        "op native_batch_norm in module 1.*it uses the statistics",
    ),
    "product": (Apply(lambda x: x * x), (3,), "op mul in module body.*it combines two network values"),
    "divided by": (Apply(lambda x: 1 / x), (3,), "op reciprocal in module body"),
    "matmul": (Apply(lambda x: x @ x.transpose(1, 2)), (3, 3), "op bmm in module body"),
    "random": (Apply(lambda x: F.dropout(x, 0.5)), (3,), "op bernoulli in module body.*it is random"),
    "batch mean": (Apply(lambda x: x - x.mean(0)), (3,), "op mean in module body.*it acts along the batch"),
    "another type": (Apply(lambda x: torch.softmax(x, 1, torch.float16)), (3,), "op _to_copy in module body"),
    "bits": (
        Apply(lambda x: x.view(torch.float32)),
        (3,),
        "op view in module body.*it reads the values as another type",
    ),
    "flipped batch": (Apply(lambda x: x.flip(0)), (3,), "op flip in module body.*it mixes the samples"),
    "joined batch": (
        Apply(lambda x: torch.cat([x, x], 0)[:2]),
        (3,),
        "op cat in module body.*it joins along the batch",
    ),
    "choice": (
        Apply(lambda x: x[:, 0] if x[0, 0] > 0 else -x),
        (3,),
        "op select in module body.*it moves the batch",
    ),
    "elu": (
        Apply(lambda x: torch.ops.aten.elu.default(x, 1.0, 1.0, -1.0)),
        (3,),
        "op elu in module body.*its input_s",
    ),
    "softplus": (nn.Softplus(), (3,), "op softplus in module body"),
    "divisor": (nn.AvgPool2d(2, divisor_override=3), (1, 4, 4), "op avg_pool2d in module body"),
    "threshold": (nn.Threshold(0.5, 0.0), (3,), "op threshold in module body"),
    "written elsewhere": (
        Apply(lambda x: torch.add(x, x, out=torch.empty_like(x))),
        (3,),
        "op add in module body.*it writes its result into another",
    ),
    "written": (
        Apply(lambda x: torch.zeros_like(x).copy_(x)),
        (3,),
        "op copy in module body",
    ),
    "tuple": (Apply(lambda x: (x, x)), (3,), "the model returns a tuple"),
    "constant": (Apply(lambda x: torch.ones(len(x), 2)), (3,), "the model does not return one tensor with a row"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_operation_without_a_bound_is_named(name: str) -> None:
    body, shape, reason = REFUSED[name]
    dense = body if isinstance(body, nn.Sequential) else Shifted(torch.zeros(shape), body)
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    bound = sound_bound(dense, copy.deepcopy(dense), x)
    assert bound.epsilon is None
    assert re.match(f"no bound: {reason}", bound.reason), bound.reason
