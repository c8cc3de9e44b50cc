"""T13 of whole networks: the bound covers the true error, follows whatever runs, and is refused by name elsewhere."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracles.true_error import Apply, Shifted, covers
from sound_bounds import sound_bound
from torch import Tensor, nn

import sipp
from sipp.bounds import sound

N_SEEDS = 12  # times four architectures, each on four inputs

# --- Random networks --------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second, self.norm2 = nn.Conv2d(6, 6, 3, padding=1, groups=2), nn.BatchNorm2d(6)
        self.act, self.short, self.head = act, nn.Conv2d(3, 6, 1, stride=2), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(self.act(self.norm(self.first(x)))))
        out += self.short(x)
        return self.head(F.relu(out).mean((2, 3)))


class Concat(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 3, 3, padding=2, dilation=2, padding_mode="reflect")
        self.narrow, self.act, self.pool = nn.Conv2d(3, 2, 1), act, nn.MaxPool2d(3, stride=2, padding=1)
        self.head, self.scale = nn.Linear(8 * 16, 3), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([self.act(self.wide(x)), self.narrow(x), x], dim=1) * self.scale - 0.5
        return self.head(self.pool(out).view(x.size(0), -1)) / 2


class Shared(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.embed, self.conv, self.act = nn.Conv1d(2, 4, 3, stride=2), nn.Conv1d(4, 4, 3, padding=1), act
        self.offset = nn.Parameter(torch.zeros(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.embed(x)
        for _ in range(3):
            out = self.act(self.conv(out)) + self.offset
        return torch.flatten(F.avg_pool1d(out, 2), 1)


def convnet(act: nn.Module) -> nn.Module:
    first = nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate")
    second = nn.Conv2d(4, 4, (3, 1), groups=4, padding="same")
    pool = nn.AvgPool2d(2, ceil_mode=True, padding=1)
    rest = (nn.ReLU6(inplace=True), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    return nn.Sequential(first, act, pool, second, *rest)


ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, lambda: nn.LeakyReLU(1.5), lambda: nn.ReLU(inplace=True)]
ARCHITECTURES: dict[str, tuple[Callable[[nn.Module], nn.Module], tuple[int, ...]]] = {
    "convnet": (convnet, (3, 8, 8)),
    "residual": (Residual, (3, 8, 8)),
    "concat": (Concat, (3, 8, 8)),
    "shared": (Shared, (2, 11)),
}


def random_net(architecture: str, seed: int) -> tuple[nn.Module, nn.Module, Tensor]:
    """A random network, a random pruning and re-weighting of it, and inputs of every size, zero among them."""
    generator = torch.Generator().manual_seed(seed)
    build, shape = ARCHITECTURES[architecture]
    dense = build(ACTIVATIONS[seed % len(ACTIVATIONS)]())
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(parameter[0].numel(), 1) ** 0.5)
        for name, buffer in dense.named_buffers():
            if "running" in name:
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.1)
        pruned = copy.deepcopy(dense)
        for name, parameter in pruned.named_parameters():
            if "bias" not in name or seed % 3 == 0:
                kept = torch.rand(parameter.shape, generator=generator) < (0.1, 0.5, 0.9, 0.99)[seed % 4]
                parameter.mul_(kept * (1 + (seed % 5 == 0) * torch.randn(parameter.shape, generator=generator)))
        for name, buffer in pruned.named_buffers():
            if "running" in name and seed % 4 == 1:
                buffer.mul_(1 + 0.2 * torch.rand(buffer.shape, generator=generator))
    x = torch.randn(4, *shape, generator=generator)
    x[1], x[2], x[3] = 0.0, x[2] * 1e-9, x[3] * 1e6
    return dense, pruned, x


def is_covered(dense: nn.Module, pruned: nn.Module, x: Tensor) -> bool:
    return covers(dense, pruned, x, sound_bound(dense, pruned, x))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_bound_covers_the_true_error_of_random_networks(architecture: str) -> None:
    assert [seed for seed in range(N_SEEDS) if not is_covered(*random_net(architecture, seed))] == []


# --- Values -----------------------------------------------------------------------------------------------------------


def test_errors_of_zero_and_outputs_of_zero() -> None:
    dense = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    dense[0].weight.data[:], dense[0].bias.data[:] = 1.0, -5.0
    x, pruned = torch.tensor([[1.0], [9.0]]), copy.deepcopy(dense)
    same = sound_bound(dense, pruned, x)
    assert same.epsilon_B.tolist() == [0.0, 0.0] and same.absolute_B.tolist() == [0.0, 0.0]  # also where f(x) is 0
    pruned[0].bias.data[:] = -4.0
    bound = sound_bound(dense, pruned, x)
    assert bound.epsilon_B[0] == math.inf and bound.epsilon_B[1] == pytest.approx(0.25)
    assert bound.absolute_B.tolist() == pytest.approx([1.0, 1.0])


def test_overflow_makes_the_bound_infinite_not_small() -> None:
    dense = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Tanh()).double()
    for layer in dense[:2]:
        layer.weight.data[:] = 1e200
    pruned = copy.deepcopy(dense)
    pruned[0].weight.data[:] = -1e200
    bound = sound_bound(dense, pruned, torch.ones(1, 1))
    assert bound.absolute_B.item() == math.inf and bound.epsilon == math.inf


# --- Whatever runs is followed ----------------------------------------------------------------------------------------


class Skip(nn.Module):
    """A skip connection beside something done to the first layer's output, perhaps in place."""

    def __init__(self, function: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.act, self.head = nn.Linear(2, 2), nn.LeakyReLU(0.3, inplace=True), nn.Linear(2, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.conv(x), x)


def augmented(net: Skip, out: Tensor, x: Tensor) -> Tensor:
    skip = out
    out += x  # overwrites the skip connection too
    return net.head(out) + skip


def through_a_view(net: Skip, out: Tensor, x: Tensor) -> Tensor:
    out.view(-1, 2).tanh_()
    return out


def by_shape(net: Skip, out: Tensor, x: Tensor) -> Tensor:
    if len(x) > 100:
        return x
    left, right = out.chunk(2, dim=1)
    return torch.cat([right, net.head(out)[:, :1], left], 1) / 2 - 1


FOLLOWED = (lambda net, out, x: net.head(net.act(out)) + out, augmented, through_a_view, by_shape)


@pytest.mark.parametrize("function", FOLLOWED)
def test_overwritten_values_views_and_branches_are_followed(function: Callable[..., Tensor]) -> None:
    dense = Skip(function)
    pruned = copy.deepcopy(dense)
    pruned.conv.weight.data *= 1.5
    assert is_covered(dense, pruned, torch.full((2, 2), 4.0))


def catches(net: Skip, out: Tensor, x: Tensor) -> Tensor:
    try:
        return out * out
    except Exception:
        return out


def overwrites_a_part(net: Skip, out: Tensor, x: Tensor) -> Tensor:
    part = out[:, :1]
    return net.act(out) + part


def leaks(net: Skip, out: Tensor, x: Tensor) -> Tensor:
    return out + 100 * torch.as_tensor(out.tolist(), dtype=out.dtype)


def own_statistics(net: Skip, out: Tensor, x: Tensor) -> Tensor:
    return F.batch_norm(out, None, None, training=True)


REFUSED: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "layer norm": (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), (2,), "op native_layer_norm in module 1 .LayerNo"),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(2, 2, 2)), (2, 4, 4), "op convolution in module 0.*it is transp"),
    "batch statistics": (Skip(own_statistics), (2,), "op native_batch_norm in module.*it uses the statistics"),
    "part overwritten": (Skip(overwrites_a_part), (2,), "op leaky_relu in module act.*it overwrites a part"),
    "caught": (Skip(catches), (2,), "op mul in module"),
    "leaks": (Skip(leaks), (2,), ""),
    "product": (Apply(lambda x: x * x), (3,), "op mul in module body.*it combines two network values"),
    "divided by": (Apply(lambda x: 1 / x), (3,), "op reciprocal in module body"),
    "matmul": (Apply(lambda x: x @ x.transpose(1, 2)), (3, 3), "op bmm in module body"),
    "random": (Apply(lambda x: F.dropout(x, 0.5)), (3,), "op bernoulli in module body.*it is random"),
    "batch mean": (Apply(lambda x: x - x.mean(0)), (3,), "op mean in module body.*it acts along the batch"),
    "bits": (Apply(lambda x: x.view(torch.float32)), (3,), "op view in module body.*it reads the values as another"),
    "mixed batch": (Apply(lambda x: x[[1, 0]]), (3,), "op index in module body.*it mixes the samples"),
    "joined batch": (Apply(lambda x: torch.cat([x, x], 0)[:2]), (3,), "op cat in module body.*it joins along the ba"),
    "choice": (Apply(lambda x: x[:, 0] if x[0, 0] > 0 else -x), (3,), "op select in module body.*it moves the batch"),
    "written": (Apply(lambda x: torch.zeros_like(x).copy_(x)), (3,), "op copy in module body"),
    "out": (Apply(lambda x: torch.add(x, x, out=torch.empty_like(x))), (3,), "op add in module body.*it writes its"),
    "divisor": (nn.AvgPool2d(2, divisor_override=3), (1, 4, 4), "op avg_pool2d in module body"),
    "tuple": (Apply(lambda x: (x, x)), (3,), "the model returns a tuple"),
    "constant": (Apply(lambda x: torch.ones(len(x), 2)), (3,), "the model does not return one tensor with a row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_without_a_bound_is_named(name: str) -> None:
    body, shape, reason = REFUSED[name]
    dense = body if isinstance(body, nn.Sequential | Skip) else Shifted(torch.zeros(shape), body)
    given = copy.deepcopy(dense)
    if name == "leaks":  # what leaves PyTorch is noticed by the output
        given.conv.weight.data[0, 0] = 0.0
    bound = sound_bound(dense, given, torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)))
    assert bound.epsilon is None
    assert re.match(reason, bound.reason), bound.reason


