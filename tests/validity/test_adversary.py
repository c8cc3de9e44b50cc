"""A search for inputs that break what is claimed: random draws against shares, gradients against bounds at a point.

Claims about all but a share of inputs are searched with new inputs of the same law, and only their share counts. T13
at a given point claims every input, so that there the search may go anywhere. Where a graph cannot be read exactly,
nothing may be "met" at all. Each search is also run against a claim that is too strong, which it must break.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracles.rates import too_often
from sound_bounds import sound_bound
from torch import Tensor, nn

import sipp
from sipp.results.options import Method
from sipp.results.pruned import Pruned

N_CALIBRATION, N_HOLDOUT, N_FRESH, N_STEPS = 120, 40, 4000, 15
N_SEEDS = 6
CONFIDENCE = 0.9


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.second(torch.relu(self.first(x)))
        return self.head(torch.relu(h))


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.reshape(-1, 2, 3))
        return self.head(self.attention(h, h, h)[0].flatten(1))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Sigmoid(), nn.Linear(8, 3))


def with_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model(torch.rand(64, 6) * 3)  # statistics that are not those of a new layer
    return model


def convolutional() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 3, 2, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    )
    model(torch.rand(64, 6))
    return model


def hooked() -> nn.Module:
    model = chain()
    model[1].register_forward_hook(lambda module, args, output: 20 * output)
    return model


def patched() -> nn.Module:
    model = chain()
    model[1].forward = lambda x: 20 * torch.sin(3 * x)
    return model


def always_dropping() -> nn.Module:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(nn.functional.dropout(torch.tanh(self.first(x))))

    return Dropping()


READABLE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 3),
    "chain": chain,
    "dropout": with_dropout,
    "batch norm": with_batch_norm,
    "convolution": convolutional,
    "residual": Residual,
    "hook": hooked,
}
UNREADABLE: dict[str, Callable[[], nn.Module]] = {
    "patched": patched,
    "attention": Attentive,
    "functional dropout": always_dropping,
}


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make().eval()


def inputs(n: int, seed: int) -> Tensor:
    """A law with a tail: a maximum over a sample is exceeded now and then."""
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed)).exp() - 0.5


def pruned_by(model: nn.Module, seed: int, **options: Any) -> Pruned:
    method: Method = ("sipp-det", "magnitude", "sipp-hybrid")[seed % 3]  # type: ignore[assignment]
    options |= {"method": method, "draws": "fixed", "confidence": CONFIDENCE}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sipp.prune(model, inputs(N_CALIBRATION, seed), keep=0.6, **options)


def relative_errors(dense: nn.Module, pruned: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        f, g = (model.double()(x.double()) for model in (dense, pruned))
    return (g - f).norm(dim=1) / f.norm(dim=1)


def row_errors(dense: nn.Module, pruned: Pruned, x: Tensor) -> Iterator[tuple[float, Tensor]]:
    """For every Linear: its measured eps, and the largest |z^ - z| / z over rows and quadrants, at each point."""
    stated = {layer.name: layer.eps_measured for layer in pruned.layers}
    for name, module in dense.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.weight".lstrip(".") in stated:
            met: list[Tensor] = []
            handle = module.register_forward_pre_hook(lambda module, args, met=met: met.append(args[0].double()))
            with torch.no_grad():
                dense(x)
            handle.remove()
            w, v = (
                model.get_parameter(f"{name}.weight".lstrip(".")).detach().double() for model in (dense, pruned.model)
            )
            worst = torch.zeros(len(x), dtype=torch.float64)
            for s in (1, -1):
                for t in (1, -1):
                    a, part = (t * met[0]).clamp(min=0), (s * w).clamp(min=0)
                    changed = torch.where(part > 0, s * (v - w), 0.0)
                    z, moved = a @ part.T, (a @ changed.T).abs()
                    worst = torch.maximum(worst, torch.where(z > 0, moved / z, 0.0).amax(1))
            eps = stated[f"{name}.weight".lstrip(".")]
            assert eps is not None
            yield eps, worst


def sound_events(name: str, seeds: range, factor: float = 1.0) -> int:
    """How many networks have more new inputs beyond `factor` epsilon than their sound statement says."""
    events = 0
    for seed in seeds:
        model = made(READABLE[name], seed)
        pruned = pruned_by(model, seed, bound="sound")
        assert pruned.bound.met, pruned.bound.reason
        beyond = relative_errors(model, pruned.model, inputs(N_FRESH, 1000 + seed)) > factor * pruned.bound.epsilon
        events += float(beyond.double().mean()) > pruned.bound.coverage.share
    return events


@pytest.mark.parametrize("name", READABLE)
def test_sound_statements_keep_their_share(name: str) -> None:
    assert not too_often(sound_events(name, range(N_SEEDS)), N_SEEDS, 1 - CONFIDENCE)


def test_a_sound_statement_that_is_too_strong_is_broken() -> None:
    assert too_often(sound_events("linear", range(N_SEEDS), factor=0.5), N_SEEDS, 1 - CONFIDENCE)


def chain_events(seeds: range, factor: float = 1.0) -> int:
    """The same for T12, with the assumed constant (large enough not to be refuted) and with the measured one."""
    events = 0
    for seed in seeds:
        model = made(chain, seed)
        pruned = pruned_by(model, seed, c_constant=1e5, delta=0.05, holdout=inputs(N_HOLDOUT, 500 + seed))
        assert pruned.bound.met and pruned.measured.epsilon is not None, pruned.bound.reason
        errors = relative_errors(model, pruned.model, inputs(N_FRESH, 1000 + seed))
        claims = (
            (pruned.bound.epsilon, pruned.bound.coverage.share + pruned.bound.delta),
            (pruned.measured.epsilon, pruned.measured.network_share),
        )
        events += sum(float((errors > factor * epsilon).double().mean()) > share for epsilon, share in claims)
    return events


def test_network_statements_keep_their_share() -> None:
    assert not too_often(chain_events(range(N_SEEDS)), 2 * N_SEEDS, 1 - CONFIDENCE)


def test_a_network_statement_that_is_too_strong_is_broken() -> None:
    assert too_often(chain_events(range(N_SEEDS), factor=1e-7), 2 * N_SEEDS, 1 - CONFIDENCE)


def row_events(name: str, seeds: range, factor: float = 1.0) -> int:
    """How many layers have more new inputs beyond their measured eps than stated (T17, T19)."""
    events = 0
    for seed in seeds:
        model = made({**READABLE, **UNREADABLE}[name], seed)
        pruned = pruned_by(model, seed, holdout=inputs(N_HOLDOUT, 500 + seed))
        for eps, worst in row_errors(model, pruned, inputs(N_FRESH, 1000 + seed)):
            events += float((worst > factor * eps + 1e-9).double().mean()) > pruned.measured.share
    return events


@pytest.mark.parametrize("name", ["linear", "chain", "batch norm", "residual", "hook"])
def test_measured_row_statements_keep_their_share(name: str) -> None:
    """Of the layers as they are, whatever stands between them: also where there is no statement for the network."""
    assert not too_often(row_events(name, range(N_SEEDS)), N_SEEDS, 1 - CONFIDENCE)


def test_a_row_statement_that_is_too_strong_is_broken() -> None:
    assert too_often(row_events("chain", range(N_SEEDS), factor=0.05), N_SEEDS, 1 - CONFIDENCE)


def largest_share_of_bound(name: str, seed: int, n_steps: int, factor: float = 1.0) -> float:
    """The largest error / bound (T13) that ascent by gradients finds anywhere, from random starts of many sizes."""
    model = made(READABLE[name], seed).double()
    pruned = pruned_by(made(READABLE[name], seed), seed).model.double()
    sizes = torch.logspace(-3, 3, 24, dtype=torch.float64)[:, None]
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(seed)).double() * sizes
    worst = 0.0
    for _ in range(n_steps):
        bound = sound_bound(model, pruned, x)
        assert bound.absolute_B is not None
        moved = (pruned(x) - model(x)).norm(dim=1).detach()
        worst = max(worst, float((moved / (factor * bound.absolute_B)).nan_to_num(0.0).max()))
        at = x.detach().requires_grad_()
        gain = (pruned(at) - model(at)).norm(dim=1) / model(at).norm(dim=1)
        (slope,) = torch.autograd.grad(gain.sum(), at)
        x = x + 0.1 * sizes * slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return worst


@pytest.mark.parametrize("name", READABLE)
def test_no_input_anywhere_breaks_the_bound_at_a_point(name: str) -> None:
    assert largest_share_of_bound(name, 0, N_STEPS) <= 1 + 1e-12


def test_a_bound_at_a_point_that_is_too_strong_is_broken() -> None:
    assert largest_share_of_bound("linear", 0, 2, factor=0.9) > 1


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_exactly_is_never_met(name: str) -> None:
    for bound in ("paper", "sound"):
        model, new = made(UNREADABLE[name], 0), inputs(N_HOLDOUT, 500)
        pruned = pruned_by(model, 0, bound=bound, c_constant=1e5, delta=0.05, holdout=new)
        assert not pruned.bound.met and pruned.bound.reason
        assert pruned.measured is None if bound == "sound" else pruned.measured.epsilon is None