# --- Rounding: the statement is about the networks as they run (T18) --------------------------------------------------


def points(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, 20, generator=torch.Generator().manual_seed(seed)).to(dtype)


def beyond(dtype: torch.dtype) -> tuple[float, float, float]:
    """The share of new inputs beyond the statement, the share it allows and its epsilon, for one barely changed net."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 4)).to(dtype)
    given = copy.deepcopy(dense)
    with torch.no_grad():  # one weight, by one unit of the type: what shows is rounding
        given[0].weight[0, 0] *= 1 + torch.finfo(dtype).eps
    bound = sipp.assess(dense, given, points(100, 1, dtype), bound="sound", holdout=points(300, 2, dtype)).bound
    assert bound.met, bound.reason
    x = points(2000, 3, dtype)
    with torch.no_grad():
        # One network runs on all points at once, the other point by point: sums may go in another order.
        f, g = dense(x).double(), torch.cat([given(part) for part in x.split(1)]).double()
    is_beyond = (g - f).norm(dim=1) > bound.epsilon * f.norm(dim=1)
    return float(is_beyond.double().mean()), bound.coverage.share, bound.epsilon


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_is_in_the_statement(dtype: torch.dtype) -> None:
    share, allowed, epsilon = beyond(dtype)
    assert share <= allowed and epsilon < 4000 * torch.finfo(dtype).eps


def test_the_check_sees_a_statement_without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = sound.error_bounds
    monkeypatch.setattr(sound, "_as_run", lambda dense, pruned, batch, error_B: exact(dense, pruned, batch))
    for dtype in (torch.float32, torch.float64):
        share, allowed, _ = beyond(dtype)
        assert share > allowed
